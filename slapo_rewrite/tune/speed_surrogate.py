"""Predicts the throughput of untried points by Gaussian processes, with scikit-learn's kernels.

They describe the logarithm of the throughput: a linear part, nonlinear parts of each knob, and
interactions. A few trials do not determine length scales, amplitudes and noise, so several
processes with fixed values are mixed, weighted by the marginal likelihood of the trials (Rasmussen
and Williams, *Gaussian Processes for Machine Learning*, 2006, chapter 2). One is hilly, with a
short length scale: a trial tells nothing about far points. Its weight is small until the trials
contradict the others; then the search explores new regions.
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

REACHES = (0.4, 1.2)  # length scales, as shares of a knob's range
HEIGHTS = (0.05, 0.15)  # amplitudes, in logarithms of the throughput
HILLY = 0.03  # the prior weight of the hilly process; each other one has 1
HILL_REACH, HILL_HEIGHT = 0.25, 0.5  # its length scale and amplitude
NOISES = (0.004, 0.012)  # standard deviations of a measurement, in logarithms
SLOPES = 0.02  # the variance of a knob's linear effect, beyond the prior
LEVEL = 0.25  # the variance of the mean over all points, relative to the trials
FAR = 1e5  # the length scale of one knob's part along the other columns


Numbers = NDArray[np.intp]


@dataclass(frozen=True)
class Predicted:
    """One process's prediction of the logarithm of the throughput."""

    weight: float  # the probability of the process; the weights of all sum to 1
    mean: Floats  # for each point
    variance: Floats  # for each point, without measurement noise
    covariance: Callable[[Numbers], Floats]  # of points with these numbers
    noise: float  # the variance of measurement noise

    @property
    def deviation(self) -> Floats:
        """The standard deviation for each point, with measurement noise."""
        return np.sqrt(self.variance.clip(0) + self.noise)


class SpeedSurrogate:
    """Predicts the throughput of points from trials.

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
        """The prediction of each process.

        `prior` has for each point the logarithm of its throughput, as predicted without trials, up
        to a constant.
        """
        tried = np.array(numbers)
        logarithms = np.log(throughputs)
        offset = prior + (logarithms - prior[tried]).mean()
        left = logarithms - offset[tried]
        found = []
        for kernel, belief in self._processes:
            # Never between all points: there may be thousands.
            across, alone = kernel(self._x, self._x[tried]), kernel.diag(self._x)
            for noise in np.square(NOISES):
                factor = cho_factor(across[tried] + noise * np.eye(len(tried)), lower=True)
                solved = cho_solve(factor, left)
                evidence = -left @ solved / 2 - np.log(factor[0].diagonal()).sum() + np.log(belief)
                # If trials vary more than a process allows, all its variances are scaled.
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
        """The posterior covariance of some points."""
        own = across[numbers]
        return np.asarray((kernel(self._x[numbers]) - own @ cho_solve(factor, own.T)) * spread)


def samples(
    predicted: Sequence[Predicted], numbers: Numbers, count: int, random: np.random.Generator
) -> Floats:
    """Joint samples of the logarithms of some points' throughputs, without measurement noise.

    Each row is a sample.
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
