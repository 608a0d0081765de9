"""Layers whose products the whole layer stands for: another one computes in half precision."""

from __future__ import annotations

import inspect
from types import CodeType

from slapo_rewrite.model.layers import qualified

# The modules that define these, and what they are called behind the name of the precision.
HALF_LAYERS = {
    "torch.nn.modules.linear.Linear": ("mixed_precision", "Linear"),
    "torch.nn.modules.conv.Conv1d": ("mixed_precision", "Conv1d"),
    "torch.nn.modules.conv.Conv2d": ("mixed_precision", "Conv2d"),
    "torch.nn.modules.conv.Conv3d": ("mixed_precision", "Conv3d"),
    "transformers.pytorch_utils.Conv1D": ("mixed_conv1d", "Conv1D"),
}


def half_base(cls: type) -> type | None:
    """The layer with a counterpart in half precision that a class is or is derived from."""
    return next((c for c in cls.__mro__ if qualified(c) in HALF_LAYERS), None)


def computes_product(cls: type, code: CodeType) -> bool:
    """Whether a code is that by which such a layer computes."""
    base = half_base(cls)
    forward = vars(base).get("forward") if base is not None else None
    return inspect.isfunction(forward) and forward.__code__ is code
