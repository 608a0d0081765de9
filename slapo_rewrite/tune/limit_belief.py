"""Estimates from trials which points stay within a limit, of memory or of time.

The need is monotone in every knob: a point that needs at least as much as one that did not fit does
not fit either. The direction and the weight of each knob are learned. Many possible models of the
need are kept, with weights; each trial reduces the weights of models that did not expect it. They
are points of a Sobol sequence, and so many that another sequence hardly changes an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import gamma, norm, qmc

if TYPE_CHECKING:
    from slapo_rewrite.tune.knob_space import Floats, KnobSpace

MODELS = 2**16  # fewer if there are many points
CELLS = 2**23  # the largest table of models and points
WITHOUT_EFFECT = 0.2  # the probability that an undeclared knob has no effect
SMALLEST, ROOMIEST = 0.1, 1.2  # the share of points that fit; above 1 all fit, with room
SHARP, BLURRED = 0.01, 0.05  # the width of the border, in standard deviations of the need
SURPRISE = 0.005  # the probability of a trial that no model expects


class LimitBelief:
    """The probability that each point of a space fits.

    `declared` has for each column of the coordinates 1 or -1 if the need is known to grow or shrink
    along it, else 0; `seed` selects the Sobol sequence.
    """

    def __init__(self, space: KnobSpace, declared: NDArray[np.intp], seed: int = 0) -> None:
        x = space.coordinates
        points, columns = x.shape
        count = max(2**9, min(MODELS, 2 ** int(np.log2(CELLS / points))))
        sequence = qmc.Sobol(3 * columns + 2, scramble=True, rng=seed).random(count).T
        sequence = sequence.clip(1e-6, 1 - 1e-6)
        which, weight, bend = (sequence[i * columns : (i + 1) * columns] for i in range(3))
        unknown = np.where(np.abs(which - 0.5) < WITHOUT_EFFECT / 2, 0.0, np.sign(which - 0.5))
        signs = np.where(declared[:, None] != 0, declared[:, None], unknown)
        signs = np.where(space.ordered[:, None], signs, norm.ppf(which) / 2)  # strings: any effect
        self._signs = np.where(space.ordered[:, None], signs, 0.0)
        effects = signs * gamma.ppf(weight, 1.5) / 1.5
        bends = np.exp(1.4 * (bend - 0.5))
        need = np.zeros((points, count))
        for column in range(columns):
            values, of_point = np.unique(x[:, column], return_inverse=True)  # few of many points
            need += (effects[column] * values[:, None] ** bends[column])[of_point]
        need /= need.std(0) + 1e-9
        share = SMALLEST + (ROOMIEST - SMALLEST) * sequence[-2]
        ranked = np.sort(need.T.copy())  # contiguous in memory
        last = np.minimum((share * points).astype(int), points - 1)
        limit = np.where(share < 1, ranked[np.arange(count), last], ranked[:, -1] + 0.5)
        blur = SHARP * (BLURRED / SHARP) ** sequence[-1]
        self._fits = expit(((limit - need) / blur).astype(np.float32))
        self._likelihood = np.zeros(count)

    def see(self, number: int, fits: bool) -> None:
        """Updates the weights by a trial."""
        expected = self._fits[number] if fits else 1 - self._fits[number]
        self._likelihood += np.log(expected * (1 - 2 * SURPRISE) + SURPRISE)

    @property
    def weights(self) -> Floats:
        """The probability of each model."""
        weights: Floats = np.exp(self._likelihood - self._likelihood.max())
        return np.asarray(weights / weights.sum())

    def fits(self) -> Floats:
        """The probability that each point fits."""
        return np.asarray(self._fits @ self.weights, float)

    def samples(
        self, numbers: NDArray[np.intp], count: int, random: np.random.Generator
    ) -> NDArray[np.bool_]:
        """Which of some points fit in randomly drawn models: one row for each model."""
        models = random.choice(len(self._likelihood), count, p=self.weights)
        chances = self._fits[np.ix_(numbers, models)].T
        return np.asarray(random.random(chances.shape) < chances)

    def directions(self) -> Floats:
        """For each column of the coordinates, from -1 to 1: the need shrinks or grows along it."""
        return np.asarray(self._signs @ self.weights, float)
