"""Schedules PyTorch models by rewriting their source.

The command is `slapo-rewrite`. From Python, `slapo_rewrite.emit.rewrite.rewrite` returns the same
files in memory.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

# The names that schedules import from here, and their modules, most of which import torch.
_FOR_SCHEDULES = {
    # the weights of replaced modules
    **dict.fromkeys(("concat", "split", "transpose"), "runtime.weights"),
    # values of knobs
    **dict.fromkeys(("Choices", "Range"), "schedule.choices"),
    # patterns
    "call_module": "patterns.pattern",
    **dict.fromkeys(("Pattern", "ModulePattern"), "model.pattern_classes"),
}


def __getattr__(name: str) -> Any:
    if name not in _FOR_SCHEDULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FOR_SCHEDULES[name]}"), name)
