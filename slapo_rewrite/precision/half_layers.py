"""Layers that are replaced by layers with casts inside.

Layers with products are replaced as a whole by ones in half precision. Norms after them, in a
`Sequential` for example, get half precision where no method can cast it, so they are replaced by
ones that compute in float32.
"""

from __future__ import annotations

import inspect
from types import CodeType

from torch import nn

from slapo_rewrite.model.layers import qualified

# The replacements: runtime module, and class name without the prefix of the precision.
HALF_LAYERS = {
    "torch.nn.modules.linear.Linear": ("mixed_precision", "Linear"),
    "torch.nn.modules.conv.Conv1d": ("mixed_precision", "Conv1d"),
    "torch.nn.modules.conv.Conv2d": ("mixed_precision", "Conv2d"),
    "torch.nn.modules.conv.Conv3d": ("mixed_precision", "Conv3d"),
    "torch.nn.modules.activation.MultiheadAttention": ("mixed_attention", "MultiheadAttention"),
    "transformers.pytorch_utils.Conv1D": ("mixed_conv1d", "Conv1D"),
}
# The replacements that compute in float32: runtime module and class name.
FLOAT32_LAYERS = {
    f"torch.nn.modules.{module}.{name}": ("mixed_norms", f"Float32{name}")
    for module, names in {
        "normalization": ("LayerNorm", "GroupNorm", "RMSNorm"),
        "batchnorm": ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
    }.items()
    for name in names
}


def half_base(cls: type) -> type | None:
    """The layer with a counterpart in half precision among a class and its bases."""
    return next((c for c in cls.__mro__ if qualified(c) in HALF_LAYERS), None)


def computes_product(cls: type, code: CodeType) -> bool:
    """Whether a code object is that of a method by which such a layer computes."""
    base = half_base(cls)
    own = [c for c in base.__mro__ if issubclass(c, nn.Module)][:-1] if base is not None else []
    methods = (vars(c).get(name) for c in own for name in ("forward", "_conv_forward"))
    return any(inspect.isfunction(m) and m.__code__ is code for m in methods)
