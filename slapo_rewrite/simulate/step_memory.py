"""The peak memory of one rank in a step, computed from the counted parts of the step.

Included is what outlasts a step: parameters, gradients and the optimizer's states.
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

# Elements of a bucket of gradients, as in the DeepSpeed configuration that the tool writes.
BUCKET = 50_000_000


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of the full model's step."""

    forward: Part  # what its forward pass takes
    backward: Part  # what its backward pass takes
    is_layer: bool  # whether it is a layer, together with what stands between it and the next one


# Pieces in order, each with the number of its consecutive repetitions.
Runs = tuple[tuple[Piece, int], ...]


class Unfolded:
    """The pieces of the full model's step.

    `plain` was counted without recomputation, each of `others` with the layers recomputed in one
    way; it is None if that way is not possible.
    """

    def __init__(self, plain: Counted, *others: Counted | None) -> None:
        self.plain, self.counted = plain, (plain, *others)
        self._pieces: dict[tuple[int, Place, bool], Piece] = {}
        self.lists = [p for p in dict.fromkeys(p.listed for p in plain.profile.forward) if p]
        self._last = {listed: max(plain.stands_for[listed]) for listed in self.lists}

    def pieces(self, ratio: float) -> list[Piece]:
        """All pieces in forward order, this share of each list's first layers recomputed."""
        can_be = self.counted[1] is not None
        ways = {}
        for listed in self.lists:
            depth = len(self.plain.stands_for[listed])
            again = math.floor(ratio * depth) if can_be else 0  # rounded as slices of selections
            ways[listed] = [1] * again + [0] * (depth - again)
        return self.chosen(ways, before=1 if ratio == 1 and can_be else 0)

    def chosen(self, ways: Mapping[str, Sequence[int]], before: int = 0) -> list[Piece]:
        """All pieces in forward order, each layer recomputed in a way of its own.

        `ways` has for each layer of each list the number of its way: 0 for `plain`, else the
        position in `others` from 1; `before` is the way of what comes before the layers.
        """
        found = [self._piece(BEFORE, before, False)]
        for listed in self.lists:
            for number, way in enumerate(ways[listed]):
                found += self.at(listed, number, way)
        return found

    def before(self) -> Piece:
        """The piece before the first layer, not recomputed."""
        return self._piece(BEFORE, 0, False)

    def at(self, listed: str, number: int, way: int) -> list[Piece]:
        """A layer's piece; for the last layer of its list also the piece that follows the list."""
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
            if goes_on and between in forward:  # computed between this layer and the next
                there = joined(there, forward[between])
                back = joined(backward.get(between, Part()), back)
            self._pieces[key] = Piece(there, back, place.is_layer)
        return self._pieces[key]


def joined(first: Part, second: Part) -> Part:
    """Two consecutive parts as one."""

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
    """The pieces, with consecutive repetitions of one counted."""
    return tuple((piece, sum(1 for _ in same)) for piece, same in groupby(pieces))


@lru_cache(maxsize=2**16)  # many stages and placements have the same arguments
def most_held(runs: Runs, rows: int, live: int = 1, *, gradients_stay: bool = False) -> float:
    """The most bytes that a step holds at once, without parameters and what outlasts the step.

    `live` is the most micro-batches between their forward and backward passes at once. With
    `gradients_stay` gradients are created in the step and kept; otherwise their sums are allocated
    beforehand, and each gradient is freed when it has been added.
    """
    # What a micro-batch holds between its forward and its backward pass.
    between = sum(times * piece.forward.net.of(rows) for piece, times in runs)
    now = (live - 1) * between if live > 1 else 0.0
    most = now
    for part, times in _there_and_back(runs):
        net = part.net.of(rows) + (part.gradients if gradients_stay else 0.0)
        peaks = part.kept_peaks if gradients_stay else part.peaks
        if peaks:  # each repetition adds `net`: the first or the last one is the highest
            highest = now + max(0.0, (times - 1) * net)
            most = max(most, highest + max([peak.of(rows) for peak in peaks]))
        now += times * net
    return most


def _there_and_back(runs: Runs) -> Iterator[tuple[Part, int]]:
    yield from ((piece.forward, times) for piece, times in runs)
    yield from ((piece.backward, times) for piece, times in reversed(runs))


@dataclass(frozen=True)
class States:
    """Bytes per parameter on a rank, as DeepSpeed holds them with an Adam optimizer."""

    weight: float  # the parameter itself, in the dtype of the activations
    gradient: float  # the sums of gradients
    optimizer: float  # adam's two moments, and a float32 copy of the parameter
    # Whether the gradients' memory is allocated all the time; if not, and there is one micro-batch,
    # they are created in its backward pass.
    is_lasting: bool = True
    update: float = 0.0  # what the optimizer's step takes in addition
    fixed: float = 0.0  # bytes in all, not per parameter: buckets
    layers: float = 0.0  # number of layers whose whole parameters a rank holds beside its shares

    @property
    def each(self) -> float:
        """Bytes per parameter in all, without `update`."""
        return self.weight + self.gradient + self.optimizer

    def most(
        self, runs: Runs, parameters: float, rows: int, live: int, micro_batches: int
    ) -> float:
        """The most bytes that a rank holds at once, for parameters and activations."""
        come = self.come(micro_batches)
        step = self.own(parameters, micro_batches)
        step += most_held(runs, rows, live, gradients_stay=come)
        return self.fixed + max(step, parameters * (self.each + self.update))

    def come(self, micro_batches: int) -> bool:
        """Whether gradients are created in the backward pass, not allocated beforehand."""
        return micro_batches == 1 and not self.is_lasting

    def own(self, parameters: float, micro_batches: int) -> float:
        """Bytes that are allocated when a step begins, without buckets."""
        return parameters * (self.each - (self.gradient if self.come(micro_batches) else 0.0))


def states(precision: str, stage: int, replicas: int, bucket: int = BUCKET) -> States:
    """Bytes per parameter at a stage of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

    In bfloat16 stage 1 sums gradients in float32. Other sums have the parameters' dtype, from
    stage 1 on in buckets, and the optimizer copies them to float32. Stage 0 divides nothing among
    the replicas, 1 the optimizer's states, 2 also gradients, 3 also parameters; `bucket` is the
    number of elements of a bucket of gradients.
    """
    width = 4 if precision == "fp32" else 2
    # In float32 the parameter needs no copy, but stages 1 and 2 copy each rank's share.
    optimizer = 8.0 if precision == "fp32" and stage in (0, 3) else 12.0
    if precision == "bf16" and stage == 1:
        return States(width, 4, optimizer / replicas)
    buckets = {0: 0.0, 1: 1.0}.get(stage, 2.0)  # two if summed during the backward pass
    return States(
        width / (replicas if stage == 3 else 1),
        width / (replicas if stage > 1 else 1),
        optimizer / (replicas if stage else 1),
        is_lasting=stage > 1,
        # Each rank's share is copied while the other ranks' shares are freed.
        update=max(0.0, 4 / replicas - width * (1 - 1 / replicas)) if stage == 1 else 0.0,
        fixed=buckets * width * bucket,
        layers=2.0 if stage == 3 else 0.0,
    )
