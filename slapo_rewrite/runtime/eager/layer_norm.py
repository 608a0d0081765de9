"""Layer normalisation after a residual addition, in PyTorch's operations.

Shapes: D features.
Source: Ba et al. 2016, arXiv:1607.06450.
"""

from torch import Tensor, nn

from slapo_rewrite.runtime.kernels.plain import dropped


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    norm: nn.Module | None = None,
    linear: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The normalised rows of dropout(linear(x)) + residual, and the sum.

    Shapes: x (..., D') where a layer makes it (..., D), residual (..., D), weight and
        bias (D,) or None -> (..., D) each.

    Args:
        x: What is added to the residual.
        residual: The stream that runs past the layers.
        weight: The scale.
        bias: The shift.
        eps: Added to the variance.
        norm: The norm module with these three, if there is one: it is called.
        linear: The linear layer before dropout, if there is one.
        dropout: The dropout module, or the dropout rate.
    """
    x = x if linear is None else linear(x)
    total = dropped(x, dropout) + residual
    if norm is not None:
        return norm(total), total
    y = nn.functional.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return y, total


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    norm: nn.Module | None = None,
    linear: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """The normalised rows of `residual_layer_norm`, where nothing else reads the sum."""
    normed, _ = residual_layer_norm(
        x,
        residual,
        weight,
        bias,
        eps,
        norm=norm,
        linear=linear,
        dropout=dropout,
    )
    return normed
