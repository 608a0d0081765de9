"""What the tool knows of the conventions of Hugging Face's models."""

# The arguments and results in which a model hands on what it keeps of earlier tokens. A layer that
# runs twice would fill it twice, and each rank keeps its own heads in it.
CACHES = (
    "past_key_values",
    "past_key_value",
    "layer_past",
    "cache_params",
    "past_states",
    "mems",
)

# Functions of a module that read nothing of what it holds, but what it is wrapped in.
ASKS_WHAT_WRAPS = ("is_fsdp_managed_module",)

# Files of transformers that keep values in the precision in which they are given.
KEEPS_PRECISION = ("transformers/cache_utils.py",)

# The argument that has a model keep what it computed of tokens for those that follow.
KEEPS_TOKENS = "use_cache"
