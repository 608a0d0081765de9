# Written by slapo-rewrite 0.2.0 for modeling_llama.py; rewrite.json says from what.
"""Keys and values of grouped-query attention, on more ranks than there are heads of them.

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
    """A shard whose units may be fewer than the ranks.

    Then every unit is held by as many ranks in a row as there are ranks for each.
    """

    def replicas(self) -> int:
        """How many ranks hold the same part; more than one where units are few."""
        units, world = self.size // self.multiple_of, world_size()
        return world // units if world > units and world % units == 0 else 1

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Where what a rank holds lies on the full axis."""
        if self.replicas() == 1:
            return super().ranges(rank)
        start = rank // self.replicas() * self.multiple_of
        return [(start, start + self.multiple_of)]

    def sum_replicas(self, part: Tensor) -> Tensor:
        """The sum of what the ranks have that hold the same part."""
        shape = list(part.shape)
        shape[self.axis] = self.size
        full = part.new_zeros(shape)
        start, end = self.ranges(rank())[0]
        full.narrow(self.axis, start, end - start).copy_(part)
        return self.cut(sum_parts(full))


class KeyValueParallelLinear(nn.Linear):
    """A linear layer to key or value heads, split over the heads: (..., D) -> (..., F').

    With more ranks than heads, several ranks in a row hold the same head, the one that
    their query heads attend to, and add up their gradients for its weights.

    Args:
        in_features: D.
        out_features: F, of the whole layer; the attribute of that name is F'.
        bias: Whether a bias is added.
        device: Where the parameters are made.
        dtype: Their type.
        multiple_of: A head's size.
        reduce_input_gradient: Sum the input's gradient over the ranks. Off where
            that is done once for several layers.

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
        """A parameter, whose gradient the ranks that hold it add up."""
        if parameter is None:
            return None
        return collective(parameter, unchanged, self.shard.sum_replicas)
