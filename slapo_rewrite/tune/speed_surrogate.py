"""How fast the points are that have not been tried: Gaussian processes, of scikit-learn's kernels.

They describe the logarithm of the throughput: a line, bends of each knob, and what knobs do
together. A few trials do not tell how far bends reach, how high they go and how noisy figures are,
so several processes with fixed answers stand side by side, weighted by how well each explains the
trials (Rasmussen and Williams, *Gaussian Processes for Machine Learning*, 2006, chapter 2). One has
hills: a trial says nothing of points that are far away. It counts for little until trials lie so
far apart that the others do not explain them; then the search goes on to where it has not been.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Kernel, Matern

from slapo_rewrite.tune.knob_space import Floats

REACHES = (0.4, 1.2)  # how far bends reach, of a knob's whole range
HEIGHTS = (0.05, 0.15)  # of bends, in logarithms of the throughput
HILLY = 0.03  # how likely there are hills, of 1 for each of the others, before any trial
HILL_REACH, HILL_HEIGHT = 0.25, 0.5  # theirs, likewise
NOISES = (0.004, 0.012)  # of a figure, likewise
SLOPES = 0.02  # the variance of what a knob's whole range does, beyond what is predicted
LEVEL = 0.25  # the variance of how far the throughput of all points is from that of the trials
FAR = 1e5  # the reach along the other columns, of what belongs to one


Numbers = NDArray[np.intp]


@dataclass(frozen=True)
class Predicted:
    """What one process says of the logarithm of the throughput."""

    weight: float  # how well it explains the trials; the weights of all sum to 1
    mean: Floats  # for each point
    variance: Floats  # for each point, without a figure's noise
    covariance: Callable[[Numbers], Floats]  # likewise of some points, by their numbers
    noise: float  # the variance of a figure's noise

    @property
    def deviation(self) -> Floats:
        """For each point, the noise of a figure included."""
        return np.sqrt(self.variance.clip(0) + self.noise)


class SpeedSurrogate:
    """Learns the throughput of points.

    The coordinates have a row for each point.
    """

    def __init__(self, coordinates: Floats) -> None:
        self._x = x = coordinates - 0.5
        smooth = [
            _smooth(x.shape[1], reach, height)
            for reach, height in itertools.product(REACHES, HEIGHTS)
        ]
        self._processes = [*((kernel, 1.0) for kernel in smooth), (_hilly(x.shape[1]), HILLY)]

    def predict(
        self, numbers: Sequence[int], throughputs: Sequence[float], prior: Floats
    ) -> list[Predicted]:
        """What each process says.

        `prior` has for each point the logarithm of its throughput as it is predicted without any
        trial, but for a constant.
        """
        tried = np.array(numbers)
        logarithms = np.log(throughputs)
        offset = prior + (logarithms - prior[tried]).mean()
        left = logarithms - offset[tried]
        found = []
        for kernel, belief in self._processes:
            # Never of all points with all points: there may be thousands.
            across, alone = kernel(self._x, self._x[tried]), kernel.diag(self._x)
            for noise in np.square(NOISES):
                factor = cho_factor(across[tried] + noise * np.eye(len(tried)), lower=True)
                solved = cho_solve(factor, left)
                evidence = -left @ solved / 2 - np.log(factor[0].diagonal()).sum() + np.log(belief)
                # Trials that lie further apart than a process allows say that all may.
                spread = max(1.0, left @ solved / len(tried))
                told = np.einsum("ij,ji->i", across, cho_solve(factor, across.T))
                rest = functools.partial(self._rest, kernel, across, factor, spread)
                mean, variance = offset + across @ solved, (alone - told) * spread
                found.append((evidence, mean, variance, rest, float(noise)))
        weights = np.exp([each[0] - max(found, key=lambda one: one[0])[0] for each in found])
        weights /= weights.sum()
        return [
            Predicted(float(weight), *rest)
            for weight, (_, *rest) in zip(weights, found, strict=True)
        ]

    def _rest(
        self, kernel: Kernel, across: Floats, factor: Any, spread: float, numbers: Numbers
    ) -> Floats:
        """The covariance of some points that the trials leave."""
        own = across[numbers]
        return np.asarray((kernel(self._x[numbers]) - own @ cho_solve(factor, own.T)) * spread)


def samples(
    predicted: Sequence[Predicted], numbers: Numbers, count: int, random: np.random.Generator
) -> Floats:
    """What the logarithms of some points may be together, without a figure's noise.

    One row a sample.
    """
    drawn = random.choice(len(predicted), count, p=[each.weight for each in predicted])
    rows = []
    for each, times in zip(predicted, np.bincount(drawn, minlength=len(predicted)), strict=True):
        if times:
            values, vectors = np.linalg.eigh(each.covariance(numbers))
            root = vectors * np.sqrt(values.clip(0))
            rows.append(each.mean[numbers] + random.normal(size=(times, len(numbers))) @ root.T)
    return np.concatenate(rows)


def _smooth(columns: int, reach: float, height: float) -> Kernel:
    kernel = _sloping()
    for column in range(columns):
        reaches = np.full(columns, FAR)
        reaches[column] = reach
        kernel = kernel + ConstantKernel(height**2) * Matern(reaches, nu=2.5)
    together = Matern(np.full(columns, 2 * reach), nu=2.5)
    return kernel + ConstantKernel((height / 3) ** 2) * together


def _hilly(columns: int) -> Kernel:
    hills = ConstantKernel(HILL_HEIGHT**2) * Matern(np.full(columns, HILL_REACH), nu=2.5)
    return _sloping() + hills


def _sloping() -> Kernel:
    kernel: Kernel = ConstantKernel(LEVEL) + ConstantKernel(SLOPES) * DotProduct(1e-3)
    return kernel
