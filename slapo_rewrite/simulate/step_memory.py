"""The most memory that one rank holds in a step, put together of the parts that were counted.

And what outlasts a step on it: parameters, gradients and the optimizer's states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from slapo_rewrite.model.folded_step import Counted
from slapo_rewrite.model.step_profile import BEFORE, NOTHING, Amount, Part, Place

# Elements of a bucket of gradients, as the configuration says that is written.
BUCKET = 50_000_000


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of the full model's step."""

    forward: Part  # what it takes on the way there
    backward: Part  # and back
    is_layer: bool  # whether it is a layer, with what stands between it and the next one


# Pieces, and how many times each comes one after the other.
Runs = tuple[tuple[Piece, int], ...]


class Unfolded:
    """The parts of the full model's step.

    `plain` was counted without recomputation, `others` with layers recomputed in one way or
    another; None where that cannot be.
    """

    def __init__(self, plain: Counted, *others: Counted | None) -> None:
        self.plain, self.counted = plain, (plain, *others)
        self._pieces: dict[tuple[int, Place, bool], Piece] = {}
        self.lists = [p for p in dict.fromkeys(p.listed for p in plain.profile.forward) if p]
        self._last = {listed: max(plain.stands_for[listed]) for listed in self.lists}

    def pieces(self, ratio: float) -> list[Piece]:
        """All of them, in the order of the way there."""
        can_be = self.counted[1] is not None
        ways = {}
        for listed in self.lists:
            depth = len(self.plain.stands_for[listed])
            again = math.floor(ratio * depth) if can_be else 0  # as a slice of a selection rounds
            ways[listed] = [1] * again + [0] * (depth - again)
        return self.chosen(ways, before=1 if ratio == 1 and can_be else 0)

    def chosen(self, ways: Mapping[str, Sequence[int]], before: int = 0) -> list[Piece]:
        """All of them, in the order of the way there, each layer recomputed in a way of its own.

        `ways` says for each layer of each list as which of what was counted it is, 0 for the plain
        one; `before` says so for what comes before the layers.
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

    def summed(one: dict[Any, Amount], other: dict[Any, Amount]) -> dict[Any, Amount]:
        kinds = {**one, **other}
        return {kind: one.get(kind, NOTHING).plus(other.get(kind, NOTHING)) for kind in kinds}

    return replace(
        first,
        net=first.net.plus(second.net),
        peaks=[*first.peaks, *after(second.peaks, 0.0)],
        gradients=first.gradients + second.gradients,
        kept_peaks=[*first.kept_peaks, *after(second.kept_peaks, first.gradients)],
        products=summed(first.products, second.products),
        moved=first.moved.plus(second.moved),
        sent=summed(first.sent, second.sent),
        calls=first.calls + second.calls,
        operators=first.operators + second.operators,
    )


def in_runs(pieces: Sequence[Piece]) -> Runs:
    """Pieces that come several times one after the other, each with how often."""
    return tuple((piece, sum(1 for _ in same)) for piece, same in groupby(pieces))


@lru_cache(maxsize=2**16)  # stages are alike, and ways differ in what this does not see
def most_held(runs: Runs, rows: int, live: int = 1, *, gradients_stay: bool = False) -> float:
    """The most bytes that a step holds beside parameters and what outlasts it.

    `live` is how many micro-batches have gone there and not yet back, at most. Gradients come into
    being in the step and stay, if `gradients_stay`; else there is room for their sums already, and
    they are let go as they are added to these.
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


@dataclass(frozen=True)
class States:
    """Bytes for each parameter that a rank holds, as DeepSpeed has them with an Adam."""

    weight: float  # the parameter itself, in the dtype of the activations
    gradient: float  # the sums of gradients
    optimizer: float  # adam's two moments, and a float32 copy of the parameter
    # Whether there is room for the gradients all the time; else, with one micro-batch, they come
    # into being on its way back.
    is_lasting: bool = True
    update: float = 0.0  # what the optimizer's step takes beside these
    fixed: float = 0.0  # bytes whatever the parameters: buckets
    layers: float = 0.0  # how many layers' parameters are there as a whole beside a rank's parts

    @property
    def each(self) -> float:
        """Bytes for each parameter, all together."""
        return self.weight + self.gradient + self.optimizer

    def most(
        self, runs: Runs, parameters: float, rows: int, live: int, micro_batches: int
    ) -> float:
        """The most bytes that a rank holds for parameters and activations."""
        come = self.come(micro_batches)
        step = self.own(parameters, micro_batches)
        step += most_held(runs, rows, live, gradients_stay=come)
        return self.fixed + max(step, parameters * (self.each + self.update))

    def come(self, micro_batches: int) -> bool:
        """Whether gradients come into being on the way back, and there is no room before."""
        return micro_batches == 1 and not self.is_lasting

    def own(self, parameters: float, micro_batches: int) -> float:
        """Bytes that a step finds there, buckets apart."""
        return parameters * (self.each - (self.gradient if self.come(micro_batches) else 0.0))


def states(precision: str, stage: int, replicas: int, bucket: int = BUCKET) -> States:
    """What a parameter takes by the stage of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

    In bfloat16 stage 1 sums gradients in float32. Other sums are of the parameters' dtype, from
    stage 1 on by buckets, and are copied to float32 where the optimizer takes them. The stage is 0
    to 3: nothing, the optimizer's states, gradients too, parameters too are divided by so many
    replicas; `bucket` is how many elements a bucket of gradients has.
    """
    width = 4 if precision == "fp32" else 2
    # In float32 the parameter needs no copy, but stages 1 and 2 make one of each rank's part.
    optimizer = 8.0 if precision == "fp32" and stage in (0, 3) else 12.0
    if precision == "bf16" and stage == 1:
        return States(width, 4, optimizer / replicas)
    buckets = {0: 0.0, 1: 1.0}.get(stage, 2.0)  # two where they are summed beside the way back
    return States(
        width / (replicas if stage == 3 else 1),
        width / (replicas if stage > 1 else 1),
        optimizer / (replicas if stage else 1),
        is_lasting=stage > 1,
        # Each rank's part goes over into a copy, while the others' parts are let go.
        update=max(0.0, 4 / replicas - width * (1 - 1 / replicas)) if stage == 1 else 0.0,
        fixed=buckets * width * bucket,
        layers=2.0 if stage == 3 else 0.0,
    )
