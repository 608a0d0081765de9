"""Split norms that compute in float32 from inputs in half precision.

Shapes: B batch, C channels. A prime (C') marks the part that this rank holds.
"""

from .mixed_norms import Float32BatchNorm1d, Float32BatchNorm2d
from .normalization import ParallelBatchNorm


class Float32ParallelBatchNorm1d(ParallelBatchNorm, Float32BatchNorm1d):
    """A `ParallelBatchNorm1d` in float32: (B, C') or (B, C', T) to the same."""


class Float32ParallelBatchNorm2d(ParallelBatchNorm, Float32BatchNorm2d):
    """A `ParallelBatchNorm2d` that computes in float32: (B, C', H, W) to the same."""
