"""Replays strategies on a grid of measured throughputs, to count the trials that each needs.

The file is a JSON object: a list of values for each knob, by name, and `throughput`, nested lists
with an axis for each knob, in order. 0 or null is a point that ran out of memory, "timed out" one
that took too long. Further texts (`source`, `unit`) document the origin.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.schedule.choices import is_value
from slapo_rewrite.tune.knob_space import TIMED_OUT, Axis, Kind, KnobSpace, Trial, best_of, shown
from slapo_rewrite.tune.strategies import made

NEAR = 0.99  # a good share of the best throughput


@dataclass(frozen=True)
class Grid:
    """A throughput for each point of a space."""

    name: str  # the file
    space: KnobSpace  # the points
    throughputs: list[float]  # of the points, 0 if memory or time did not suffice
    timed_out: frozenset[int] = frozenset()  # the numbers of points that took too long

    @property
    def best(self) -> int:
        """The number of the best point."""
        return max(range(len(self.throughputs)), key=self.throughputs.__getitem__)

    def summary(self) -> dict[str, Any]:
        """A summary of the grid."""
        return {
            "grid": self.name,
            "points": len(self.space),
            "points_that_ran": sum(1 for throughput in self.throughputs if throughput),
            "best": {
                "knobs": dict(self.space.points[self.best]),
                "throughput": self.throughputs[self.best],
            },
            "near": NEAR,
        }

    def trial(self, number: int) -> Trial:
        """The result of trying a point."""
        throughput = self.throughputs[number]
        lacks: Kind = TIMED_OUT if number in self.timed_out else "out of memory"
        return Trial(number, "ok" if throughput else lacks, throughput)


def read_grid(path: Path) -> Grid:
    """Reads a grid; raises `BadGrid` for a wrong file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        line = error.doc.splitlines()[error.lineno - 1] if error.doc.strip() else ""
        at = errors.Span(str(path), error.lineno, error.colno, 1, line)
        raise errors.BadGrid(f"the grid is not JSON: {error.msg}", at=at) from None
    except (OSError, ValueError) as error:
        raise errors.BadGrid(f"cannot read `{path}`: {getattr(error, 'strerror', error)}") from None
    hint = (
        'a grid is an object such as {"batch_size": [8, 16], "ckpt_ratio": [0.0, 1.0], '
        '"throughput": [[10.1, 9.3], [0, 11.2]]}'
    )
    if not isinstance(content, dict) or "throughput" not in content:
        raise errors.BadGrid(f"`{path}` has no `throughput`", hint=hint)
    measured = content.pop("throughput")
    axes = [
        _axis(path, name, values) for name, values in content.items() if isinstance(values, list)
    ]
    if not axes:
        raise errors.BadGrid(f"`{path}` has no knobs", hint=hint)
    found: list[float | None] = []
    _flatten(path, measured, axes, [], found)
    if not any(found):
        raise errors.BadGrid(f"no point of `{path}` has a throughput above 0")
    timed_out = frozenset(number for number, each in enumerate(found) if each is None)
    return Grid(str(path), KnobSpace(axes), [each or 0.0 for each in found], timed_out)


def _axis(path: Path, name: str, values: list[Any]) -> Axis:
    if not values:
        raise errors.BadGrid(f"knob `{name}` of `{path}` has no values")
    for value in values:
        if not is_value(value):
            raise errors.BadGrid(
                f"knob `{name}` of `{path}` has the value {json.dumps(value)}",
                hint="values are numbers, texts, true and false",
            )
    # `1 == True`, so a knob cannot have both values.
    if len(set(values)) < len(values):
        raise errors.BadGrid(f"knob `{name}` of `{path}` has a value twice")
    return Axis(name, tuple(values))


def _flatten(
    path: Path, values: Any, axes: Sequence[Axis], place: list[str], found: list[float | None]
) -> None:
    """Appends the throughputs of nested lists to `found`, in order; None for timeouts."""
    where = " ".join(["throughput", *(f"at {each}" for each in place[-1:])])
    if len(place) == len(axes):
        if values == TIMED_OUT:
            found.append(None)
            return
        if values is None:
            values = 0
        is_number = isinstance(values, int | float) and not isinstance(values, bool)
        if not is_number or not 0 <= values < float("inf"):
            raise errors.BadGrid(
                f"`{path}`: {where} is {json.dumps(values)}",
                hint=f'a throughput is a number; 0 or null if out of memory, "{TIMED_OUT}" if out '
                "of time",
            )
        found.append(float(values))
        return
    axis = axes[len(place)]
    if not isinstance(values, list) or len(values) != len(axis.values):
        there = f"{len(values)}" if isinstance(values, list) else "no list"
        raise errors.BadGrid(
            f"`{path}`: {where} has to be a list of {len(axis.values)}, for knob `{axis.name}`, "
            f"and is {there}",
            hint="`throughput` has an axis for each list of values, in their order",
        )
    for value, inner in zip(axis.values, values, strict=True):
        _flatten(path, inner, axes, [*place, f"{axis.name}={value}"], found)


def trials_of(
    grid: Grid, name: str, seed: int, confidence: float | None = None, before: Sequence[Trial] = ()
) -> Iterator[Trial]:
    """The trials that a strategy makes after the trials `before`, until it ends."""
    trials, strategy = list(before), made(name, grid.space, seed, confidence)
    while (number := strategy.next(trials)) is not None:
        trials.append(grid.trial(number))
        yield trials[-1]


def replayed(
    grid: Grid, names: Sequence[str], seeds: int, confidence: float, first: int = 0
) -> dict[str, dict[str, Any]]:
    """Replays each strategy with several seeds.

    Returns, by strategy: the `trials` to 99% of the best for each seed, None if never reached, and
    their `worst`, `median`, `mean`; `ends_after` and `ends_with`, the trials after which it ends
    and the share of the best throughput that it then has, for all seeds.
    """
    return {name: _replayed(grid, name, range(first, first + seeds), confidence) for name in names}


def _replayed(grid: Grid, name: str, seeds: range, confidence: float) -> dict[str, Any]:
    most, counts, ends = grid.throughputs[grid.best], [], []
    for seed in seeds:
        trials = list(trials_of(grid, name, seed, confidence))
        best = best_of(trials)
        ends.append((len(trials), best.throughput / most if best else 0.0))
        # Continues without a confidence if the trials were too few.
        every = itertools.chain(trials, trials_of(grid, name, seed, before=trials))
        near = (n for n, trial in enumerate(every, 1) if trial.throughput >= NEAR * most)
        counts.append(next(near, None))
    reached = [count for count in counts if count is not None]
    whole = len(reached) == len(counts)
    return {
        "trials": counts,
        "worst": max(reached) if whole else None,
        "median": statistics.median(reached) if whole else None,
        "mean": statistics.mean(reached) if whole else None,
        "ends_after": [count for count, _ in ends],
        "ends_with": [round(part, 4) for _, part in ends],
    }


def rendered(grid: Grid, results: dict[str, dict[str, Any]]) -> str:
    """The results as text: a line for each strategy."""
    best = shown(grid.space.points[grid.best])
    ran = sum(1 for throughput in grid.throughputs if throughput)
    lines = [
        f"{grid.name}: {len(grid.space)} points, {ran} of which ran; the best: {best}, throughput "
        f"{grid.throughputs[grid.best]:.6g}",
        f"trials to {NEAR:.0%} of it:",
        f"{'strategy':<12}{'worst':>7}{'median':>8}{'mean':>7}   ends after, with",
    ]
    for name, result in results.items():
        figures = [result[key] for key in ("worst", "median", "mean")]
        worst, median, mean = ("never" if f is None else f"{f:.4g}" for f in figures)
        after, least = statistics.median(result["ends_after"]), min(result["ends_with"])
        lines.append(f"{name:<12}{worst:>7}{median:>8}{mean:>7}   {after:.4g}, {least:.1%}")
    return "\n".join(lines)
