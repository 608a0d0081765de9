"""The elements of module lists, and the expressions that select some of them in the output.

These compare numbers (`i < 6`). If the schedule sliced by fractions, they compare shares of the
number of elements (`i < config.num_hidden_layers // 2`), so that lists of other lengths are treated
as the schedule means.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from slapo_rewrite import errors
from slapo_rewrite.code.text import listed
from slapo_rewrite.directive import Causes, Share
from slapo_rewrite.model.construction_sites import Site


@dataclass(frozen=True)
class ElementList:
    """A module list whose elements a construction site makes."""

    path: str
    length: int  # the number of elements
    # Evaluates the site's `count`; None if that is not possible.
    counted: Callable[[], int | None]

    def numbers(self, paths: Iterable[str]) -> set[int]:
        """The indices of the elements that are, or contain, the modules at these paths."""
        lead = f"{self.path}." if self.path else ""
        names = {p[len(lead) :].partition(".")[0] for p in paths if p.startswith(lead)}
        return {int(name) for name in names if name.isdecimal()}


@dataclass(frozen=True)
class Region:
    """The interval between two neighbouring ends of shares."""

    start: Fraction  # where it begins, from 0 to 1
    stop: Fraction  # where it ends
    numbers: frozenset[int]  # the elements there


class _ByNumberError(Exception):
    """Elements cannot be selected by shares; the message says why."""


class IndexSets:
    """The elements of each construction site in a loop, over all instances of the class."""

    def __init__(self) -> None:
        self._present: dict[int, set[str]] = {}
        self._lists: dict[int, dict[str, ElementList]] = {}
        self.notes: list[str] = []  # warnings about shares that are written as numbers

    def add(self, start: int, index: str) -> None:
        """Records an element that an instance has."""
        self._present.setdefault(start, set()).add(index)

    def add_list(self, start: int, elements: ElementList) -> None:
        """Records a list that contains modules of the site."""
        self._lists.setdefault(start, {}).setdefault(elements.path, elements)

    def of(self, site: Site) -> set[str]:
        """The indices of the elements that the site makes."""
        return self._present.get(site.file.span(site.value)[0], {""})

    def regions(
        self, site: Site, causes: Causes, groups: Sequence[set[int]], *, counted: bool
    ) -> list[Region]:
        """The regions into which shares divide the elements of a site; empty to use numbers.

        If there are shares that cannot be used, this adds a note. The elements of each group have
        the same change; `counted` says whether the tests need the site's own `count`.
        """
        lists = self._lists.get(site.file.span(site.value)[0], {})
        shares = [s for c in causes for s in c.shares if s.path in lists]
        if not shares:
            return []
        try:
            return _regions(site, lists.values(), causes, groups, counted)
        except _ByNumberError as reason:
            at = site.file.at(site.value)
            shown = listed(dict.fromkeys(map(str, shares)))
            note = f"{shown} is written as a fixed list of element numbers, since {reason}"
            self.notes.append(errors.warning(note, at))
            return []


def _regions(
    site: Site,
    lists: Iterable[ElementList],
    causes: Causes,
    groups: Sequence[set[int]],
    counted: bool,
) -> list[Region]:
    """The regions of a site's lists; raises `_ByNumberError` if they do not decide the changes."""
    found: list[Region] = []
    made = set().union(*groups)
    apart = counted and {0} in groups and _is_first_apart(lists, causes)
    # The test for element 0 then comes first. In a list too short for a share to have elements, it
    # is recomputed all the same, which does not change results.
    made -= {0} if apart else set()
    for each in lists:
        ends = _ends(each, causes, made)
        if not ends:
            continue
        if counted and isinstance(site.count, ast.Constant):
            return []  # the number of elements is constant
        if counted and (site.count is None or each.counted() != each.length):
            raise _ByNumberError("nothing here says how many elements there are")
        own = [
            Region(start, stop, frozenset(made.intersection(_elements(each, start, stop))))
            for start, stop in itertools.pairwise(ends)
        ]
        if found and [r.start for r in found] != [r.start for r in own]:
            raise _ByNumberError("several lists with different shares are constructed here")
        pairs = zip(own, found or own, strict=True)
        found = [Region(r.start, r.stop, r.numbers | known.numbers) for r, known in pairs]
    if apart and not (found and all(region.numbers for region in found)):
        raise _ByNumberError("a share holds only the first element, which differs")
    if any(not any(region.numbers <= group for group in groups) for region in found):
        several = len({each.length for each in lists}) > 1
        raise _ByNumberError(
            "lists of several lengths are constructed here"
            if several
            else "its elements differ in more than shares"
        )
    return found


def _is_first_apart(lists: Iterable[ElementList], causes: Causes) -> bool:
    """Whether only element 0 is selected by number, and all shares are only checkpointed."""
    listed = [(cause, each.numbers(cause.paths)) for each in lists for cause in causes]
    by_number = [numbers == {0} for cause, numbers in listed if not cause.shares]
    return any(by_number) and all(c.primitive == "checkpoint" for c in causes if c.shares)


def _ends(each: ElementList, causes: Causes, made: set[int]) -> list[Fraction]:
    """The bounds of the shares of a module list, 0 and 1 included; empty without shares."""
    by_share: dict[object, tuple[Share | None, set[int]]] = {}
    made = made.intersection(range(each.length))
    for cause in causes:
        numbers = each.numbers(cause.paths) & made
        if numbers and not cause.inferred:
            share = next((s for s in cause.shares if s.path == each.path), None)
            # A loop over a slice calls the primitive once for each element.
            key = (share, cause.primitive, cause.at) if share else cause.number
            by_share.setdefault(key, (share, set()))[1].update(numbers)
    ends = set()
    for share, numbers in by_share.values():
        if share is not None and numbers == made.intersection(share.elements(each.length)):
            ends |= {Fraction(0), share.start, share.stop, Fraction(1)}
        elif numbers != made:
            raise _ByNumberError("its elements are selected by number or name as well")
    if not all(_elements(each, a, b) for a, b in itertools.pairwise(sorted(ends))):
        raise _ByNumberError(f"different shares select the same of {each.length} elements")
    return sorted(ends)


def _elements(each: ElementList, start: Fraction, stop: Fraction) -> range:
    return Share(each.path, start, stop).elements(each.length)


def spans(numbers: set[int], regions: Iterable[Region]) -> list[tuple[Fraction, Fraction]]:
    """The shares that contain these elements only; an empty region joins the one before it."""
    found: list[tuple[Fraction, Fraction]] = []
    taken = False
    for region in regions:
        taken = region.numbers <= numbers if region.numbers else taken
        if taken and found and found[-1][1] == region.start:
            found[-1] = (found[-1][0], region.stop)
        elif taken:
            found.append((region.start, region.stop))
    return found


def share_of(count: str, share: Fraction) -> str:
    """An expression for a share of a number, rounded down: `count // 2`, `3 * count // 4`."""
    times = "" if share.numerator == 1 else f"{share.numerator} * "
    return f"{times}{count} // {share.denominator}"


def sliced(container: str, start: Fraction, stop: Fraction) -> str:
    """An expression for a share of a module list: `container[: len(container) // 2]`."""
    low, high = (share_of(f"len({container})", end) if 0 < end < 1 else "" for end in (start, stop))
    return f"{container}[{low}{' ' if low else ''}:{' ' if high else ''}{high}]"


def membership(
    variable: str,
    numbers: set[int],
    made: Collection[int],
    regions: Sequence[Region],
    count: ast.expr | None,
) -> str:
    """An expression that is true for these of the constructed elements only."""
    if not regions or count is None or not any(numbers & region.numbers for region in regions):
        return _numbered(variable, sorted(numbers), sorted(made))
    is_simple = isinstance(count, ast.Name | ast.Attribute | ast.Call)
    text = ast.unparse(count) if is_simple else f"({ast.unparse(count)})"
    tests = []
    for start, stop in spans(numbers, regions):
        low, high = share_of(text, start), share_of(text, stop)
        if not start:
            tests.append(f"{variable} < {high}")
        else:
            tests.append(f"{variable} >= {low}" if stop == 1 else f"{low} <= {variable} < {high}")
    return " or ".join(tests)


def _numbered(variable: str, indices: list[int], made: list[int]) -> str:
    """An expression that is true for these of the constructed indices only.

    `[0, 1, 2] -> i < 3`, `[4, 5] of 6 -> i >= 4`, `[0, 2, 4] -> i % 2 == 0`,
    `[0, 1, 2, 4, 5] -> i < 6 and i != 3`.
    """
    first, last, count = indices[0], indices[-1], len(indices)
    if count == 1:
        return f"{variable} == {first}"
    bounds = (first > made[0], last < made[-1])
    within = {
        (True, True): f"{first} <= {variable} < {last + 1}",
        (True, False): f"{variable} >= {first}",
        (False, True): f"{variable} < {last + 1}",
        (False, False): "",
    }[bounds]
    others = [n for n in made if first <= n <= last and n not in indices]
    if not others and within:
        return within
    step = indices[1] - first
    if indices == [n for n in made if n % step == first % step]:
        return f"{variable} % {step} == {first % step}"
    if len(others) < count // 2:
        apart = f"{variable} {_one_of(others, '!=', 'not in')}"
        return f"{within} and {apart}" if within else apart
    return f"{variable} {_one_of(indices, '==', 'in')}"


def _one_of(numbers: list[int], one: str, several: str) -> str:
    """`== 3`, `in (3, 5)`."""
    if len(numbers) == 1:
        return f"{one} {numbers[0]}"
    return f"{several} ({', '.join(map(str, numbers))})"
