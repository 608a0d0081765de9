"""Rotary position embedding in PyTorch's operations.

Shapes: B batch, N query heads, K key heads, T tokens, H head size, R <= H rotated part.
Source: Su et al. 2021, arXiv:2104.09864.
"""

from torch import Tensor

from slapo_rewrite.runtime.kernels.rotary import rotate_reference


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates the first R features of every head of q and k; the others pass.

    Shapes: q (B, N, T, H), k (B, K, T, H), cos and sin (B or 1, T, R) -> q's and k's;
        with `unsqueeze_dim` 2, q (B, T, N, H) and k (B, T, K, H).

    Args:
        q: Queries.
        k: Keys.
        cos: Cosines, of each angle twice: the two halves of R.
        sin: Sines, likewise.
        unsqueeze_dim: Where q and k have their heads.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
