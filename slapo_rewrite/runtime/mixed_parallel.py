"""Tensor-parallel layers that compute in half precision.

The ranks also communicate a layer's output in half precision; the gradient of its input
is summed in float32.

Shapes: D features in, F features out. A prime (F') marks the part that this rank holds.
"""

from torch import Tensor, nn

from .grouped_query import KeyValueParallelLinear
from .guards import check_parts
from .mixed_precision import BFloat16Linear, Float16Linear
from .replicated import ReplicatedLinear, with_summed_gradient
from .shards import world_size
from .tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_reduce_gradient,
)


class BFloat16ColumnParallelLinear(ColumnParallelLinear, BFloat16Linear):
    """A `ColumnParallelLinear` that computes in bfloat16: (..., D) -> (..., F')."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to (..., F'), or to (..., F) with `gather_output`."""
        # Its own: kernels read the parameters of layers that have the base's `forward`.
        return super().forward(input)


class BFloat16KeyValueParallelLinear(KeyValueParallelLinear, BFloat16Linear):
    """A `KeyValueParallelLinear` that computes in bfloat16: (..., D) -> (..., F')."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to (..., F'), which is in bfloat16."""
        if self.replicas == 1:
            return super().forward(input)
        check_parts(self)
        weight, bias = self.shared(self.weight), self.shared(self.bias)
        bias = None if bias is None else bias.bfloat16()
        x = self.enter(input).bfloat16()
        return nn.functional.linear(x, weight.bfloat16(), bias)


class BFloat16RowParallelLinear(RowParallelLinear, BFloat16Linear):
    """A `RowParallelLinear` that computes in bfloat16: (..., D') -> (..., F)."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D') to (..., F), summed in bfloat16 as `reduce` does it."""
        if world_size() == 1:
            return super().forward(input)
        check_parts(self)
        y = nn.functional.linear(input.bfloat16(), self.weight.bfloat16())
        y, bias = self.reduce(y, self.bias)
        return y if bias is None else y + bias.to(y.dtype)


class BFloat16ReplicatedLinear(ReplicatedLinear, BFloat16Linear):
    """A `ReplicatedLinear` that computes in bfloat16: (B, T', D) -> (B, T', F)."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps D features to F, which are in bfloat16."""
        weight, bias = all_reduce_gradient(self.weight), with_summed_gradient(self.bias)
        bias = None if bias is None else bias.bfloat16()
        return nn.functional.linear(input.bfloat16(), weight.bfloat16(), bias)


class Float16ColumnParallelLinear(ColumnParallelLinear, Float16Linear):
    """A `ColumnParallelLinear` that computes in float16: (..., D) -> (..., F')."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to (..., F'), or to (..., F) with `gather_output`."""
        # Its own: kernels read the parameters of layers that have the base's `forward`.
        return super().forward(input)


class Float16KeyValueParallelLinear(KeyValueParallelLinear, Float16Linear):
    """A `KeyValueParallelLinear` that computes in float16: (..., D) -> (..., F')."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to (..., F'), which is in float16."""
        if self.replicas == 1:
            return super().forward(input)
        check_parts(self)
        weight, bias = self.shared(self.weight), self.shared(self.bias)
        bias = None if bias is None else bias.half()
        x = self.enter(input).half()
        return nn.functional.linear(x, weight.half(), bias)


class Float16RowParallelLinear(RowParallelLinear, Float16Linear):
    """A `RowParallelLinear` that computes in float16: (..., D') -> (..., F)."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D') to (..., F), summed in float16 as `reduce` does it."""
        if world_size() == 1:
            return super().forward(input)
        check_parts(self)
        y = nn.functional.linear(input.half(), self.weight.half())
        y, bias = self.reduce(y, self.bias)
        return y if bias is None else y + bias.to(y.dtype)


class Float16ReplicatedLinear(ReplicatedLinear, Float16Linear):
    """A `ReplicatedLinear` that computes in float16: (B, T', D) -> (B, T', F)."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps D features to F, which are in float16."""
        weight, bias = all_reduce_gradient(self.weight), with_summed_gradient(self.bias)
        bias = None if bias is None else bias.half()
        return nn.functional.linear(input.half(), weight.half(), bias)
