# Written by slapo-rewrite 0.2.0 for gpt.py; rewrite.json says from what.
"""Axes along which several blocks lie packed, `[q | k | v]` say: a rank has a part of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .shards import PiecewiseShard, part_sizes


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
class PackedShard(PiecewiseShard):
    """How a tensor is divided that packs blocks along the axis.

    Attributes:
        blocks: Their full sizes; every rank holds a part of each.
    """

    blocks: tuple[int, ...] = field(kw_only=True)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Where a rank's pieces lie on the full axis, one for each block."""
        found, start = [], 0
        for block in self.blocks:
            sizes = part_sizes(block, self.multiple_of)
            here = start + sum(sizes[:rank])
            found.append((here, here + sizes[rank]))
            start += block
        return found


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
