"""Tries first what is predicted to bring most, and learns from each trial.

What a point may bring is the throughput that it is expected to have beyond the best so far, times
the square of how likely it fits, into memory and into the time of a run: one that does not fit
costs a trial and says little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from slapo_rewrite.tune.knob_space import TIMED_OUT, Floats, KnobSpace, Trial, best_of
from slapo_rewrite.tune.limit_belief import LimitBelief
from slapo_rewrite.tune.speed_surrogate import Predicted, SpeedSurrogate, samples

# What the whole range of a knob brings if it costs memory, in logarithms of the throughput: a layer
# that is recomputed takes a third more. A knob that costs memory and brings nothing would be no
# knob; which ones cost it is learned as trials fail.
PAYS = 0.2
LEAST = 0.02  # what a first trial is worth that brings nothing else
CAUTION = 2  # the power of how likely a point fits
GAIN = 1.01  # what would be worth another trial
DRAWS = 500  # of what throughputs may be
CANDIDATES = 64  # of them, the most promising points


class PredictedFirst:
    """The default.

    The seed is of random numbers, which decide between points that are about as good. It ends when
    with the probability `confidence` no point is more than 1% better than the best; with None it
    goes on until all have been tried.
    """

    def __init__(self, space: KnobSpace, seed: int = 0, confidence: float | None = None) -> None:
        self._space, self._seed, self._confidence = space, seed, confidence
        self._memory = LimitBelief(space, space.signs, seed)
        # Only once a run took too long: else all are taken to have the time.
        self._time: LimitBelief | None = None
        self._speed = SpeedSurrogate(space.coordinates)
        self._random = np.random.default_rng(seed)
        self._preference = 1 + 1e-6 * self._random.random(len(space))
        self._seen = 0
        self.chance = 1.0  # that a point is more than 1% better than the best so far

    def next(self, trials: Sequence[Trial]) -> int | None:
        """The point that may bring most; None once none is likely to bring 1%, or none is left."""
        self._see(trials)
        untried = np.setdiff1d(np.arange(len(self._space)), [trial.number for trial in trials])
        if not len(untried):
            self.chance = 0.0
            return None
        fits, best = self._fits(), best_of(trials)
        if best is None:
            prior = self._expected()
            worth = np.maximum(prior - prior[fits.argmax()] + LEAST, 1e-9) * fits
        else:
            said = self._said(trials)
            worth = _expected_gain(said, float(np.log(best.throughput))) * fits**CAUTION
            if self._confidence is not None:
                self.chance = self._chance(said, untried, fits, best)
                if self.chance <= 1 - self._confidence:
                    return None
        return int(untried[(worth * self._preference)[untried].argmax()])

    def _see(self, trials: Sequence[Trial]) -> None:
        """Takes in what is new: each limit tells nothing of the other, but that both were kept."""
        new = trials[self._seen :]
        if self._time is None and any(trial.kind == TIMED_OUT for trial in new):
            # What costs memory may save time: of its directions nothing is declared.
            self._time = LimitBelief(self._space, np.zeros_like(self._space.signs), self._seed)
            for trial in trials[: self._seen]:
                if trial.counts:
                    self._time.see(trial.number, True)
        for trial in new:
            if trial.kind != TIMED_OUT:
                self._memory.see(trial.number, trial.counts)
            if self._time and trial.kind in ("ok", TIMED_OUT):
                self._time.see(trial.number, trial.counts)
        self._seen = len(trials)

    def _fits(self) -> Floats:
        """How likely each point fits into memory, and into the time."""
        fits = self._memory.fits()
        return fits * self._time.fits() if self._time else fits

    def _said(self, trials: Sequence[Trial]) -> list[Predicted]:
        """What is known of the logarithm of the throughput, after trials of which some ran."""
        counted = [trial for trial in trials if trial.counts]
        return self._speed.predict(
            [trial.number for trial in counted],
            [trial.throughput for trial in counted],
            self._expected(),
        )

    def expected(self, trials: Sequence[Trial]) -> Floats:
        """For each point the throughput that is expected, should it fit: after a call of `next`."""
        return np.exp(sum(one.weight * one.mean for one in self._said(trials)))

    def _expected(self) -> Floats:
        """For each point the logarithm of the throughput before any is known."""
        return np.asarray((self._space.coordinates - 0.5) @ (self._memory.directions() * PAYS))

    def _chance(
        self, said: Sequence[Predicted], untried: NDArray[np.intp], fits: Floats, best: Trial
    ) -> float:
        """How likely one of the points that have not been tried is more than 1% better."""
        wanted = float(np.log(best.throughput * GAIN))
        each = fits * sum(one.weight * norm.sf((wanted - one.mean) / one.deviation) for one in said)
        numbers = untried[np.argsort(-each[untried])][:CANDIDATES]
        better = samples(said, numbers, DRAWS, self._random) > wanted
        fitting = self._memory.samples(numbers, DRAWS, self._random)
        if self._time:
            fitting &= self._time.samples(numbers, DRAWS, self._random)
        return float((better & fitting).any(1).mean())


def expected_throughputs(space: KnobSpace, trials: Sequence[Trial]) -> Floats:
    """For each point the throughput that is expected after trials of which one at least ran."""
    model = PredictedFirst(space)
    model.next(trials)
    return model.expected(trials)


def _expected_gain(said: Sequence[Predicted], best: float) -> Floats:
    """For each point by how much it is expected to be better than the best, if it is at all."""
    total = np.zeros_like(said[0].mean)
    for one in said:
        ahead = one.mean - best
        z = ahead / one.deviation
        total += one.weight * (ahead * norm.cdf(z) + one.deviation * norm.pdf(z))
    return total
