"""Directives: the schedule's primitive calls, to which every change is traced back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from slapo_rewrite.errors import Span

# The reason given for an import that is changed to import from a copy of a file.
REDIRECTED = "import from the copy of the file"


@dataclass(frozen=True)
class Share:
    """A slice of a module list by fractions of its length; the ends are rounded down.

    So `[:0.5]` and `[0.5:]` together are all elements, each once, at every length.
    """

    path: str  # the module list
    start: Fraction  # where the slice begins, from 0 to 1
    stop: Fraction  # where it ends

    def elements(self, length: int) -> range:
        """The indices it selects in a list of this length."""
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
    paths: tuple[str, ...]  # the selected module paths
    shares: tuple[Share, ...] = ()  # the slices by fractions in the selection
    # For `infer_sync`: the collective that it inferred for these paths.
    inferred: str | None = None
    # For a primitive that chooses among the selected modules: which it chose, and why.
    outcome: str | None = None


# The directives that asked for one change, in the schedule's order.
Causes = tuple[Directive, ...]


def merged_causes(*causes: Iterable[Directive]) -> Causes:
    """All of these directives, each once, in the schedule's order."""
    found = {d.number: d for group in causes for d in group}
    return tuple(found[n] for n in sorted(found))


def needed_depth(directives: Iterable[Directive]) -> int:
    """The least number of layers that has one layer of each kind of treatment.

    If a primitive has chosen layers by number, that is up to one after the last of them.
    """
    directives = [d for d in directives if d.paths]
    chosen = [path for d in directives if d.outcome is not None for path in d.paths]
    numbers = [int(part) for path in chosen for part in path.split(".") if part.isdigit()]
    return max([depth_of(s for d in directives for s in d.shares), *(n + 2 for n in numbers)])


def depth_of(shares: Iterable[Share]) -> int:
    """The least length of a module list at which no two ends of shares coincide."""
    ends = sorted({Fraction(0), Fraction(1), *(e for s in shares for e in (s.start, s.stop))})
    pairs = list(itertools.pairwise(ends))
    lengths = (n for n in range(2, 1000) if all(Share("", *ab).elements(n) for ab in pairs))
    return next(lengths, 2)
