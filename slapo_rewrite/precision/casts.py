"""The words in which it is asked and answered which values change their precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slapo_rewrite.code.text import Place, with_wildcards
from slapo_rewrite.operations import FLOAT32

HALF, OTHER = "half precision", "other"
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operand:
    """Which operand of an expression is meant."""

    # Its number among the arguments; -1 is what a method is called on. Of `a @ b`, 0 and 1.
    position: int
    keyword: str = ""  # the name by which it may be given instead
    element: int | None = None  # its number in a list that stands there


@dataclass(frozen=True)
class Cast:
    """A cast that has to stand in a method of a module."""

    path: str  # the module
    place: Place  # the call or product
    operand: Operand  # what of it is cast
    to: str  # `HALF` or `FLOAT32`
    is_mask: bool = False  # whether it is a mask of attention, which may be of booleans, or None


@dataclass
class Precisions:
    """What computing products in half precision comes to."""

    # The paths of layers that compute in half precision as a whole.
    layers: set[str] = field(default_factory=set)
    casts: set[Cast] = field(default_factory=set)  # the casts that have to stand in methods
    # What parameters of functions are cast to where they are called: by the module whose method
    # does, the place, and the parameter.
    given: dict[tuple[str, Place, str], str] = field(default_factory=dict)
    # In which precisions values came by: by the module, the place and the operand. `OTHER` is what
    # is no float.
    seen: dict[tuple[str, Place, Operand], set[str]] = field(default_factory=dict)

    def see(self, path: str, place: Place, operand: Operand, value: Any) -> None:
        """Notes a value that comes by, as it is before it is cast."""
        self.seen.setdefault((path, place, operand), set()).add(kind_of(value))

    def alike(self, cast: Cast, path: str) -> bool:
        """Whether a cast changes nothing in another module: it has such values there, or none."""
        return self.seen.get((path, cast.place, cast.operand), set()) <= {cast.to}

    def check(self) -> None:
        """Refuses a cast of what is no float at other times (`CannotCast`)."""
        for cast in self.casts:
            if not cast.is_mask and OTHER in self.seen[cast.path, cast.place, cast.operand]:
                raise CannotCast(
                    f"this is to be computed in {cast.to}, and is given other values than floats "
                    "at other times",
                    cast.place,
                    "write a line of its own for each",
                )


@dataclass(frozen=True)
class Wanted:
    """What is to be computed in half precision."""

    dtype: str  # the dtype that is meant, by its name
    is_half: Callable[[str], bool]  # whether a module computes its products so, by its path
    # Operations that stay in float32 all the same, by the path of the module.
    keeps: Callable[[str, str], bool]


def keeping(path: str) -> str:
    """How a schedule keeps a module in float32, with what its weight is worked out by."""
    path = with_wildcards(path.partition(".parametrizations.")[0])
    return f'keep=["{path}"]' if path else 's["..."].autocast() of modules inside'


class CannotCast(Exception):
    """A value would change its precision where no cast can be written, or where it means more.

    Attributes:
        place: Where, in a file that may be changed.
        hint: What to do.
    """

    def __init__(self, message: str, place: Place | None, hint: str) -> None:
        super().__init__(message)
        self.place, self.hint = place, hint


def kind_of(value: Any) -> str:
    """The precision of a value."""
    if not isinstance(value, torch.Tensor) or not is_float(value):
        return OTHER
    return HALF if value.dtype in HALVES else FLOAT32


def is_float(tensor: torch.Tensor) -> bool:
    """Whether a value may change its precision: those in float64 keep it."""
    return tensor.dtype in (*HALVES, torch.float32)
