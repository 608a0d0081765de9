"""Gated linear units in PyTorch's operations.

Shapes: F features.
Source: Shazeer 2020, arXiv:2002.05202.
"""

from torch import Tensor, nn

from slapo_rewrite.runtime.kernels.activations import activated
from slapo_rewrite.runtime.kernels.plain import dropped


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(silu(gate) * up).

    Shapes: gate and up (..., F) -> (..., F).

    Args:
        gate: The operand of the activation.
        up: The factor of the activated gate.
        activation: The activation module, if there is one.
        dropout: The dropout module, or the dropout rate.
    """
    return dropped(activated(gate, "silu", activation) * up, dropout)


def reglu(
    gate: Tensor,
    up: Tensor,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(relu(gate) * up).

    Shapes: gate and up (..., F) -> (..., F).

    Args:
        gate: The operand of the activation.
        up: The factor of the activated gate.
        activation: The activation module, if there is one.
        dropout: The dropout module, or the dropout rate.
    """
    return dropped(activated(gate, "relu", activation) * up, dropout)


def geglu(
    gate: Tensor,
    up: Tensor,
    approximate: str = "none",
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(gelu(gate) * up).

    Shapes: gate and up (..., F) -> (..., F).

    Args:
        gate: The operand of the activation.
        up: The factor of the activated gate.
        approximate: As `torch.nn.functional.gelu` takes it.
        activation: The activation module, if there is one.
        dropout: The dropout module, or the dropout rate.
    """
    kind = "gelu_tanh" if approximate == "tanh" else "gelu"
    return dropped(activated(gate, kind, activation) * up, dropout)
