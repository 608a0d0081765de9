"""Finds exactly which layers to recompute, and how, so that a step fits in memory and is fastest.

In the forward and the backward pass, a layer's peak depends on the choices for earlier layers only
by the bytes that these keep. So a dynamic program over the layers carries pairs of kept bytes and
time, without those that another pair beats in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from slapo_rewrite.groups import grouped
from slapo_rewrite.simulate.step_memory import Piece, States, Unfolded, in_runs

if TYPE_CHECKING:
    from slapo_rewrite.model.step_profile import Amount, Part

# Seconds are summed as whole numbers of ticks, so that equal sums compare equal.
TICK = 1e-15
# By the path of a list: for each of its layers the number of the way in which it is recomputed.
Ways = dict[str, list[int]]


@dataclass(frozen=True)
class Option:
    """One way to recompute a layer, with what it costs."""

    way: int  # the way's number
    net: int  # bytes that the layer keeps until its backward pass
    need: int  # bytes that must be free beside what earlier layers keep
    ticks: int  # time of its forward and backward passes


@dataclass(frozen=True)
class Found:
    """A choice of ways, with what the step takes."""

    ways: Ways
    peak: float  # the most bytes that the step holds at once, in all
    seconds: float  # time of the step's operators


class RecomputeSearch:
    """Searches for the layers to recompute.

    Args:
        unfolded: The pieces of a step, counted in each way.
        may_be: By list and layer number, whether a layer may be recomputed.
        seconds: Gives the time of a part of a step.
        kept: Bytes per parameter.
        parameters: The number of parameters.
        rows: The number of rows of a micro-batch.
        micro_batches: The number of micro-batches of a step.
    """

    def __init__(
        self,
        unfolded: Unfolded,
        may_be: Mapping[str, Sequence[bool]],
        seconds: Callable[[Part], float],
        kept: States,
        parameters: float,
        rows: int,
        micro_batches: int,
    ) -> None:
        self.unfolded, self.may_be, self.seconds = unfolded, may_be, seconds
        self.kept, self.parameters, self.rows = kept, parameters, rows
        self.micro_batches = micro_batches
        profile = unfolded.plain.profile
        self.outside = profile.buffers + profile.inputs.of(rows)
        self.layers = [(listed, n) for listed in unfolded.lists for n in range(len(may_be[listed]))]
        self._stays = kept.come(micro_batches)
        self._known: dict[tuple[int, ...], tuple[int, int, int, int]] = {}

    def least(self, budget: float) -> Found | None:
        """The fastest choice within a budget of bytes; None if there is none."""
        hoped = self._searched(budget, min)
        if hoped is None:
            return None
        found = self._judged(hoped)
        if not any(each.peak <= budget for each in found):
            found = [self.judged(ways) for ways in self._uniform()]
            if (sure := self._searched(budget, max)) is not None:
                found += self._judged(sure)
        fits = [each for each in found if each.peak <= budget]
        # Of equally fast ones the first is taken: `_judged` puts the plainest order first.
        return min(fits, key=lambda each: round(each.seconds / TICK), default=None)

    def _judged(self, ways: Ways) -> list[Found]:
        return [self.judged(self._in_order(ways)), self.judged(ways)]

    def smallest(self) -> float:
        """The lowest peak of any choice, in bytes, to a thousandth."""
        high = min(self.judged(ways).peak for ways in self._uniform())
        low = 0.0
        for _ in range(40):  # bisection; the bound keeps rounding from looping
            if high - low <= 1e-3 * high:
                break
            middle = (low + high) / 2
            if (ways := self._searched(middle, max)) is not None:
                high = min(high, self.judged(ways).peak)
            else:
                low = middle
        return high

    def judged(self, ways: Ways) -> Found:
        """A choice with its peak and its time."""
        pieces = self.unfolded.chosen(ways)
        most = self.kept.most(in_runs(pieces), self.parameters, self.rows, 1, self.micro_batches)
        seconds = sum(self.seconds(p.forward) + self.seconds(p.backward) for p in pieces)
        return Found(ways, self.outside + most, seconds)

    def same(self, way: int) -> Ways:
        """The same way for all layers that may be recomputed."""
        return {listed: [way if may else 0 for may in own] for listed, own in self.may_be.items()}

    def shares(self) -> list[Ways]:
        """Choices that recompute the first layers of each list as a whole (the last way).

        Of the longest list it is one layer, two and so on up to all; of others the same share.
        """
        last = len(self.unfolded.counted) - 1
        longest = max(map(sum, self.may_be.values()), default=0)
        found = []
        for count in range(1, longest + 1):
            ways = {}
            for listed, own in self.may_be.items():
                taken = count * sum(own) // longest
                before = [0, *accumulate(own)]
                ways[listed] = [
                    last if may and before[n] < taken else 0 for n, may in enumerate(own)
                ]
            found.append(ways)
        return found

    def _uniform(self) -> list[Ways]:
        ways = range(len(self.unfolded.counted) - 1)
        return [*map(self.same, ways), *self.shares()]

    def _in_order(self, ways: Ways) -> Ways:
        """The same ways, reordered among layers of one kind so that the first keep the least."""
        found: Ways = {}
        for listed, own in ways.items():
            kinds = self.unfolded.plain.stands_for[listed]
            alike = list(zip(kinds, self.may_be[listed], strict=False))
            taken = grouped(zip(alike, own, strict=False))
            for group in taken.values():
                counts = Counter(group)
                pieces = {way: self.unfolded.at(listed, 0, way)[0] for way in counts}
                nets = {way: piece.forward.net.of(self.rows) for way, piece in pieces.items()}
                by_net = sorted(counts, key=nets.__getitem__)
                group[:] = [way for way in by_net for _ in range(counts[way])]
            found[listed] = [taken[alike[n]].pop(0) for n in range(len(own))]
        return found

    def _searched(self, budget: float, leaves: Callable[[Iterable[int]], int]) -> Ways | None:
        """The ways that fit in the least time, by the dynamic program; None if none fit.

        Later layers leave bytes when a layer's backward pass begins; `leaves` picks one amount
        from those of all ways: with `min` the result may not fit, but if it does it is the best.
        """
        import numpy as np

        own = self.kept.fixed + self.kept.own(self.parameters, self.micro_batches) + self.outside
        lasting = self.kept.fixed + self.outside
        lasting += self.parameters * (self.kept.each + self.kept.update)
        if lasting > budget:
            return None
        room = int(budget - own)
        steps = self._steps(leaves)
        before = self._option([self.unfolded.before()], 0, steps[0][1] if steps else 0)
        if before.need > room:
            return None
        held, ticks = np.array([before.net]), np.array([0])
        trail = []
        for options, _ in steps:
            all_held = np.concatenate([held + o.net for o in options])
            all_ticks = np.concatenate([ticks + o.ticks for o in options])
            fits = np.concatenate([held + o.need <= room for o in options])
            came = np.flatnonzero(fits)
            came = came[np.lexsort((all_ticks[came], all_held[came]))]
            best = np.minimum.accumulate(all_ticks[came])
            is_better = np.append(True, best[1:] < best[:-1])[: len(came)]
            came = came[is_better]
            if not len(came):
                return None
            trail.append((came, len(held), options))
            held, ticks = all_held[came], all_ticks[came]
        at = int(np.argmin(ticks))
        ways: Ways = {listed: [] for listed in self.unfolded.lists}
        for (listed, _), (came, width, options) in zip(
            reversed(self.layers), reversed(trail), strict=True
        ):
            number = int(came[at])
            ways[listed].append(options[number // width].way)
            at = number % width
        return {listed: own[::-1] for listed, own in ways.items()}

    def _steps(self, leaves: Callable[[Iterable[int]], int]) -> list[tuple[list[Option], int]]:
        """For each layer its options, and the bytes that it and later layers leave.

        Those are their gradients, and what their backward pass does not free of their forward pass.
        """
        found: list[tuple[list[Option], int]] = []
        left = 0
        for listed, number in reversed(self.layers):
            ways = range(len(self.unfolded.counted)) if self.may_be[listed][number] else [0]
            places = [self.unfolded.at(listed, number, way) for way in ways]
            options = [self._option(p, w, left) for p, w in zip(places, ways, strict=True)]
            left += leaves(sum(map(self._leaves, pieces)) for pieces in places)
            found.append((_paying(options), left))
        return found[::-1]

    def _leaves(self, piece: Piece) -> int:
        gradients = piece.backward.gradients if self._stays else 0.0
        both = piece.forward.net.of(self.rows) + piece.backward.net.of(self.rows)
        return round(both + gradients)

    def _peaks(self, part: Part) -> Sequence[Amount]:
        return part.kept_peaks if self._stays else part.peaks

    def _option(self, pieces: Sequence[Piece], way: int, left: int) -> Option:
        """The option of consecutive pieces, where later layers leave `left` bytes."""
        key = (*map(id, pieces),)
        if key not in self._known:
            self._known[key] = self._weighed(pieces)
        net, there, back, ticks = self._known[key]
        return Option(way, net, max(there, back + left), ticks)

    def _weighed(self, pieces: Sequence[Piece]) -> tuple[int, int, int, int]:
        """Bytes kept, bytes needed in the forward and in the backward pass, and ticks."""
        net = there = back = seconds = 0.0
        for number, piece in enumerate(pieces):
            later = sum(map(self._leaves, pieces[number + 1 :]))
            there = max([there, *(net + peak.of(self.rows) for peak in self._peaks(piece.forward))])
            net += piece.forward.net.of(self.rows)
            peaks = [peak.of(self.rows) for peak in self._peaks(piece.backward)]
            back = max([back, *(net + later + peak for peak in peaks)])
            seconds += self.seconds(piece.forward) + self.seconds(piece.backward)
        return round(net), round(there), round(back), round(seconds / TICK)


def _paying(options: Sequence[Option]) -> list[Option]:
    """The options without those that another one matches or beats in bytes and time."""
    found: list[Option] = []
    for one in sorted(options, key=lambda o: (o.ticks, o.net, o.need)):
        if not any(o.net <= one.net and o.need <= one.need for o in found):
            found.append(one)
    return found
