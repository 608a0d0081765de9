# Written by slapo-rewrite 0.2.0 for modeling_gpt2.py; rewrite.json says from what.
"""Tensor-parallel forms of GPT-2's Conv1D, a linear layer with its weight transposed.

Shapes: D features in, F features out. A prime (F') marks the part that this rank holds.
"""

from dataclasses import replace

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .guards import check_parts
from .shards import Parts, Shard, world_size
from .tensor_parallel import (
    Reduction,
    all_reduce_gradient,
    gather_if_sharded,
    record_shard,
    sum_now,
    unchanged,
)


class ColumnParallelConv1D(Conv1D):
    """A Conv1D split over its output features: (..., D) -> (..., F').

    Args:
        nf: F; the attribute of that name is F'.
        nx: D.
        parts: Divides the output: one block, or several packed along it.
        multiple_of: Shares are equal multiples of it; 0: their sizes may differ.
        reduce_input_gradient: Sum the input's gradient over the ranks. False where it
            is summed once for several layers.
        gather_output: Return (..., F) on every rank.
    """

    def __init__(
        self,
        nf: int,
        nx: int,
        *,
        parts: Parts = Shard,
        multiple_of: int = 0,
        reduce_input_gradient: bool = True,
        gather_output: bool = False,
    ) -> None:
        shard = parts(1, nf, multiple_of)
        super().__init__(shard.local_size(), nx)
        self.enter = all_reduce_gradient if reduce_input_gradient else unchanged
        self.output_shard = replace(shard, axis=-1) if gather_output else None
        record_shard(self, "weight", shard)
        record_shard(self, "bias", replace(shard, axis=0))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D) to (..., F'), or to (..., F) with `gather_output`."""
        check_parts(self)
        return gather_if_sharded(super().forward(self.enter(x)), self.output_shard)


class RowParallelConv1D(Conv1D):
    """A Conv1D split over its input features: (..., D') -> (..., F).

    Args:
        nf: F.
        nx: D; the attribute of that name is D'.
        parts: Divides the input: one block, or several packed along it.
        multiple_of: Shares are equal multiples of it; 0: their sizes may differ.
        reduce: How the ranks' partial outputs are summed.
    """

    def __init__(
        self,
        nf: int,
        nx: int,
        *,
        parts: Parts = Shard,
        multiple_of: int = 0,
        reduce: Reduction = sum_now,
    ) -> None:
        shard = parts(0, nx, multiple_of)
        super().__init__(nf, shard.local_size())
        self.reduce = reduce
        record_shard(self, "weight", shard)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D') to (..., F), summed as `reduce` does it."""
        check_parts(self)
        if world_size() == 1:
            return super().forward(x)
        y, bias = self.reduce(x @ self.weight, self.bias)
        return y if bias is None else y + bias.to(y.dtype)
