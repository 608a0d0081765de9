"""Finds out whether lines of a schedule are legal, by carrying them out without writing files."""

from __future__ import annotations

import functools
import gc
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.auto.step import Step
from slapo_rewrite.lowering.lower import lower
from slapo_rewrite.model import small_model
from slapo_rewrite.model.meta_device import without_dynamo
from slapo_rewrite.project import Project
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.schedule.plan import Plan
from slapo_rewrite.schedule.selection import Selection
from slapo_rewrite.sharding.propagate import Records
from slapo_rewrite.sharding.stand_in import CannotStandIn, StandIn

# If a model's step has more operators, the small model is analysed instead, if possible.
MOST_OPERATIONS = 20_000
EMPTY = "def schedule(s):\n    pass\n"


class Oracle:
    """Carries out lines of a schedule on one model, up to writing the files.

    Args:
        source: The source, as the user gave it.
        step: How the model is built, and a training step.

    Attributes:
        project: The source and the model.
        head: The part of the schedule file before the function `schedule`.
        asked: The number of trials so far.
    """

    def __init__(self, source: str, step: Step) -> None:
        self.head = step.text()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "schedule.py"
            file.write_text(f"{self.head}\n\n{EMPTY}", encoding="utf-8")
            self.project = Project(source, str(file))
        self._file = file
        # Two ranks suffice for the search; the final rewriting checks all ways.
        self._records = Records(worlds=(2,), has_ways=False, of_all=True, most=MOST_OPERATIONS)
        self._refusals: dict[tuple[str, ...], errors.RewriteError | None] = {}
        self.asked = 0

    def refusal(self, lines: Sequence[str]) -> errors.RewriteError | None:
        """Why the tool refuses these lines; None if it accepts them."""
        key = tuple(lines)
        if key not in self._refusals:
            self._refusals[key] = self._found(lines)
        return self._refusals[key]

    def _found(self, lines: Sequence[str]) -> errors.RewriteError | None:
        refused = self._tried(lines)
        if self._records.most and self._records.blocked and not self._stands_in:
            self._records.most = None
            self._records.blocked.clear()
            refused = self._tried(lines)
        return refused

    @functools.cached_property
    def _stands_in(self) -> bool:
        """Whether the small model can be analysed in place of the full one."""
        try:
            StandIn(self.project.tree, {}, self.small)
        except CannotStandIn:
            return False
        return True

    def _tried(self, lines: Sequence[str]) -> errors.RewriteError | None:
        self.asked += 1
        self._ran_small = False
        body = "".join(f"    {line}\n" for line in lines)
        text = f"{self.head}\n\ndef schedule(s):\n{body}"
        module = types.ModuleType("schedule_file")
        exec(compile(text, str(self._file), "exec", dont_inherit=True), module.__dict__)
        schedule = ScheduleFile("auto", self._file, text, module)
        project = self.project
        plan = Plan(project.tree, schedule, project.sources)
        selection = Selection(plan, [project.tree.root])
        try:
            with without_dynamo():
                schedule.guarded(lambda: module.schedule(selection), "`schedule`")
                lower(
                    project.tree,
                    plan.states,
                    plan.directives,
                    (),
                    project.sources,
                    self._inputs,
                    self.small,
                    thorough=False,
                    records=self._records,
                )
        except errors.RewriteError as error:
            return error.with_traceback(None)
        finally:
            if self._ran_small:
                # A run's values are in reference cycles, and the collector may be paused; then all
                # of them are in the youngest generation.
                gc.collect(0)
        return None

    def _inputs(self) -> dict[str, Any]:
        return dict(self._step)

    @functools.cached_property
    def _step(self) -> dict[str, Any]:
        # Cached: making a video of default size takes longer than analysing the step.
        schedule = self.project.schedule.module
        return small_model.training_inputs(schedule, self.project.tree.root.live)

    def small(self) -> tuple[Any, dict[str, Any]]:
        """The small model and keyword arguments for a step, the same for all questions."""
        self._ran_small = True
        return self._small

    @functools.cached_property
    def _small(self) -> tuple[Any, dict[str, Any]]:
        schedule, module = self.project.schedule.module, self.project.module
        with small_model.drawing(0):
            model = small_model.build_small(schedule, module)
            return model, small_model.training_inputs(schedule, model)
