"""The types of the precision analysis: casts, operands, and the request."""

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
    """An operand of an expression."""

    # Its position among the arguments; -1 is a method's object. In `a @ b` they are 0 and 1.
    position: int
    keyword: str = ""  # the keyword by which it may be passed
    element: int | None = None  # its index in a list argument


@dataclass(frozen=True)
class Cast:
    """A cast that is needed in a method of a module."""

    path: str  # the module
    place: Place  # the call or product
    operand: Operand  # the operand to cast
    to: str  # `HALF` or `FLOAT32`
    is_mask: bool = False  # whether it is an attention mask, which may be boolean or None


@dataclass
class Precisions:
    """The changes that are needed to compute products in half precision."""

    # The paths of layers that are replaced by ones with casts inside.
    layers: set[str] = field(default_factory=set)
    casts: set[Cast] = field(default_factory=set)  # the casts needed in methods
    # The casts of arguments at calls of functions: by the calling module, the place and the
    # parameter.
    given: dict[tuple[str, Place, str], str] = field(default_factory=dict)
    # The precisions of the values seen at each module, place and operand. `OTHER` is a value that
    # is not a float.
    seen: dict[tuple[str, Place, Operand], set[str]] = field(default_factory=dict)

    def see(self, path: str, place: Place, operand: Operand, value: Any) -> None:
        """Records the precision of an operand before its cast."""
        self.seen.setdefault((path, place, operand), set()).add(kind_of(value))

    def alike(self, cast: Cast, path: str) -> bool:
        """Whether a cast has no effect in another module, by the values seen there."""
        return self.seen.get((path, cast.place, cast.operand), set()) <= {cast.to}

    def check(self) -> None:
        """Raises `CannotCast` for a cast of an operand that is sometimes not a float."""
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
    """The request to compute in half precision."""

    dtype: str  # the name of the dtype
    is_half: Callable[[str], bool]  # whether the module at a path computes products in it
    # Whether an operation stays in float32, given the module's path and its name.
    keeps: Callable[[str, str], bool]


def keeping(path: str) -> str:
    """The argument by which a schedule keeps a module, with parametrizations, in float32."""
    path = with_wildcards(path.partition(".parametrizations.")[0])
    return f'keep=["{path}"]' if path else 's["..."].autocast() of modules inside'


class CannotCast(Exception):
    """A value would change its precision where no cast can be written, or where it matters.

    Attributes:
        place: The place, in a file that may be changed.
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
    """Whether a tensor may change its precision: float64 and integers do not."""
    return tensor.dtype in (*HALVES, torch.float32)
