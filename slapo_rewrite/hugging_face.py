"""The conventions of Hugging Face's models that the tool relies on."""

import sys
from typing import Any

# The arguments and results that are caches of earlier tokens. A layer that runs twice would fill
# its cache twice, and each rank stores its own heads there.
CACHES = (
    *("past_key_values", "past_key_value", "layer_past", "cache_params", "past_states", "mems"),
)
# The name of caches in transformers since 5.24; elsewhere the word has other meanings as well.
CACHE = "cache"
CACHE_CLASSES = "transformers.cache_utils"

# Functions of a module that read how it is wrapped, but not its contents.
ASKS_WHAT_WRAPS = ("is_fsdp_managed_module",)

# Files of transformers that keep the precision of values, or make masks in it and only read the
# dtype's smallest number.
KEEPS_PRECISION = ("transformers/cache_utils.py", "transformers/masking_utils.py")

# The argument that makes a model return a cache for later tokens.
KEEPS_TOKENS = "use_cache"


def is_cache(name: str, value: Any) -> bool:
    """Whether an argument or a result is a cache of earlier tokens."""
    return name in CACHES or any(c.__module__ == CACHE_CLASSES for c in type(value).__mro__)


def names_of_caches(module: str) -> tuple[str, ...]:
    """The names of caches in a module; `CACHE` only if it imports transformers' cache classes."""
    known = vars(sys.modules[module]).values() if module in sys.modules else ()
    has = any(isinstance(v, type) and v.__module__ == CACHE_CLASSES for v in known)
    return (*CACHES, CACHE) if has else CACHES


# The module of transformers' hooks that collect outputs of submodules. They do nothing after the
# model's `forward` has ended, so they may run twice.
COLLECTING = "transformers.utils.output_capturing"
