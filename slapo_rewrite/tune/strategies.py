"""Strategies: the order in which points are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slapo_rewrite import errors
from slapo_rewrite.groups import grouped
from slapo_rewrite.tune.knob_space import KnobSpace, Trial, best_of
from slapo_rewrite.tune.predicted_first import PredictedFirst

NAMES = ("model", "slapo", "random", "exhaustive")


class InOrder:
    """Tries points in a fixed order."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order

    def next(self, trials: Sequence[Trial]) -> int | None:
        """The number of the first untried point; None if all are tried."""
        tried = {trial.number for trial in trials}
        return next((number for number in self._order if number not in tried), None)


def exhaustive(space: KnobSpace, seed: int) -> InOrder:
    """Tries all points in order."""
    return InOrder(range(len(space)))


def shuffled(space: KnobSpace, seed: int) -> InOrder:
    """Tries all points in random order."""
    return InOrder(np.random.default_rng(seed).permutation(len(space)).tolist())


class LargestBatch:
    """Slapo's strategy: bisects the largest batch that fits, for one ratio after the other.

    It bisects the first knob whose larger values need more memory, or else the first ordered knob.
    For each combination of the other knobs, in order, it finds the largest value that fits. It ends
    when a combination is slower than the one before.
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
        """The next point of the bisection; None if a combination was slower than the last."""
        known = {trial.number: trial for trial in trials}
        before = None
        for row in self._rows:
            low, high = 0, len(row)  # one of the row's first `low` points fits, if any does
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


# Any strategy.
Strategy = InOrder | LargestBatch | PredictedFirst


def made(name: str, space: KnobSpace, seed: int, confidence: float | None = None) -> Strategy:
    """Creates a strategy by name."""
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
    """Raises `UsageError` for a name that no strategy has."""
    if name not in NAMES:
        raise errors.UsageError(
            f"there is no strategy `{name}`",
            hint=errors.did_you_mean(name, NAMES) or "give one of " + ", ".join(NAMES),
        )
