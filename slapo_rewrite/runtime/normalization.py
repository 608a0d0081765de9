"""Norms of which each rank holds some of the channels.

Shapes: B batch, C channels, S any number of spatial axes. A prime (C') marks the part
that this rank holds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .tensor_parallel import (
    Shard,
    block_sizes,
    gather_if_sharded,
    part_size,
    record_shard,
)


class ParallelBatchNorm(nn.Module):
    """What batch norms have in common that are split over their channels.

    Every channel has statistics of its own, so nothing is communicated.

    Args:
        num_features: C, of the whole layer; the attribute of that name is C'.
        args: The further arguments of the torch class.
        parts: Blocks packed along the channels, as in `block_sizes`.
        gather_output: Return (B, C, *S) on every rank.
        kwargs: The further keyword arguments of the torch class.
    """

    def __init__(
        self,
        num_features: int,
        *args: Any,
        parts: int | Sequence[int] = 1,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        shard = Shard(0, block_sizes(num_features, parts))
        super().__init__(shard.local_size(), *args, **kwargs)
        self.output_shard = replace(shard, axis=1) if gather_output else None
        for name in ("weight", "bias", "running_mean", "running_var"):
            if getattr(self, name) is not None:
                record_shard(self, name, shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C', *S) to the same, or to (B, C, *S) with `gather_output`."""
        return gather_if_sharded(super().forward(input), self.output_shard)


class ParallelBatchNorm1d(ParallelBatchNorm, nn.BatchNorm1d):
    """A BatchNorm1d split over its channels: (B, C') or (B, C', T) to the same."""


class ParallelBatchNorm2d(ParallelBatchNorm, nn.BatchNorm2d):
    """A BatchNorm2d split over its channels: (B, C', H, W) to the same."""


class ParallelGroupNorm(nn.GroupNorm):
    """A GroupNorm split over its groups: (B, C', *S) to the same.

    Args:
        num_groups: How many groups, of the whole layer; the attribute is this rank's.
        num_channels: C, of the whole layer; the attribute of that name is C'.
        args: The further arguments of the torch class.
        gather_output: Return (B, C, *S) on every rank.
        kwargs: The further keyword arguments of the torch class.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        *args: Any,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        shard = Shard(0, (num_channels,), num_channels // num_groups)
        super().__init__(part_size(num_groups), shard.local_size(), *args, **kwargs)
        self.output_shard = replace(shard, axis=1) if gather_output else None
        if self.affine:
            record_shard(self, "weight", shard)
            record_shard(self, "bias", shard)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C', *S) to the same, or to (B, C, *S) with `gather_output`."""
        return gather_if_sharded(super().forward(input), self.output_shard)
