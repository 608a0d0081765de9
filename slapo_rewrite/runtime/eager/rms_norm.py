"""Root mean square normalisation in PyTorch's operations.

Shapes: D features.
Source: Zhang & Sennrich 2019, arXiv:1910.07467.
"""

from torch import Tensor, nn

from slapo_rewrite.runtime.kernels.plain import dropped
from slapo_rewrite.runtime.kernels.rms_norm import rms_norm_reference


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "input",
) -> Tensor:
    """Divides each row by its root mean square and multiplies it by the weight.

    Shapes: x (..., D), weight (D,) -> (..., D).

    Args:
        x: The rows.
        weight: The scale, or None for none.
        eps: Added to the mean of the squares.
        offset: Added to the weight; 1 in Gemma.
        cast: When the normalised rows leave float32: "input" to x's dtype before they
            are multiplied (Llama), "weight" to the weight's dtype before (T5),
            "output" to x's dtype after (Gemma).
    """
    return rms_norm_reference(x, weight, eps, offset, cast)


def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    norm: nn.Module | None = None,
    offset: float = 0.0,
    cast: str = "input",
    dropout: nn.Module | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The normalised rows of residual + dropout(x), and the sum.

    Shapes: x and residual (..., D), weight (D,) -> (..., D) each.

    Args:
        x: What is added to the residual.
        residual: The stream that runs past the layers.
        weight: The scale, or None for none.
        eps: Added to the mean of the squares.
        norm: The norm module with these, if there is one: it is called.
        offset: Added to the weight; 1 in Gemma.
        cast: When the normalised rows leave float32: with the dtype of the "input", of
            the "weight" or of the "output".
        dropout: The module or the rate of the dropout of x.
    """
    total = residual + dropped(x, dropout)
    if norm is not None:
        return norm(total), total
    return rms_norm_reference(total, weight, eps, offset, cast), total
