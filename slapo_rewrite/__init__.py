"""Schedules PyTorch models by rewriting their source.

The command is `slapo-rewrite`; from Python, `slapo_rewrite.emit.rewrite.rewrite` gives the same
files in memory.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# What a schedule says of the weights of a module that takes another's place.
_WEIGHTS = ("concat", "split", "transpose")


def __getattr__(name: str) -> Any:
    if name not in _WEIGHTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("slapo_rewrite.runtime.weights"), name)
