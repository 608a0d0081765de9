"""Axes that pack several blocks, such as `[q | k | v]`: a rank has a part of each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .shards import PiecewiseShard, part_sizes


def block_sizes(size: int, parts: int | Sequence[int]) -> tuple[int, ...]:
    """The sizes of the blocks packed along an axis.

    Args:
        size: The size of the whole axis.
        parts: The number of equal blocks, or their relative sizes, such as (4, 1, 1).

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
    """A shard of an axis that packs blocks; every rank holds a part of each.

    Attributes:
        blocks: Their full sizes.
    """

    blocks: tuple[int, ...] = field(kw_only=True)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The pieces of the full axis that a rank holds, one for each block."""
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
        blocks: The number of equal ones, or their relative sizes, such as (4, 1, 1).
    """

    blocks: int | tuple[int, ...]

    def __call__(self, axis: int, size: int, multiple_of: int = 0) -> PackedShard:
        """The shard of an axis of `size`.

        Raises:
            ValueError: `size` does not divide into such blocks.
        """
        blocks = block_sizes(size, self.blocks)
        return PackedShard(axis, size, multiple_of, blocks=blocks)


@dataclass(frozen=True)
class PackedSizes:
    """Blocks packed along an axis, by sizes that hold for one configuration only.

    Attributes:
        sizes: The blocks' sizes.
        may_scale: Whether an axis of another size with blocks of the same ratio is
            allowed, as in a small model that is compared with the original's.
    """

    sizes: tuple[int, ...]
    may_scale: ClassVar[bool] = False

    def __call__(self, axis: int, size: int, multiple_of: int = 0) -> PackedShard:
        """The shard of an axis of `size`.

        Raises:
            ValueError: The axis has another size.
        """
        if size != sum(self.sizes) and not self.may_scale:
            raise ValueError(
                f"`parts` has blocks of sizes {list(self.sizes)}, for an axis of "
                f"{sum(self.sizes)}, but the axis has {size} in this model: where the layer "
                "is constructed, compute the sizes in `parts` from the configuration"
            )
        ratio = tuple(each // math.gcd(*self.sizes) for each in self.sizes)
        return Packed(ratio)(axis, size, multiple_of)
