"""Tensor-parallel convolutions that compute in half precision.

The ranks also communicate a layer's output in half precision; the gradient of its input
is summed in float32.

Shapes: B batch, C channels in, F channels out. A prime (F') marks the part that this rank holds.
"""

from .convolution import (
    ColumnParallelConvolution,
    GroupParallelConvolution,
    RowParallelConvolution,
)
from .mixed_precision import (
    BFloat16Conv1d,
    BFloat16Conv2d,
    Float16Conv1d,
    Float16Conv2d,
)


class BFloat16ColumnParallelConv1d(ColumnParallelConvolution, BFloat16Conv1d):
    """A `ColumnParallelConv1d` in bfloat16: (B, C, T) -> (B, F', T)."""


class BFloat16ColumnParallelConv2d(ColumnParallelConvolution, BFloat16Conv2d):
    """A `ColumnParallelConv2d` in bfloat16: (B, C, H, W) -> (B, F', H, W)."""


class BFloat16RowParallelConv1d(RowParallelConvolution, BFloat16Conv1d):
    """A `RowParallelConv1d` in bfloat16: (B, C', T) -> (B, F, T)."""


class BFloat16RowParallelConv2d(RowParallelConvolution, BFloat16Conv2d):
    """A `RowParallelConv2d` in bfloat16: (B, C', H, W) -> (B, F, H, W)."""


class BFloat16GroupParallelConv1d(GroupParallelConvolution, BFloat16Conv1d):
    """A `GroupParallelConv1d` in bfloat16: (B, C', T) -> (B, F', T)."""


class BFloat16GroupParallelConv2d(GroupParallelConvolution, BFloat16Conv2d):
    """A `GroupParallelConv2d` in bfloat16: (B, C', H, W) -> (B, F', H, W)."""


class Float16ColumnParallelConv1d(ColumnParallelConvolution, Float16Conv1d):
    """A `ColumnParallelConv1d` in float16: (B, C, T) -> (B, F', T)."""


class Float16ColumnParallelConv2d(ColumnParallelConvolution, Float16Conv2d):
    """A `ColumnParallelConv2d` in float16: (B, C, H, W) -> (B, F', H, W)."""


class Float16RowParallelConv1d(RowParallelConvolution, Float16Conv1d):
    """A `RowParallelConv1d` in float16: (B, C', T) -> (B, F, T)."""


class Float16RowParallelConv2d(RowParallelConvolution, Float16Conv2d):
    """A `RowParallelConv2d` in float16: (B, C', H, W) -> (B, F, H, W)."""


class Float16GroupParallelConv1d(GroupParallelConvolution, Float16Conv1d):
    """A `GroupParallelConv1d` in float16: (B, C', T) -> (B, F', T)."""


class Float16GroupParallelConv2d(GroupParallelConvolution, Float16Conv2d):
    """A `GroupParallelConv2d` in float16: (B, C', H, W) -> (B, F', H, W)."""
