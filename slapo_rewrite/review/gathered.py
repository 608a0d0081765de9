"""Gathers the contents of a review."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slapo_rewrite.review.built_models import NotBuilt, built
from slapo_rewrite.review.module_rows import ModuleRow, module_rows
from slapo_rewrite.review.recorded_review import Recorded, counted_calls, read_output
from slapo_rewrite.review.step_prediction import NotPredicted, Prediction, predicted


@dataclass(frozen=True)
class Review:
    """The contents of a review."""

    recorded: Recorded  # the output's record and files
    world: int = 1  # the number of ranks of the model
    tree: ModuleRow | None = None  # the model's row; None if it is not known
    not_built: str = ""  # why there is no tree
    prediction: Prediction | None = None  # of a step; None if it is not known
    not_predicted: str = ""  # why there is no prediction

    def summary(self) -> list[str]:
        """The request and its results, in five lines."""
        return [self._asked(), self._came(), self._held(), self._takes(), self._verified()]

    def _asked(self) -> str:
        content = self.recorded.content
        knobs = [f"{name}={value}" for name, value in content.get("set", {}).items()]
        with_knobs = f", with {', '.join(knobs)}" if knobs else ""
        calls = counted_calls(self.recorded.calls) or "nothing"
        return (
            f"Asked: {content['source']['name']} by the schedule {content['schedule']['name']}"
            f"{with_knobs}: {calls}."
        )

    def _came(self) -> str:
        files = self.recorded.files
        came = [
            f"{file.name} has {file.added} new lines in {counted(len(file.parts), 'place')}, "
            f"{file.kept:.1%} of the original's {file.length} lines stand"
            if file.parts
            else f"{file.name} is as it was"
            for file in files
        ]
        return f"Came: {'; '.join(came)}; {counted(len(self.recorded.helpers), 'helper file')}."

    def _held(self) -> str:
        if self.tree is None:
            return f"Sizes: not known, because {self.not_built}."
        if self.world == 1:
            return f"Sizes: {number(self.tree.whole)} parameters, nothing is split over ranks."
        return (
            f"Sizes: each of {self.world} ranks holds {number(self.tree.local)} of "
            f"{number(self.tree.whole)} parameters ({self.tree.local / self.tree.whole:.0%})."
        )

    def _takes(self) -> str:
        if self.prediction is None:
            return f"Predicted: nothing, because {self.not_predicted or self.not_built}."
        models = self.prediction.models
        before, after = models[0].predicted, models[-1].predicted
        memory = f"{size(before.memory)} becomes {size(after.memory)}"
        times = [duration(each.seconds) for each in (before, after)]
        return f"Predicted for a GPU: memory of {memory}, a step of {' becomes '.join(times)}."

    def _verified(self) -> str:
        found = self.recorded.verification
        if found is None:
            return f"Not verified: run slapo-rewrite verify {self.recorded.out}."
        worlds = ", ".join(found.worlds)
        if found.verdict == "equal":
            what = f"rewritten equals original in {found.compared} comparisons"
        elif found.failures:
            what = f"FAILED: {found.failures[0]}"
        else:
            what = f"NOT EQUAL in {found.failed} of {found.compared} comparisons"
        return f"Verified at {worlds}: {what}."


def gathered(
    out: Path, *, world: int | None = None, source: str | None = None, schedule: str | None = None
) -> Review:
    """Gathers the review of an output; raises `NotAnOutput` for another folder."""
    recorded = read_output(out, source, schedule)
    try:
        with built(recorded, world) as models:
            tree = module_rows(recorded, models)
            try:
                return Review(recorded, models.world, tree, prediction=predicted(models))
            except NotPredicted as error:
                return Review(recorded, models.world, tree, not_predicted=str(error))
    except NotBuilt as error:
        return Review(recorded, not_built=str(error))


def counted(count: int, what: str) -> str:
    """A count with its noun: `1 place`, `3 places`."""
    return f"{count} {what}" + "s" * (count != 1)


def number(count: float) -> str:
    """A short form of a count: 109,514,298 -> 109.5M."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return f"{count:.0f}"


def size(count: float) -> str:
    """A short form of a number of bytes."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A short form of a time."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.2f} {name}"
    return f"{seconds / 1e-9:.2f} ns" if seconds else "0"
