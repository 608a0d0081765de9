"""Tensor-parallel forms of GPT-2's Conv1D that compute in half precision.

Shapes: D features in, F features out. A prime (F') marks the part that this rank holds.
"""

from torch import Tensor

from .conv1d import ColumnParallelConv1D, RowParallelConv1D
from .guards import check_parts
from .mixed_conv1d import BFloat16Conv1D, Float16Conv1D
from .shards import world_size


class BFloat16ColumnParallelConv1D(ColumnParallelConv1D, BFloat16Conv1D):
    """A `ColumnParallelConv1D` that computes in bfloat16: (..., D) -> (..., F')."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D) to (..., F'), or to (..., F) with `gather_output`."""
        # Its own: kernels read the parameters of layers that have the base's `forward`.
        return super().forward(x)


class BFloat16RowParallelConv1D(RowParallelConv1D, BFloat16Conv1D):
    """A `RowParallelConv1D` that computes in bfloat16: (..., D') -> (..., F)."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D') to (..., F), summed in bfloat16 as `reduce` does it."""
        if world_size() == 1:
            return super().forward(x)
        check_parts(self)
        y, bias = self.reduce(x.bfloat16() @ self.weight.bfloat16(), self.bias)
        return y if bias is None else y + bias.to(y.dtype)


class Float16ColumnParallelConv1D(ColumnParallelConv1D, Float16Conv1D):
    """A `ColumnParallelConv1D` that computes in float16: (..., D) -> (..., F')."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D) to (..., F'), or to (..., F) with `gather_output`."""
        # Its own: kernels read the parameters of layers that have the base's `forward`.
        return super().forward(x)


class Float16RowParallelConv1D(RowParallelConv1D, Float16Conv1D):
    """A `RowParallelConv1D` that computes in float16: (..., D') -> (..., F)."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D') to (..., F), summed in float16 as `reduce` does it."""
        if world_size() == 1:
            return super().forward(x)
        check_parts(self)
        y, bias = self.reduce(x.half() @ self.weight.half(), self.bias)
        return y if bias is None else y + bias.to(y.dtype)
