# Written by slapo-rewrite 0.2.0 for modeling_gpt2.py; rewrite.json says from what.
"""Axes along which several blocks lie packed, `[q | k | v]` say: a rank has a part of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .shards import Shard, part_sizes, rank


def block_sizes(size: int, parts: int | Sequence[int]) -> tuple[int, ...]:
    """Sizes of the blocks packed along an axis of `size`.

    Args:
        size: The whole axis.
        parts: How many equal blocks, or the blocks' relative sizes, such as (4, 1, 1).

    Raises:
        ValueError: `size` does not divide into such blocks.
    """
    ratio = (1,) * parts if isinstance(parts, int) else tuple(parts)
    if size % sum(ratio):
        raise ValueError(
            f"{size} does not divide into blocks of relative sizes {ratio}: "
            f"it is not a multiple of {sum(ratio)}"
        )
    return tuple(size // sum(ratio) * r for r in ratio)


@dataclass(frozen=True)
class PackedShard(Shard):
    """How a tensor is divided that packs blocks along the axis.

    Attributes:
        blocks: Their full sizes; every rank holds a part of each.
    """

    blocks: tuple[int, ...] = field(kw_only=True)

    def by_block(self) -> list[list[int]]:
        """Every rank's share of each block."""
        self.check_group()
        return [part_sizes(block, self.multiple_of) for block in self.blocks]

    def sizes(self) -> list[int]:
        """The axis's size in every rank's part."""
        return [sum(shares) for shares in zip(*self.by_block(), strict=True)]

    def ranges(self) -> list[tuple[int, int]]:
        """Where this rank's pieces lie on the full axis, one for each block."""
        found, start = [], 0
        for block, shares in zip(self.blocks, self.by_block(), strict=True):
            here = start + sum(shares[: rank()])
            found.append((here, here + shares[rank()]))
            start += block
        return found

    def joined(self, parts: list[Tensor]) -> Tensor:
        """The full tensor, from the parts of all ranks."""
        by_rank = [list(shares) for shares in zip(*self.by_block(), strict=True)]
        pieces = [
            torch.split(p, s, self.axis) for p, s in zip(parts, by_rank, strict=True)
        ]
        by_block = [piece for block in zip(*pieces, strict=True) for piece in block]
        return torch.cat(by_block, self.axis)


@dataclass(frozen=True)
class Packed:
    """Blocks packed along an axis: `ColumnParallelLinear(D, 3 * F, parts=Packed(3))`.

    Attributes:
        blocks: How many equal ones, or their relative sizes, such as (4, 1, 1).
    """

    blocks: int | tuple[int, ...]

    def __call__(self, axis: int, size: int, multiple_of: int = 0) -> PackedShard:
        """How an axis of `size` is divided.

        Raises:
            ValueError: `size` does not divide into such blocks.
        """
        blocks = block_sizes(size, self.blocks)
        return PackedShard(axis, size, multiple_of, blocks=blocks)
