"""The packing of several blocks along one split axis.

A rank holds its share of each of several blocks (such as queries, keys and values) side by side.
The functions here say where such blocks begin and end, compare packings, and find the axis of an
operation's result that has the blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from slapo_rewrite.runtime.packed_axes import Packed
from slapo_rewrite.sharding.tracked_sizes import Shape

# The full sizes of the blocks that each split axis of a tensor packs.
Blocks = dict[int, Shape]


def ratio_of(keywords: Mapping[str, Any]) -> Shape:
    """The sizes of blocks, up to a factor, that a layer's argument `parts` asks for."""
    packed = keywords.get("parts")
    if packed is None:
        return (1,)
    assert isinstance(packed, Packed)
    return (1,) * packed.blocks if isinstance(packed.blocks, int) else packed.blocks


def reduced(packed: Sequence[int]) -> Shape:
    """The blocks' sizes relative to each other; one block is `(1,)`."""
    common = math.gcd(*packed)
    return tuple(size // common for size in packed)


def ends_of(pieces: Sequence[int]) -> set[int]:
    """The positions where adjacent pieces begin and end."""
    return set(itertools.accumulate(pieces, initial=0))


def described(packed: Sequence[int]) -> str:
    """The blocks in words, for messages."""
    if len(packed) == 1:
        return "one block"
    if len(set(packed)) == 1:
        return f"{len(packed)} equal parts"
    return f"parts of {list(packed)}"


def moved_axis(
    name: str, args: Any, rank: int, axis: int, out_rank: int, shape: Shape, whole: Shape
) -> int | None:
    """The axis of the result that an operand's axis becomes: the same from the right, or moved."""
    if name in ("transpose", "swapaxes", "transpose_") and len(args) == 3:
        first, second = args[1] % rank, args[2] % rank
        return int({first: second, second: first}.get(axis, axis))
    if name == "permute":
        order = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        return [int(a) % rank for a in order].index(axis)
    place = axis + out_rank - rank
    if 0 <= place < out_rank and whole[place] == shape[axis]:
        return place
    same = [i for i, size in enumerate(whole) if size == shape[axis]]
    return same[0] if len(same) == 1 else None
