"""Who asked for a change: a call in the schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from slapo_rewrite.errors import Span

# Why a line changes by which a file takes from a copy what it took from the original.
REDIRECTED = "import from the copy of the file"


@dataclass(frozen=True)
class Share:
    """A slice of a module list by fractions of its length, which are rounded down.

    Rounded so, `[:0.5]` and `[0.5:]` are all elements, each once, whatever their number.
    """

    path: str  # the module list
    start: Fraction  # where the slice begins, from 0 to 1
    stop: Fraction  # where it ends

    def elements(self, length: int) -> range:
        """The elements that it takes of so many."""
        return range(math.floor(self.start * length), math.floor(self.stop * length))

    def __str__(self) -> str:
        ends = (self.start or None, self.stop if self.stop < 1 else None)
        start, stop = ("" if end is None else f"{float(end):.6g}" for end in ends)
        return f"{self.path}[{start}:{stop}]"


@dataclass(frozen=True)
class Directive:
    """One primitive call of the schedule."""

    number: int  # position in the schedule's order
    primitive: str  # the primitive's name
    at: Span | None  # where the schedule calls it
    text: str  # the call as the schedule writes it, on one line
    paths: tuple[str, ...]  # the module paths that it was called on
    shares: tuple[Share, ...] = ()  # the slices by fractions by which these paths were selected
    # The collective that was inferred from it for these paths, if it infers any.
    inferred: str | None = None
    # What the primitive has chosen among these paths, and why, in words; it does nothing to the
    # others.
    outcome: str | None = None


# Who asked for one thing, in the schedule's order.
Causes = tuple[Directive, ...]


def merged_causes(*causes: Iterable[Directive]) -> Causes:
    """Directives without repetition, in the schedule's order."""
    found = {d.number: d for group in causes for d in group}
    return tuple(found[n] for n in sorted(found))


def needed_depth(directives: Iterable[Directive]) -> int:
    """How many layers a list needs so that each of those is there that is treated differently.

    Of what a primitive has chosen by number that is the last one, and the one behind it.
    """
    directives = [d for d in directives if d.paths]
    chosen = [path for d in directives if d.outcome is not None for path in d.paths]
    numbers = [int(part) for path in chosen for part in path.split(".") if part.isdigit()]
    return max([depth_of(s for d in directives for s in d.shares), *(n + 2 for n in numbers)])


def depth_of(shares: Iterable[Share]) -> int:
    """How long module lists have to be, so that no share comes to nothing, or to the same."""
    ends = sorted({Fraction(0), Fraction(1), *(e for s in shares for e in (s.start, s.stop))})
    pairs = list(itertools.pairwise(ends))
    lengths = (n for n in range(2, 1000) if all(Share("", *ab).elements(n) for ab in pairs))
    return next(lengths, 2)
