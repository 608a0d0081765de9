"""Tries the most promising points first, and learns from each trial.

The worth of a point is its expected improvement of throughput over the best so far, times the
square of the probability that it fits, into memory and into the time of a run: a point that does
not fit costs a trial and tells little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from slapo_rewrite.tune.knob_space import TIMED_OUT, Floats, KnobSpace, Trial, best_of
from slapo_rewrite.tune.limit_belief import LimitBelief
from slapo_rewrite.tune.speed_surrogate import Predicted, SpeedSurrogate, samples

# The gain over the whole range of a knob that costs memory, in logarithms of the throughput: a
# recomputed layer takes a third longer. A knob that costs memory without any gain would be useless;
# which ones cost memory is learned from failed trials.
PAYS = 0.2
LEAST = 0.02  # the worth of a first trial without any gain
CAUTION = 2  # the power of the probability that a point fits
GAIN = 1.01  # the improvement that is worth another trial
DRAWS = 500  # random draws of throughputs
CANDIDATES = 64  # the most promising points, for which they are drawn


class PredictedFirst:
    """The default strategy.

    The seed is for random numbers, which decide between about equally good points. It ends when,
    with the probability `confidence`, no point is more than 1% better than the best; with None it
    continues until all points are tried.
    """

    def __init__(self, space: KnobSpace, seed: int = 0, confidence: float | None = None) -> None:
        self._space, self._seed, self._confidence = space, seed, confidence
        self._memory = LimitBelief(space, space.signs, seed)
        # Exists only after a run took too long: before, all are assumed to be in time.
        self._time: LimitBelief | None = None
        self._speed = SpeedSurrogate(space.coordinates)
        self._random = np.random.default_rng(seed)
        self._preference = 1 + 1e-6 * self._random.random(len(space))
        self._seen = 0
        self.chance = 1.0  # the probability that a point is more than 1% better than the best

    def next(self, trials: Sequence[Trial]) -> int | None:
        """The most promising point; None if none is likely to improve by 1%, or none is left."""
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
        """Learns from new trials: a success is within both limits, a failure concerns one."""
        new = trials[self._seen :]
        if self._time is None and any(trial.kind == TIMED_OUT for trial in new):
            # A knob that costs memory may save time, so no directions are declared.
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
        """The probability that each point fits into memory and time."""
        fits = self._memory.fits()
        return fits * self._time.fits() if self._time else fits

    def _said(self, trials: Sequence[Trial]) -> list[Predicted]:
        """The predictions of the logarithm of the throughput, after some successful trials."""
        counted = [trial for trial in trials if trial.counts]
        return self._speed.predict(
            [trial.number for trial in counted],
            [trial.throughput for trial in counted],
            self._expected(),
        )

    def expected(self, trials: Sequence[Trial]) -> Floats:
        """The expected throughput of each point if it fits; call `next` before."""
        return np.exp(sum(one.weight * one.mean for one in self._said(trials)))

    def _expected(self) -> Floats:
        """The prior of the logarithm of each point's throughput."""
        return np.asarray((self._space.coordinates - 0.5) @ (self._memory.directions() * PAYS))

    def _chance(
        self, said: Sequence[Predicted], untried: NDArray[np.intp], fits: Floats, best: Trial
    ) -> float:
        """The probability that an untried point is more than 1% better."""
        wanted = float(np.log(best.throughput * GAIN))
        each = fits * sum(one.weight * norm.sf((wanted - one.mean) / one.deviation) for one in said)
        numbers = untried[np.argsort(-each[untried])][:CANDIDATES]
        better = samples(said, numbers, DRAWS, self._random) > wanted
        fitting = self._memory.samples(numbers, DRAWS, self._random)
        if self._time:
            fitting &= self._time.samples(numbers, DRAWS, self._random)
        return float((better & fitting).any(1).mean())


def expected_throughputs(space: KnobSpace, trials: Sequence[Trial]) -> Floats:
    """The expected throughput of each point, after trials of which at least one succeeded."""
    model = PredictedFirst(space)
    model.next(trials)
    return model.expected(trials)


def _expected_gain(said: Sequence[Predicted], best: float) -> Floats:
    """The expected improvement of each point over the best."""
    total = np.zeros_like(said[0].mean)
    for one in said:
        ahead = one.mean - best
        z = ahead / one.deviation
        total += one.weight * (ahead * norm.cdf(z) + one.deviation * norm.pdf(z))
    return total
