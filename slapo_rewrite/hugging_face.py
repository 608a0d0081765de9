"""What the tool knows of the conventions of Hugging Face's models."""

import sys
from typing import Any

# The arguments and results in which a model hands on what it keeps of earlier tokens. A layer that
# runs twice would fill it twice, and each rank keeps its own heads in it.
CACHES = (
    *("past_key_values", "past_key_value", "layer_past", "cache_params", "past_states", "mems"),
)
# What transformers calls it since 5.24; elsewhere the word means other things as well.
CACHE = "cache"
CACHE_CLASSES = "transformers.cache_utils"

# Functions of a module that read nothing of what it holds, but what it is wrapped in.
ASKS_WHAT_WRAPS = ("is_fsdp_managed_module",)

# Files of transformers that keep values in the precision in which they are given, or make masks in
# it, of whose dtype they read the least number alone.
KEEPS_PRECISION = ("transformers/cache_utils.py", "transformers/masking_utils.py")

# The argument that has a model keep what it computed of tokens for those that follow.
KEEPS_TOKENS = "use_cache"


def is_cache(name: str, value: Any) -> bool:
    """Whether an argument or a result is what a model keeps of earlier tokens."""
    return name in CACHES or any(c.__module__ == CACHE_CLASSES for c in type(value).__mro__)


def names_of_caches(module: str) -> tuple[str, ...]:
    """The names of such arguments in a module: the short one where it has transformers' classes."""
    known = vars(sys.modules[module]).values() if module in sys.modules else ()
    has = any(isinstance(v, type) and v.__module__ == CACHE_CLASSES for v in known)
    return (*CACHES, CACHE) if has else CACHES


# Where the hooks are from that collect what modules give back: nothing once the model's `forward`
# has ended, so that they may run twice.
COLLECTING = "transformers.utils.output_capturing"
