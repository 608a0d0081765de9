"""How the parts of several blocks lie packed along a split axis.

A rank that holds its share of each of several blocks (of queries, keys and values, say) has them
side by side; here is where such blocks begin and end, how they compare, and which axis of a result
they come to lie along.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from slapo_rewrite.runtime.packed_axes import Packed
from slapo_rewrite.sharding.tracked_sizes import Shape

# The sizes of the blocks that lie packed along each split axis of a tensor.
Blocks = dict[int, Shape]


def ratio_of(keywords: Mapping[str, Any]) -> Shape:
    """The blocks that a layer's argument `parts` means."""
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
    """Where pieces that lie side by side begin and end."""
    return set(itertools.accumulate(pieces, initial=0))


def described(packed: Sequence[int]) -> str:
    """The blocks in words."""
    if len(packed) == 1:
        return "one block"
    if len(set(packed)) == 1:
        return f"{len(packed)} equal parts"
    return f"parts of {list(packed)}"


def moved_axis(
    name: str, args: Any, rank: int, axis: int, out_rank: int, shape: Shape, whole: Shape
) -> int | None:
    """Where an axis of an operand is in the result: counted from the right, unless axes move."""
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
