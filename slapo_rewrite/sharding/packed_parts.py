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
