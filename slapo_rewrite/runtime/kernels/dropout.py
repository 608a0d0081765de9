"""Random numbers that the backward pass draws again, so that no mask is stored."""

import torch
from torch import Tensor

from .launch import float32, jit, tl


def draw_seed(x: Tensor) -> Tensor:
    """A seed from the generator of x's device, left there: (1,), int64.

    Restoring the generator's state, as recomputation does, draws it again.
    """
    return torch.randint(2**63 - 1, (1,), device=x.device)


def keep_scale(p: float) -> float:
    """The factor of kept elements, which preserves the mean."""
    return 1 / (1 - p) if p < 1 else 0.0


@jit
def kept(seed, rows, first, p, block_d: tl.constexpr):
    """Which elements dropout keeps, each with probability 1 - p.

    Of these rows, `block_d` columns from `first` on, a multiple of four. A pure function
    of the seed and of an element's row and column. Philox gives four numbers at once;
    seven rounds pass the BigCrush tests (Salmon et al. 2011).
    """
    groups = (first // 4 + tl.arange(0, block_d // 4))[None, :]
    row = rows.to(tl.int32)[:, None] + tl.zeros_like(groups)
    column = tl.zeros_like(row) + groups
    zero = tl.zeros_like(row)
    a, b, c, d = tl.philox(tl.load(seed), row, column, zero, zero, 7)
    bits = tl.interleave(tl.interleave(a, b), tl.interleave(c, d))
    # At most the largest float below 2 ** 32: what is kept at p = 1 is scaled by 0.
    return bits >= tl.minimum(float32(p) * 4294967296.0, 4294967040.0).to(tl.uint32)
