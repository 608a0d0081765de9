"""The points that may be tried, and the results of trials.

The points are all combinations of the knobs' values, except excluded ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from slapo_rewrite import errors
from slapo_rewrite.schedule.choices import Direction, Value

Floats = NDArray[np.float64]

# Larger batches need more memory; a larger share of recomputed layers needs less.
STANDARD: Mapping[str, Direction] = {
    "batch_size": "up",
    "micro_batch_size": "up",
    "ckpt_ratio": "down",
}
# Positive values are compared by logarithm if the largest exceeds the smallest by this factor.
WIDE = 8
LARGEST = 20_000  # points


@dataclass(frozen=True)
class Axis:
    """A knob that is tuned."""

    name: str  # the knob's name
    values: tuple[Value, ...]  # its possible values, at least one
    # Whether larger values need more memory ("up") or less ("down"); None if not declared.
    memory: Direction | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether values are numbers or booleans, which have an order."""
        return not any(isinstance(value, str) for value in self.values)

    @property
    def sign(self) -> int:
        """1 if larger values need more memory, -1 if less, 0 if it is not known."""
        return {"up": 1, "down": -1, None: 0}[self.memory or STANDARD.get(self.name)]

    def coordinates(self) -> Floats:
        """A row for each value: a number between 0 and 1, or a one-hot vector for strings."""
        if not self.is_ordered:
            return np.array(
                [[float(value == other) for other in self.values] for value in self.values]
            )
        numbers = np.array([float(value) for value in self.values])
        if numbers.min() > 0 and numbers.max() / numbers.min() > WIDE:
            numbers = np.log(numbers)
        width = numbers.max() - numbers.min()
        return np.asarray((numbers - numbers.min()) / (width or 1.0))[:, None]


Point = Mapping[str, Value]


class KnobSpace:
    """The points that may be tried, numbered in the order of the knobs and of their values.

    Raises:
        BadSpace: No point is allowed, or there are more than can be searched.
    """

    def __init__(
        self, axes: Sequence[Axis], allowed: Callable[[Point], bool] = lambda point: True
    ) -> None:
        size = math.prod(len(axis.values) for axis in axes)
        if size > LARGEST:
            raise errors.BadSpace(
                f"the knobs have {size:,} combinations, but at most {LARGEST:,} are searched",
                hint="give some knobs fewer choices",
            )
        rows = itertools.product(*(range(len(axis.values)) for axis in axes))
        kept = []
        for row in rows:
            point = {axis.name: axis.values[i] for axis, i in zip(axes, row, strict=True)}
            if allowed(point):
                kept.append((row, point))
        if not kept:
            raise errors.BadSpace(
                f"`space` allows none of the {size:,} combinations of "
                + ", ".join(axis.name for axis in axes)
            )
        self.axes = tuple(axes)  # the knobs
        self.points: list[Point] = [point for _, point in kept]  # each has a value of every knob
        columns = [axis.coordinates() for axis in axes]
        # A row for each point, with the columns of `Axis.coordinates`.
        self.coordinates: Floats = np.array(
            [np.concatenate([c[i] for c, i in zip(columns, row, strict=True)]) for row, _ in kept]
        )
        widths = [c.shape[1] for c in columns]
        # For each column, whether memory grows along it, as in `Axis.sign`.
        self.signs = np.repeat([axis.sign for axis in axes], widths)
        # For each column, whether it belongs to a knob that has an order.
        self.ordered = np.repeat([axis.is_ordered for axis in axes], widths)

    def __len__(self) -> int:
        return len(self.points)


def shown(point: Point, names: Iterable[str] | None = None) -> str:
    """A point as text: `batch_size=8 ckpt_ratio=0.5`."""
    return " ".join(f"{name}={shown_value(point[name])}" for name in names or point)


def shown_value(value: Any) -> str:
    """A value as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


Kind = Literal["ok", "out of memory", "timed out", "failed"]
TIMED_OUT: Final = "timed out"


@dataclass(frozen=True)
class Trial:
    """The result of trying a point."""

    number: int  # the point's number in the space
    kind: Kind  # how it ended
    throughput: float = 0.0  # as the command reported it; 0 unless `kind` is "ok"

    @property
    def counts(self) -> bool:
        """Whether it has a throughput."""
        return self.kind == "ok"


def best_of(trials: Iterable[Trial]) -> Trial | None:
    """The first trial with the highest throughput; None if none has one."""
    return max((t for t in trials if t.counts), key=lambda t: t.throughput, default=None)
