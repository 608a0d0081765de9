"""Tries points until nothing is to be gained: each is rewritten, run and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from slapo_rewrite.tune.knob_space import KnobSpace, Trial, best_of, shown, shown_value
from slapo_rewrite.tune.predicted_first import PredictedFirst
from slapo_rewrite.tune.strategies import Strategy
from slapo_rewrite.tune.trial_record import TrialRecord

Try = Callable[[int], tuple[Trial, float]]  # runs a point; the seconds that it took


@dataclass(frozen=True)
class Searched:
    """What a search came to.

    Attributes:
        space: What was searched.
        trials: In their order.
        ended: Why it ended.
    """

    space: KnobSpace
    trials: Sequence[Trial]
    ended: str

    @property
    def best(self) -> Trial | None:
        """The best trial, if one ran."""
        return best_of(self.trials)

    def render(self) -> str:
        """A table of the trials, the best one, and why no more were made."""
        best = self.best
        names = [axis.name for axis in self.space.axes]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name in ("trial", *names, "throughput"):
            table.add_column(name, justify="right")
        table.add_column("")
        for count, trial in enumerate(self.trials, 1):
            point = self.space.points[trial.number]
            said = f"{trial.throughput:.6g}" if trial.counts else trial.kind
            values = [shown_value(point[name]) for name in names]
            table.add_row(str(count), *values, said, "best" if trial is best else "")
        console = Console(width=200, no_color=True, force_terminal=False)
        with console.capture() as caught:
            console.print(table)
        lines = [line.rstrip() for line in caught.get().splitlines()]
        return "\n".join([*lines, "", self.summary()])

    def summary(self) -> str:
        """The best point, and why it ended, in a line each."""
        best, tried = self.best, f"{len(self.trials)} of {len(self.space)} points tried"
        if best is None:
            return f"no point ran; {tried}: {self.ended}"
        point = shown(self.space.points[best.number])
        return f"best: {point}, throughput {best.throughput:.6g}\n{tried}: {self.ended}"

    def as_json(self) -> dict[str, Any]:
        """The same as data."""
        best = self.best
        return {
            "best": None
            if best is None
            else {
                "knobs": dict(self.space.points[best.number]),
                "throughput": best.throughput,
            },
            "points": len(self.space),
            "ended": self.ended,
            "trials": [
                {
                    "knobs": dict(self.space.points[trial.number]),
                    "outcome": trial.kind,
                    "throughput": trial.throughput,
                }
                for trial in self.trials
            ],
        }


def search(
    space: KnobSpace,
    strategy: Strategy,
    record: TrialRecord,
    attempt: Try,
    most: int | None,
    say: Callable[[str], None],
) -> Searched:
    """Tries points in a strategy's order, from where the record ends.

    Args:
        space: The points.
        strategy: What to try next, and when to end.
        record: Of the trials so far; takes in those that are made.
        attempt: Runs a point.
        most: How many trials there may be in all, those of the record among them.
        say: Told of each trial.
    """
    if record.trials:
        say(f"{len(record.trials)} trials are in {record.path}")
    while most is None or len(record.trials) < most:
        number = strategy.next(record.trials)
        if number is None:
            return Searched(space, record.trials, _why(space, strategy, record.trials))
        trial, seconds = attempt(number)
        record.add(trial, seconds)
        said = f"throughput {trial.throughput:.6g}" if trial.counts else trial.kind
        point = shown(space.points[number])
        say(f"trial {len(record.trials)}: {point}: {said} ({seconds:.1f} s)")
    return Searched(space, record.trials, "as many as `--trials` allows")


def _why(space: KnobSpace, strategy: Strategy, trials: Sequence[Trial]) -> str:
    """Why a strategy ended."""
    if len({trial.number for trial in trials}) == len(space):
        return "all of them"
    if isinstance(strategy, PredictedFirst):
        return (
            "the chance that one of the others is more than 1% better is "
            f"{strategy.chance:.0%}, by the model of these trials"
        )
    return "the strategy expects no better one"
