"""In which order points are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slapo_rewrite import errors
from slapo_rewrite.groups import grouped
from slapo_rewrite.tune.knob_space import KnobSpace, Trial, best_of
from slapo_rewrite.tune.predicted_first import PredictedFirst

NAMES = ("model", "slapo", "random", "exhaustive")


class InOrder:
    """Tries points in an order that does not depend on what comes of them."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order

    def next(self, trials: Sequence[Trial]) -> int | None:
        """The number of the first that has not been tried; None once there is nothing to gain."""
        tried = {trial.number for trial in trials}
        return next((number for number in self._order if number not in tried), None)


def exhaustive(space: KnobSpace, seed: int) -> InOrder:
    """All points, in their order."""
    return InOrder(range(len(space)))


def shuffled(space: KnobSpace, seed: int) -> InOrder:
    """All points, shuffled."""
    return InOrder(np.random.default_rng(seed).permutation(len(space)).tolist())


class LargestBatch:
    """Slapo's: the largest batch that fits, by bisection; then the next ratio, while it pays.

    What is bisected is the first knob of which more needs more memory, or the first with an order.
    For each combination of the others, in their order, its largest value that fits is looked for;
    when that is slower than that of the combination before, nothing more is tried.
    """

    def __init__(self, space: KnobSpace, seed: int) -> None:
        ordered = [axis for axis in space.axes if axis.is_ordered and len(axis.values) > 1]
        known = [axis for axis in ordered if axis.sign > 0]
        batch = (known or ordered or list(space.axes))[0]
        rows = grouped(
            (tuple(v for name, v in point.items() if name != batch.name), number)
            for number, point in enumerate(space.points)
        )
        place = {value: place for place, value in enumerate(batch.values)}
        if batch.is_ordered:
            place = {value: place for place, value in enumerate(sorted(batch.values, key=float))}
        self._rows = [
            sorted(row, key=lambda number: place[space.points[number][batch.name]])
            for row in rows.values()
        ]

    def next(self, trials: Sequence[Trial]) -> int | None:
        """The next of the bisection; None when a combination was slower than the one before."""
        known = {trial.number: trial for trial in trials}
        before = None
        for row in self._rows:
            low, high = 0, len(row)  # of the row's first `low` one at least fits, if any does
            while low < high:
                middle = (low + high) // 2
                if row[middle] not in known:
                    return row[middle]
                if known[row[middle]].counts:
                    low = middle + 1
                else:
                    high = middle
            best = best_of(known[number] for number in row if number in known)
            if before is not None and (best is None or best.throughput < before.throughput):
                return None
            before = best or before
        return None


# What says what to try next.
Strategy = InOrder | LargestBatch | PredictedFirst


def made(name: str, space: KnobSpace, seed: int, confidence: float | None = None) -> Strategy:
    """A strategy by its name."""
    check_name(name)
    if name == "model":
        return PredictedFirst(space, seed, confidence)
    known: dict[str, Callable[[KnobSpace, int], Strategy]] = {
        "slapo": LargestBatch,
        "random": shuffled,
        "exhaustive": exhaustive,
    }
    return known[name](space, seed)


def check_name(name: str) -> None:
    """Refuses a name that no strategy has (`UsageError`)."""
    if name not in NAMES:
        raise errors.UsageError(
            f"there is no strategy `{name}`",
            hint=errors.did_you_mean(name, NAMES) or "give one of " + ", ".join(NAMES),
        )
