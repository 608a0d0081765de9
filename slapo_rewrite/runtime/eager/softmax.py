"""Softmax of attention scores in PyTorch's operations.

Shapes: B batch, N query heads, T tokens, S tokens attended to.
Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
"""

from torch import Tensor

from slapo_rewrite.runtime.kernels.softmax import masked_softmax_reference


def masked_softmax(
    x: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    keep: Tensor | None = None,
) -> Tensor:
    """softmax(x * scale + mask) over the last axis, in float32.

    Shapes: x (B, N, T, S) or without its first axes, mask broadcast to it -> as x.

    Args:
        x: Scores.
        mask: Numbers to add, if any; True adds 1.
        scale: The factor of the scores.
        keep: Which scores count, if not all.
    """
    return masked_softmax_reference(x, mask, scale, keep)
