"""Dropout and a residual addition in PyTorch's operations.

Shapes: D features.
"""

from torch import Tensor, nn

from slapo_rewrite.runtime.kernels.plain import dropped


def dropout_residual(
    x: Tensor,
    residual: Tensor,
    *,
    linear: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(linear(x)) + residual.

    Shapes: x (..., D') where a layer makes it (..., D), residual (..., D) -> (..., D).

    Args:
        x: What is added to the residual.
        residual: The stream that runs past the layers.
        linear: The linear layer before dropout, if there is one.
        dropout: The dropout module, or the dropout rate.
    """
    x = x if linear is None else linear(x)
    return dropped(x, dropout) + residual
