# Written by slapo-rewrite 0.2.0 for modeling_llama.py; rewrite.json says from what.
"""Grouped-query attention on more ranks than there are key and value heads.

Shapes: D features in, F features out. A prime (F') marks the part that this rank holds.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .guards import check_parts
from .shards import PiecewiseShard, rank, sum_parts, world_size
from .tensor_parallel import all_reduce_gradient, collective, record_shard, unchanged


@dataclass(frozen=True)
class ReplicatedShard(PiecewiseShard):
    """A shard by units (heads) of which there may be fewer than ranks.

    Then each unit is held by several consecutive ranks, as many for each.
    """

    def replicas(self) -> int:
        """How many ranks hold the same part."""
        units, world = self.size // self.multiple_of, world_size()
        return world // units if world > units and world % units == 0 else 1

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The pieces of the full axis, (start, stop), that a rank holds."""
        if self.replicas() == 1:
            return super().ranges(rank)
        start = rank // self.replicas() * self.multiple_of
        return [(start, start + self.multiple_of)]

    def sum_replicas(self, part: Tensor) -> Tensor:
        """Sums a tensor over the ranks that hold the same part."""
        shape = list(part.shape)
        shape[self.axis] = self.size
        full = part.new_zeros(shape)
        start, end = self.ranges(rank())[0]
        full.narrow(self.axis, start, end - start).copy_(part)
        return self.cut(sum_parts(full))


class KeyValueParallelLinear(nn.Linear):
    """A linear layer to key or value heads, split over the heads: (..., D) -> (..., F').

    With more ranks than heads, consecutive ranks hold the same head, the one that their
    query heads attend to, and sum their gradients of its weights.

    Args:
        in_features: D.
        out_features: F; the attribute of that name is F'.
        bias: Whether a bias is added.
        device: Where the parameters are made.
        dtype: Their type.
        multiple_of: A head's size.
        reduce_input_gradient: Sum the input's gradient over the ranks. False where it
            is summed once for several layers.

    Attributes:
        replicas: How many ranks hold the same heads.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        multiple_of: int,
        reduce_input_gradient: bool = True,
    ) -> None:
        shard = ReplicatedShard(0, out_features, multiple_of)
        super().__init__(in_features, shard.local_size(), bias, device, dtype)
        self.shard, self.replicas = shard, shard.replicas()
        self.enter = all_reduce_gradient if reduce_input_gradient else unchanged
        record_shard(self, "weight", shard)
        if bias:
            record_shard(self, "bias", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., D) to (..., F')."""
        check_parts(self)
        input = self.enter(input)
        if self.replicas == 1:
            return super().forward(input)
        weight, bias = self.shared(self.weight), self.shared(self.bias)
        return nn.functional.linear(input, weight, bias)

    def shared(self, parameter: Tensor | None) -> Any:
        """The parameter; its gradient is summed over the ranks that hold it."""
        if parameter is None:
            return None
        return collective(parameter, unchanged, self.shard.sum_replicas)
