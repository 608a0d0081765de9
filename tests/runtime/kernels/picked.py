"""Kernels as one file, as in an output: only the definitions in use."""

from __future__ import annotations

from slapo_rewrite.emit import kernels

ORDER = tuple(kernels.libraries())
PUBLIC = {
    "rms_norm": "rms_norm",
    "residual_rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "residual_layer_norm": "layer_norm",
    "add_layer_norm": "layer_norm",
    "dropout_residual": "dropout_residual",
    "gated": "gated",
    "swiglu": "gated",
    "reglu": "gated",
    "geglu": "gated",
    "bias_activation": "bias_gelu",
    "bias_gelu": "bias_gelu",
    "linear_activation": "bias_gelu",
    "linear_gelu": "bias_gelu",
    "activation_dropout": "bias_gelu",
    "quick_gelu": "bias_gelu",
    "rotary": "rotary",
    "cross_entropy": "cross_entropy",
    "linear_each": "linear_each",
    "linear_cross_entropy": "linear_cross_entropy",
    "masked_softmax": "softmax",
}


def one_file(*names: str) -> str:
    """The public functions of these names, and all that they need."""
    return kernels.picked(names).text
