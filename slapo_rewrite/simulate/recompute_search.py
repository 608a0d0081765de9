"""Which layers to recompute, and what of them, so that a step fits at the least time: exactly.

On the way there a layer meets what those before it keep, and on the way back it meets the same
again. So what is kept up to a layer is all that matters of the choices before it: layer by layer,
those sums of kept bytes and of seconds are carried on of which no other has less of both.
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

# Seconds are added up as whole numbers of these: sums of the same are the same then.
TICK = 1e-15
# For each layer of each list by the list's path, the number of a way to recompute it.
Ways = dict[str, list[int]]


@dataclass(frozen=True)
class Option:
    """One way for one layer."""

    way: int  # its number
    net: int  # bytes that it keeps until the way back
    need: int  # bytes that there must be room for where it begins
    ticks: int  # what it takes, there and back


@dataclass(frozen=True)
class Found:
    """An answer."""

    ways: Ways  # for each layer, what is recomputed
    peak: float  # bytes that the step holds at most, all in all
    seconds: float  # of the step's operators


class RecomputeSearch:
    """Looks for what to recompute.

    Args:
        unfolded: The parts of a step, as counted in each way.
        may_be: By list and number, whether a layer may be recomputed.
        seconds: What a part of a step takes.
        kept: Bytes for each parameter.
        parameters: How many there are.
        rows: Rows of a micro-batch.
        micro_batches: How many make up a step.
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
        """What fits a budget at the least time; None where nothing does."""
        hoped = self._searched(budget, min)
        if hoped is None:
            return None
        found = self._judged(hoped)
        if not any(each.peak <= budget for each in found):
            found = [self.judged(ways) for ways in self._uniform()]
            if (sure := self._searched(budget, max)) is not None:
                found += self._judged(sure)
        fits = [each for each in found if each.peak <= budget]
        # Of what takes as long, the one in which the layers' order is the plainest comes first.
        return min(fits, key=lambda each: round(each.seconds / TICK), default=None)

    def _judged(self, ways: Ways) -> list[Found]:
        return [self.judged(self._in_order(ways)), self.judged(ways)]

    def smallest(self) -> float:
        """The least bytes that any choice holds at most, to a thousandth."""
        high = min(self.judged(ways).peak for ways in self._uniform())
        low = 0.0
        for _ in range(40):  # halves, whatever rounding does
            if high - low <= 1e-3 * high:
                break
            middle = (low + high) / 2
            if (ways := self._searched(middle, max)) is not None:
                high = min(high, self.judged(ways).peak)
            else:
                low = middle
        return high

    def judged(self, ways: Ways) -> Found:
        """What a choice takes."""
        pieces = self.unfolded.chosen(ways)
        most = self.kept.most(in_runs(pieces), self.parameters, self.rows, 1, self.micro_batches)
        seconds = sum(self.seconds(p.forward) + self.seconds(p.backward) for p in pieces)
        return Found(ways, self.outside + most, seconds)

    def same(self, way: int) -> Ways:
        """One way for all layers that may be recomputed."""
        return {listed: [way if may else 0 for may in own] for listed, own in self.may_be.items()}

    def shares(self) -> list[Ways]:
        """The last way, whole layers, for as many of the first layers of each list as can be.

        From one of the longest list on to all, and of others the same share.
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
        """The same, where of layers of one kind the first ones are those that keep the least."""
        found: Ways = {}
        for listed, own in ways.items():
            kinds = self.unfolded.plain.stands_for[listed]
            alike = list(zip(kinds, self.may_be[listed], strict=False))
            taken = grouped(zip(alike, own, strict=False))
            for group in taken.values():
                counts = Counter(group)
                by_net = sorted(counts, key=lambda way: self._net(listed, way))
                group[:] = [way for way in by_net for _ in range(counts[way])]
            found[listed] = [taken[alike[n]].pop(0) for n in range(len(own))]
        return found

    def _net(self, listed: str, way: int) -> float:
        pieces = self.unfolded.at(listed, 0, way)
        return pieces[0].forward.net.of(self.rows)

    def _searched(self, budget: float, leaves: Callable[[Iterable[int]], int]) -> Ways | None:
        """The least time that fits.

        `leaves` says what is counted on of what the ways of later layers leave where a layer's way
        back begins. With the least, what is found may need more, and is the best if not.
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
        """For each layer what may be done, and what it and those behind it leave on the way back.

        That is their gradients; and what of their way there is let go later than on their way back.
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
        """One or several pieces, one after the other."""
        key = (*map(id, pieces),)
        if key not in self._known:
            self._known[key] = self._weighed(pieces)
        net, there, back, ticks = self._known[key]
        return Option(way, net, max(there, back + left), ticks)

    def _weighed(self, pieces: Sequence[Piece]) -> tuple[int, int, int, int]:
        """Bytes that are kept, that are needed on the way there and back, and ticks."""
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
    """Those than which no other keeps, needs and takes as little."""
    found: list[Option] = []
    for one in sorted(options, key=lambda o: (o.ticks, o.net, o.need)):
        if not any(o.net <= one.net and o.need <= one.need for o in found):
            found.append(one)
    return found
