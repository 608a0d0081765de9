"""A source file, its module, a schedule, and the model that both give."""

from __future__ import annotations

import copy
import functools
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import Reference
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.locate import locate
from slapo_rewrite.code.splice import Change, apply_edits
from slapo_rewrite.directive import Directive, merged_causes
from slapo_rewrite.model.join import Sources
from slapo_rewrite.model.tree import Tree, build_model
from slapo_rewrite.primitives.base import OnRanks
from slapo_rewrite.schedule.load import MODULE as SCHEDULE
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.schedule.plan import Plan
from slapo_rewrite.schedule.selection import Selection
from slapo_rewrite.schedule.source_module import import_source, run_source


class Project:
    """A source file, its module, a schedule, and the model that both give."""

    def __init__(self, source: str, schedule: str) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.time()
        self.source_name = source
        before = set(sys.modules)
        path, name = locate(source)
        with self.timed("read"):
            self.file = SourceFile.read(path, name)
        with self.timed("import"):
            self.schedule = ScheduleFile.load(schedule)
            self.module = import_source(self.file)
        self.directives: list[Directive] = []
        with self.timed("tree"), self.placed("model"):
            model = build_model(self.schedule.module.model, self.module)
            self.tree = Tree(model)
        self.loaded = sys.modules.keys() - before
        self.sources = Sources(self.file, {SCHEDULE})
        self.original = self.file
        self.references: dict[Reference, tuple[Directive, ...]] = {}
        self.changes: list[Change] = []

    def anew(self) -> Project:
        """A copy for another rewrite, which shares the files and the model built so far."""
        other = copy.copy(self)
        other.directives, other.references, other.changes = [], {}, []
        return other

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the CPU time of the context to a part of the work; inner parts count separately."""
        start, before = time.process_time(), sum(self.seconds.values())
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - before
            own = time.process_time() - start - inner
            self.seconds[part] = self.seconds.get(part, 0.0) + own

    @contextmanager
    def placed(self, function: str) -> Iterator[None]:
        """Adds the nearest known place to errors without one, in the context.

        It is the running line of the schedule, or else the line that selected a named module, or
        else the header of the function that ran.
        """
        try:
            yield
        except errors.RewriteError as error:
            room = isinstance(error, errors.OutputUnwritable)
            if error.at is None and not error.also and not room:
                error.at = (
                    self.schedule.span_of(error.__traceback__)
                    or self._selecting(error.message)
                    or self.schedule.definition(function)
                )
            raise

    def _selecting(self, message: str) -> errors.Span | None:
        names = [f"{name}." for name in re.findall(r"`([^`]+)`", message)]
        for directive in reversed(self.directives):
            if any(name.startswith(f"{p}.") for name in names for p in directive.paths if p):
                return directive.at
        return None

    def plan(self, knobs: dict[str, Any], on_ranks: OnRanks | None = None) -> Plan:
        """Runs the schedule."""
        plan = Plan(self.tree, self.schedule, self.sources, self._changed, on_ranks)
        self.directives = plan.directives
        selection = Selection(plan, [self.tree.root])
        run = functools.partial(self.schedule.module.schedule, selection, **knobs)
        try:
            self.schedule.guarded(run, "`schedule`")
        except errors.RewriteError as error:
            self._point_at(error)
            raise
        plan.check()
        return plan

    def _point_at(self, error: errors.RewriteError) -> None:
        """Adds the running line of the schedule to an error."""
        line = self.schedule.span_of(error.__traceback__)
        if error.at is None:
            error.at = line
        elif line is not None and line not in (error.at, *error.also):
            error.also = (*error.also, line)

    def _changed(self, directive: Directive, rewrite: Rewrite) -> tuple[Tree, Sources]:
        """Changes the source, and builds the model that it then defines."""
        text, self.changes = apply_edits(self.file.text, rewrite.edits, self.changes)
        for reference in rewrite.references:
            causes = self.references.get(reference, ())
            self.references[reference] = merged_causes(causes, [directive])
        self.file = self.file.edited(text)
        self.module = run_source(self.file, self.references)
        with self.timed("tree"):
            self.tree = Tree(build_model(self.schedule.module.model, self.module))
        self.sources = Sources(self.file, {SCHEDULE})
        return self.tree, self.sources
