"""Biases and activations in PyTorch's operations.

Shapes: F features.
"""

from torch import Tensor, nn

from slapo_rewrite.runtime.kernels.activations import activated
from slapo_rewrite.runtime.kernels.bias_gelu import gelu_kind
from slapo_rewrite.runtime.kernels.plain import dropped


def bias_gelu(
    x: Tensor,
    bias: Tensor | None,
    approximate: str = "none",
    *,
    activation: nn.Module | None = None,
) -> Tensor:
    """gelu(x + bias).

    Shapes: x (..., F), bias (F,) or None -> (..., F).

    Args:
        x: What the bias is added to.
        bias: The bias.
        approximate: As `torch.nn.functional.gelu` takes it.
        activation: The activation module, if there is one.
    """
    x = x if bias is None else x + bias
    return activated(x, gelu_kind(approximate), activation)


def linear_gelu(
    x: Tensor,
    linear: nn.Module,
    approximate: str = "none",
    *,
    activation: nn.Module | None = None,
) -> Tensor:
    """gelu(linear(x)); `approximate` is as `torch.nn.functional.gelu` takes it."""
    return activated(linear(x), gelu_kind(approximate), activation)


def linear_activation(
    x: Tensor,
    linear: nn.Module,
    kind: str,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(activation(linear(x))); the rest is as in `activation_dropout`."""
    return dropped(activated(linear(x), kind, activation), dropout)


def activation_dropout(
    x: Tensor,
    kind: str,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(activation(x)).

    Args:
        x: The operand of the activation.
        kind: "relu", "silu", "gelu", "gelu_tanh" or "quick_gelu".
        activation: The module of that kind, if there is one.
        dropout: The dropout module, or the dropout rate.
    """
    return dropped(activated(x, kind, activation), dropout)


def quick_gelu(x: Tensor, *, activation: nn.Module | None = None) -> Tensor:
    """X sigmoid(1.702 x), or the module's result, if there is one."""
    return activated(x, "quick_gelu", activation)
