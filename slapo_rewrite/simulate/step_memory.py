"""The most memory that one rank holds in a step, put together of the parts that were counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from slapo_rewrite.model.folded_step import Counted
from slapo_rewrite.model.step_profile import BEFORE, NOTHING, Amount, Part, Place


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of the full model's step.

    Attributes:
        forward: What it takes on the way there.
        backward: And back.
        is_layer: Whether it is a layer, with what stands between it and the next one.
    """

    forward: Part
    backward: Part
    is_layer: bool


# Pieces, and how many times each comes one after the other.
Runs = tuple[tuple[Piece, int], ...]


class Unfolded:
    """The parts of the full model's step.

    Args:
        plain: What was counted without recomputation.
        others: What was counted with layers recomputed in one way or another; None where that
            cannot be.
    """

    def __init__(self, plain: Counted, *others: Counted | None) -> None:
        self.plain, self.counted = plain, (plain, *others)
        self._pieces: dict[tuple[int, Place, bool], Piece] = {}
        self.lists = [p for p in dict.fromkeys(p.listed for p in plain.profile.forward) if p]
        self._last = {listed: max(plain.stands_for[listed]) for listed in self.lists}

    def pieces(self, ratio: float) -> list[Piece]:
        """All of them, in the order of the way there.

        Args:
            ratio: The share of each list's layers that are recomputed, the first ones.
        """
        can_be = self.counted[1] is not None
        ways = {}
        for listed in self.lists:
            depth = len(self.plain.stands_for[listed])
            again = math.floor(ratio * depth) if can_be else 0  # as a slice of a selection rounds
            ways[listed] = [1] * again + [0] * (depth - again)
        return self.chosen(ways, before=1 if ratio == 1 and can_be else 0)

    def chosen(self, ways: Mapping[str, Sequence[int]], before: int = 0) -> list[Piece]:
        """All of them, in the order of the way there, each layer recomputed in a way of its own.

        Args:
            ways: For each layer of each list which of what was counted it is as in: 0 for the
                plain one.
            before: Likewise for what comes before the layers.
        """
        found = [self._piece(BEFORE, before, False)]
        for listed in self.lists:
            for number, way in enumerate(ways[listed]):
                found += self.at(listed, number, way)
        return found

    def before(self) -> Piece:
        """What comes before the layers."""
        return self._piece(BEFORE, 0, False)

    def at(self, listed: str, number: int, way: int) -> list[Piece]:
        """A layer's piece; behind the last one of its list that which follows, too."""
        kept, last = self.plain.stands_for[listed], self._last[listed]
        is_last = number == len(kept) - 1
        place = Place(listed, kept[number], True)
        found = [self._piece(place, way, not is_last and last > 0)]
        if is_last:
            found.append(self._piece(Place(listed, last, False), way, False))
        return found

    def _piece(self, place: Place, way: int, goes_on: bool) -> Piece:
        key = (way, place, goes_on)
        if key not in self._pieces:
            source = self.counted[way]
            assert source is not None
            forward, backward = source.profile.forward, source.profile.backward
            there, back = forward.get(place, Part()), backward.get(place, Part())
            between = Place(place.listed, 0, False)
            if goes_on and between in forward:  # what stands between this layer and the next
                there = joined(there, forward[between])
                back = joined(backward.get(between, Part()), back)
            self._pieces[key] = Piece(there, back, place.is_layer)
        return self._pieces[key]


def joined(first: Part, second: Part) -> Part:
    """Two parts, one after the other, as one."""

    def after(peaks: list[Amount], gradients: float) -> list[Amount]:
        return [first.net.plus(peak).plus(Amount(gradients)) for peak in peaks]

    sent = {kind: first.sent.get(kind, NOTHING).plus(second.sent.get(kind, NOTHING))
            for kind in {**first.sent, **second.sent}}  # fmt: skip
    return replace(
        first,
        net=first.net.plus(second.net),
        peaks=[*first.peaks, *after(second.peaks, 0.0)],
        gradients=first.gradients + second.gradients,
        kept_peaks=[*first.kept_peaks, *after(second.kept_peaks, first.gradients)],
        flops=first.flops.plus(second.flops),
        moved=first.moved.plus(second.moved),
        sent=sent,
        calls=first.calls + second.calls,
        operators=first.operators + second.operators,
    )


def in_runs(pieces: Sequence[Piece]) -> Runs:
    """Pieces that come several times one after the other, each with how often."""
    return tuple((piece, sum(1 for _ in same)) for piece, same in groupby(pieces))


@lru_cache(maxsize=2**16)  # stages are alike, and ways differ in what this does not see
def most_held(runs: Runs, rows: int, live: int = 1, *, gradients_stay: bool = False) -> float:
    """The most bytes that a step holds beside parameters and what outlasts it.

    Args:
        runs: The parts that run on the rank.
        rows: Rows of a micro-batch.
        live: How many micro-batches have gone there and not yet back, at most.
        gradients_stay: Whether gradients come into being in the step and stay; else there is room
            for their sums already, and they are let go as they are added to these.
    """
    # What a micro-batch holds between its way there and its way back.
    between = sum(times * piece.forward.net.of(rows) for piece, times in runs)
    now = (live - 1) * between if live > 1 else 0.0
    most = now
    for part, times in _there_and_back(runs):
        net = part.net.of(rows) + (part.gradients if gradients_stay else 0.0)
        peaks = part.kept_peaks if gradients_stay else part.peaks
        if peaks:  # what is held grows or shrinks from each to the next: the first or the last
            highest = now + max(0.0, (times - 1) * net)
            most = max(most, highest + max([peak.of(rows) for peak in peaks]))
        now += times * net
    return most


def _there_and_back(runs: Runs) -> Iterator[tuple[Part, int]]:
    yield from ((piece.forward, times) for piece, times in runs)
    yield from ((piece.backward, times) for piece, times in reversed(runs))
