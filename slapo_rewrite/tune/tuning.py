"""Runs a search of the space that a schedule declares, by the training command."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from slapo_rewrite import errors
from slapo_rewrite.code.locate import locate as locate_source
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.tune import training_command
from slapo_rewrite.tune.knob_space import KnobSpace, Trial, best_of, shown, shown_value
from slapo_rewrite.tune.predicted_first import PredictedFirst
from slapo_rewrite.tune.strategies import Strategy, made
from slapo_rewrite.tune.trial_record import TrialRecord, header, recording
from slapo_rewrite.tune.tuned_schedule import Tuned, read

RECORD, SURFACE = "trials.jsonl", "surface.png"
Try = Callable[[int], tuple[Trial, float]]  # runs a point; returns the trial and seconds


@dataclass(frozen=True)
class Wanted:
    """The request for a search."""

    # A file or an importable module; None if the schedule names it as `SOURCE`.
    source: str | None
    schedule: str  # a file, or the name of a schedule that ships with the tool
    command: str  # the training command
    fixed: Sequence[str]  # `K=V` for each knob that is not tuned
    folder: Path  # for the record, the rewritten models, the logs and the plot
    strategy: str = "model"  # the strategy's name
    seed: int = 0  # of the strategy's random numbers
    confidence: float = 0.9  # with which the search ends
    most: int | None = None  # the largest number of trials
    timeout_s: float | None = None  # the limit of a run, in seconds


@dataclass(frozen=True)
class Searched:
    """The result of a search."""

    space: KnobSpace  # the searched space
    trials: Sequence[Trial]  # in order
    ended: str  # why it ended

    @property
    def best(self) -> Trial | None:
        """The best trial, if one ran."""
        return best_of(self.trials)

    def render(self) -> str:
        """A table of the trials, the best one, and why the search ended."""
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
        """The best point, and why the search ended, one line each."""
        best, tried = self.best, f"{len(self.trials)} of {len(self.space)} points tried"
        if best is None:
            return f"no point ran; {tried}: {self.ended}"
        point = shown(self.space.points[best.number])
        return f"best: {point}, throughput {best.throughput:.6g}\n{tried}: {self.ended}"

    def as_json(self) -> dict[str, Any]:
        """The result as data."""
        best = self.best
        return {
            "best": None
            if best is None
            else {"knobs": dict(self.space.points[best.number]), "throughput": best.throughput},
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
    """Tries points in a strategy's order, and continues the record.

    `most` is the largest number of trials, including those of the record.
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
            f"the probability that another point is more than 1% better is {strategy.chance:.0%}, "
            "by the model of these trials"
        )
    return "the strategy expects no better one"


def tune(wanted: Wanted, say: Callable[[str], None]) -> Searched:
    """Searches, and plots the surface."""
    from slapo_rewrite.tune.surface_plot import draw

    tuned = read(wanted.schedule, wanted.fixed)
    source = wanted.source or source_of(tuned.schedule)
    names = [axis.name for axis in tuned.space.axes]
    of_run = tuple(name for name in names if name not in tuned.of_schedule)
    training_command.check(wanted.command, tuned.of_schedule, of_run)
    texts = {
        "source": locate_source(source)[0].read_text(encoding="utf-8-sig"),
        "schedule": tuned.schedule.text,
    }
    head = header(source, texts, wanted.fixed, wanted.command, tuned.space)
    strategy = made(wanted.strategy, tuned.space, wanted.seed, wanted.confidence)

    def attempt(number: int) -> tuple[Trial, float]:
        start = time.monotonic()
        try:
            trial = _tried(wanted, tuned, source, number)
        except errors.RewriteError as error:
            error.message = f"at {shown(tuned.space.points[number])}: {error.message}"
            error.hint = error.hint or "have `space(knobs)` return False for points that cannot run"
            raise
        return trial, time.monotonic() - start

    with recording(wanted.folder / RECORD, head, tuned.space) as record:
        searched = search(tuned.space, strategy, record, attempt, wanted.most, say)
        draw(searched.space, searched.trials, wanted.folder / SURFACE)
    return searched


def source_of(schedule: ScheduleFile) -> str:
    """The source that a schedule names as `SOURCE`: a file beside it or an importable module."""
    name = getattr(schedule.module, "SOURCE", None)
    if not isinstance(name, str):
        raise errors.UsageError(
            f"the model of `{schedule.name}` is not known",
            hint="give it: slapo-rewrite tune SOURCE --schedule S --run '...'; or write "
            '`SOURCE = "model.py"` in the schedule',
        )
    return str(schedule.path.parent / name) if name.endswith(".py") else name


def _tried(wanted: Wanted, tuned: Tuned, source: str, number: int) -> Trial:
    """Rewrites for a point, and runs the command."""
    point = tuned.space.points[number]
    values = {name: shown_value(value) for name, value in point.items()}
    out = wanted.folder / "rewritten" / _package(tuned, values)
    if training_command.OUT in training_command.fields(wanted.command):
        output = rewrite(source, wanted.schedule, tuned.given(point, wanted.fixed))
        write(out, output.files, inputs=output.inputs)
    command = training_command.filled(
        wanted.command, {**values, training_command.OUT: str(out.absolute())}
    )
    log = wanted.folder / "logs" / f"{number}.txt"
    kind, throughput = training_command.run(command, wanted.timeout_s, log)
    return Trial(number, kind, throughput)


def _package(tuned: Tuned, values: dict[str, str]) -> str:
    """A name for the rewritten model of a point: `out_ckpt_ratio_0_5`."""
    words = ["out", *(f"{name}_{values[name]}" for name in tuned.of_schedule)]
    return re.sub(r"\W", "_", "_".join(words), flags=re.ASCII)
