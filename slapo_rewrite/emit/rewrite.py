"""The main task: turns a source file and a schedule into the output's files, in memory."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo_rewrite import __version__, errors
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.splice import Change, Edit, apply_edits
from slapo_rewrite.directive import Directive, merged_causes
from slapo_rewrite.emit.construct import Construction
from slapo_rewrite.emit.draft import Causes, Draft, Options, Trial
from slapo_rewrite.emit.helpers import (
    FEATURES,
    helper_files,
    inlined_helpers,
    library_uses,
    named_features,
    optional_helpers,
)
from slapo_rewrite.emit.inputs import own_modules
from slapo_rewrite.emit.kernels import by_backend
from slapo_rewrite.emit.new_record import record_text
from slapo_rewrite.emit.one_rank import OneRank
from slapo_rewrite.emit.registrations import imported_beside
from slapo_rewrite.emit.rewritten_text import carried, check_text, idle_names, rewritten, used_in
from slapo_rewrite.emit.sibling_files import SiblingFiles
from slapo_rewrite.emit.source_diff import Original, whole_diff
from slapo_rewrite.emit.support_folder import use_support
from slapo_rewrite.garbage import collector_paused
from slapo_rewrite.lowering.lower import lower
from slapo_rewrite.model import small_model
from slapo_rewrite.model.meta_device import without_dynamo
from slapo_rewrite.model.rehearsal import MOST_PARAMETERS, not_run, worlds
from slapo_rewrite.project import Project
from slapo_rewrite.schedule.load import MODULE as SCHEDULE
from slapo_rewrite.schedule.plan import Plan


@dataclass
class Output:
    """The result of a rewrite."""

    files: dict[str, str]  # the output folder's files, by name
    originals: dict[str, Original]  # the sources, by the names of the rewritten files
    model_file: str  # the name of the rewritten model file
    warnings: list[str] = field(default_factory=list)  # such as checks that were not possible
    seconds: dict[str, float] = field(default_factory=dict)  # CPU time of each part of the work
    inputs: list[Path] = field(default_factory=list)  # the user's files that it depends on
    # The names that it imports from its support folder, by helper module.
    uses: dict[str, set[str]] = field(default_factory=dict)

    def diff(self, context: int = 3) -> str:
        """The unified diff of the rewritten files against their originals.

        Imports that only became absolute are left out, and counted in a line above it.
        """
        return whole_diff(self.originals, self.files, context)


@collector_paused()
def rewrite(
    source: str,
    schedule: str,
    settings: Sequence[str] = (),
    *,
    single_file: bool = False,
    further: Sequence[str] = (),
    support: str | None = None,
    tries: Trial | None = None,
) -> Output:
    """Applies a schedule to a source file; writes nothing.

    Args:
        source: A file or an importable module.
        schedule: A file, or the name of a schedule that ships with the tool.
        settings: Knobs, as `name=value`.
        single_file: Put the helpers into the model file, instead of a package around it.
        further: Optional helpers to add (`--with`).
        support: A folder beside the output to put the helpers in (`--support`).
        tries: A trial to run on the imported output; None to run a small model of it against the
            original's.
    """
    options = Options(settings, single_file, optional_helpers(further), support, tries)
    with _emitting(Project(source, schedule), options) as emission:
        return emission.run()


@collector_paused()
def try_out(
    project: Project, settings: Sequence[str], trial: Trial, *, on_ranks: bool = True
) -> None:
    """Applies a schedule in memory and runs a trial on the output.

    The project itself does not change. `on_ranks` says whether memory budgets for ranks that shard
    layers may choose what is recomputed.
    """
    options = Options(settings, tries=trial, on_ranks=on_ranks)
    with _emitting(project.anew(), options) as emission:
        emission.construct()


@contextmanager
def _emitting(project: Project, options: Options) -> Iterator[_Emission]:
    original = project.module
    try:
        with project.placed("schedule"), without_dynamo():
            yield _Emission(project, options, original)
    finally:
        # While the schedule ran, this name was bound to the changed source.
        sys.modules[project.original.name] = original


class _Emission:
    """Makes the files of one output, step by step."""

    def __init__(self, project: Project, options: Options, original: types.ModuleType) -> None:
        self.project, self.options, self.original = project, options, original
        self.moved_cuts: tuple[str, ...] = ()

    def run(self) -> Output:
        """Runs all steps, in their order, and returns the result."""
        self.construct()
        with self.project.timed("write"):
            return self._finished()

    def construct(self) -> None:
        """Makes the output's files and tries them, before anything is written."""
        project = self.project
        with project.timed("rewrite"):
            self.knobs = project.schedule.settings(self.options.settings)
            on_ranks = None
            if self.options.on_ranks:
                schedule, settings = str(project.schedule.path), self.options.settings
                on_ranks = OneRank(project.source_name, schedule, settings, try_out)
            self.plan = project.plan(self.knobs, on_ranks)
            self._lower()
            self._write_models()
            self._write_helpers()
        if any(state.cut for state in self.plan.states.values()):
            self._cut_stages()
        if self.options.support is not None:
            self._share_helpers(self.options.support)
        self.users = own_modules(project.original, project.schedule.tree, project.loaded)
        # These are imported again with the output, which is built and run.
        anew = [*self.users, project.original.name]
        given = self.draft, project, self.plan, self.copies, anew, self.original, self.sizes
        made = Construction(*given, self.lowered.warnings)
        made.tried(self.options.tries)

    def _lower(self) -> None:
        """Lowers the schedule's requests to edits, and names the rewritten files."""
        project, plan = self.project, self.plan
        self.sizes: tuple[int, ...] = ()
        if not _has_own_code(plan):
            self.sizes = worlds(project.schedule.module, project.module, project.tree.root.live)
        self.lowered = lower(
            project.tree,
            plan.states,
            plan.directives,
            merged_causes(*(change.causes for change in project.changes)),
            project.sources,
            self._step_inputs,
            self._small,
            # Finds errors of several world sizes earlier than a trial would, and with their lines.
            thorough=len(self.sizes) != 1,
        )
        self.outputs: OutputFiles = self.lowered.files
        self.draft = Draft(f"{self.outputs.stem(project.file)}.py")
        # The schedule's own classes are edited as the model's are, then copied to the output.
        self.definitions, self.moved = project.schedule, list[Change]()
        if edits := [*self.lowered.edits.pop(SCHEDULE, ())]:
            edits += self.outputs.named(SCHEDULE).imports.edits()
            text, self.moved = apply_edits(self.definitions.text, edits)
            self.definitions = self.definitions.edited(text)
        self._refer()
        self.copies = SiblingFiles(project.sources, self.outputs, self.lowered.edits, project.tree)

    def _step_inputs(self) -> dict[str, Any]:
        schedule, model = self.project.schedule, self.project.tree.root.live
        make = functools.partial(small_model.training_inputs, schedule.module, model)
        try:
            made: dict[str, Any] = schedule.guarded(make, "`inputs`")
        except ValueError as error:
            raise schedule.blamed(error) or errors.ScheduleError(str(error)) from error
        return made

    def _small(self) -> tuple[Any, dict[str, Any]]:
        schedule = self.project.schedule.module
        model = small_model.build_small(schedule, self.project.module)
        return model, small_model.training_inputs(schedule, model)

    def _refer(self) -> None:
        """Imports the functions that rules call, unless later changes removed the calls."""
        project = self.project
        if not project.references:
            return
        text, _ = apply_edits(project.file.text, self.lowered.edits.get(project.file.name, []))
        named = used_in(project.file.parsed(text))
        for reference, why in project.references.items():
            if reference.written.partition(".")[0] in named:
                self.outputs.main.imports.refer(reference, why)

    def _write_models(self) -> None:
        """Makes the rewritten files."""
        project, draft, copies = self.project, self.draft, self.copies
        if self.options.single_file:
            check_single(copies, self.lowered.edits)
        draft.use(by_backend(used_helpers(copies, self.outputs), project.references))
        draft.use(self.options.further)
        if draft.used:
            own_edits = self.lowered.edits
            texts = (
                apply_edits(f.text, own_edits.get(f.name, []))[0] for f in copies.files.values()
            )
            draft.use({FEATURES: named_features(texts)})
        inlined = None
        if self.options.single_file and draft.used:
            inlined = inlined_helpers(draft.used, self.definitions, project.file)
        for file in copies.files.values():
            is_main = file is project.file
            own = self.lowered.edits.get(file.name, [])
            idle: Set[str] = frozenset()
            if len(copies.files) > 1:
                idle = idle_names(file, apply_edits(file.text, own)[0])
            redirected = copies.redirections(file, idle)
            added = self.outputs.of_file(file).imports.edits(inlined)
            edits = [*redirected, *own, *added]
            earlier = project.changes if is_main else ()
            before = project.original if is_main else None
            text, changes = rewritten(file, edits, own, earlier, before)
            check_text(text, file)
            name = copies.name(file)
            draft.texts[name], draft.changes[name] = text, changes
            draft.lengths[name] = file.line_length

    def _write_helpers(self) -> None:
        """Makes the helper files that the rewritten files import."""
        for output in self.outputs:
            for module, causes in output.imports.causes().items():
                self.draft.because(module, causes)
        if not self.options.single_file:
            self.draft.helpers = self._helper_files()

    def _helper_files(self) -> dict[str, str]:
        return helper_files(self.draft.used, self.definitions, self._header)

    @property
    def _header(self) -> str:
        name = self.draft.model_file
        return f"# Written by slapo-rewrite {__version__} for {name}; rewrite.json says from what."

    def _cut_stages(self) -> None:
        """Makes the pipeline stages, which may need further helpers."""
        from slapo_rewrite.emit.pipeline_file import pipeline_text
        from slapo_rewrite.stages.program import Cut

        project, draft, states = self.project, self.draft, self.plan.states
        cuts = {path: state.cut for path, state in states.items() if state.cut}
        told = Causes(draft.texts, draft.changes, {}).told()
        with project.timed("stages"), told, imported_beside(draft, self.copies, ()) as emitted:
            sliced = slicing(states.values(), self.lowered.inferred)
            ends = [
                Cut(path, cut.cause, cut.target, cut.may_move, cut.instead)
                for path, cut in cuts.items()
            ]
            single = self.options.single_file
            files, name = draft.files, draft.model_file
            stages = pipeline_text(project, ends, emitted, files, name, single, sliced)
            pipeline = stages.written(self._header)
            draft.use({**stages.helpers(), FEATURES: named_features([pipeline])})
            staged = {"pipeline.py": pipeline, **self._helper_files()}
        because = merged_causes(*((cut.cause,) for cut in cuts.values()))
        for name in staged.keys() - draft.helpers.keys():
            draft.causes.setdefault(Path(name).stem, because)
        draft.helpers = staged
        self.moved_cuts = stages.warnings

    def _share_helpers(self, folder: str) -> None:
        """Moves the helpers into the support folder that several outputs share."""
        draft = self.draft
        draft.uses = library_uses(draft.used, self.definitions)
        files = use_support(folder, draft.uses, draft.files, draft.changes, draft.lengths)
        draft.texts = {name: files.pop(name) for name in draft.texts}
        draft.helpers = files

    def _finished(self) -> Output:
        project, draft, plan, copies = self.project, self.draft, self.plan, self.copies
        module = project.schedule.module
        left = not_run(module, project.module, project.tree.root.live, plan.shares)
        if not self.sizes and not _has_own_code(plan) and any(draft.changes.values()):
            left.append(UNCHECKED)
        left += [*draft.warnings, *idle_calls(plan, draft, self.lowered.inferred)]
        draft.warnings = [*plan.warnings, *left, *self.lowered.warnings, *self.moved_cuts]
        helpers = draft.helpers
        # Helpers in a support folder are written with that folder.
        files = {name: text for name, text in draft.files.items() if Path(name).name == name}
        if not self.options.single_file:
            files["__init__.py"] = init_text(draft.model_file, helpers, copies.registering())
        files |= {
            copies.name(f): f.as_stored(draft.texts[copies.name(f)]) for f in copies.files.values()
        }
        sources = {copies.name(f): f for f in copies.files.values()}
        sources[draft.model_file] = project.original
        originals = {name: Original.of(file, files[name]) for name, file in sources.items()}
        if diff := whole_diff(originals, files, 1):
            files["rewrite.diff"] = diff
        if self.moved and (modules := helpers.get("modules.py")):
            draft.changes["modules.py"] = carried(self.moved, self.definitions.text, modules)
        files["rewrite.json"] = record_text(
            project,
            draft,
            self.options,
            plan,
            self.lowered.inferred,
            self.knobs,
            files,
            {name: each.lines for name, each in originals.items() if each.lines},
            {copies.name(f): f for f in copies.files.values() if f is not project.file},
            self.users,
        )
        return Output(
            dict(sorted(files.items())),
            originals,
            draft.model_file,
            draft.warnings,
            project.seconds,
            [project.file.path, project.schedule.path, *self.users.values()],
            draft.uses or {},
        )


UNCHECKED = (
    f"the model has more than {MOST_PARAMETERS:,} parameters, so the last check, a run against "
    "the original, was left out: define verify_model(m) in the schedule, which builds a smaller "
    "model"
)


def _has_own_code(plan: Plan) -> bool:
    """Whether the schedule inserts its own code, which may compute something else."""
    return any(
        directive.primitive in ("replace", "replace_all") for directive in plan.directives
    ) or any(not isinstance(sync.op, str) for state in plan.states.values() for sync in state.syncs)


def idle_calls(plan: Plan, draft: Draft, inferred: Sequence[Directive]) -> list[str]:
    """Warnings for calls that selected modules and changed nothing.

    Calls that report an outcome do not count, nor do those that only check.
    """
    changes = (change for own in draft.changes.values() for change in own)
    causes = [*(change.causes for change in changes), *draft.helper_causes().values()]
    busy = {directive.number for each in causes for directive in each}
    told = {d.number for d in plan.directives if d.outcome is not None} | plan.notes.keys()
    # Shards and collectives are checked against each other: some only confirm what is inferred.
    states = plan.states.values()
    is_split = bool(inferred) or any(s.shards or s.shares or s.syncs for s in states)
    checked = {"shard", "sync", "infer_sync"} if is_split else set()
    return [
        errors.warning(f"`{directive.text}` changes nothing", directive.at)
        for directive in plan.directives
        if directive.paths
        and directive.number not in busy | told
        and directive.primitive not in checked
    ]


def slicing(states: Iterable[ModuleRequests], inferred: Iterable[Directive]) -> Directive | None:
    """The directive by which ranks hold slices of activations (sequence parallelism), if any."""
    ops = {"scatter", "reduce_scatter", "all_to_all"}
    request = (s.cause for state in states for s in state.syncs if s.op in ops)
    guessed = (d for d in inferred if d.inferred and any(op in d.inferred for op in ops))
    return next(iter([*request, *guessed]), None)


def used_helpers(copies: SiblingFiles, outputs: OutputFiles) -> dict[str, set[str]]:
    """The names that the rewritten files import from each helper module."""
    used: dict[str, set[str]] = {}
    for file in copies.files.values():
        for module, names in outputs.of_file(file).imports.helpers.items():
            if module not in map(outputs.stem, copies.files.values()):
                used.setdefault(module, set()).update(names)
    return used


def check_single(copies: SiblingFiles, edits: Mapping[str, Sequence[Edit]]) -> None:
    """Refuses `--single-file` if the schedule changes several files: names might clash."""
    others = [f for f in copies.files.values() if f is not copies.sources.main]
    if others:
        causes = merged_causes(*(e.causes for f in others for e in edits.get(f.name, ())))
        raise errors.Unsupported(
            f"the schedule changes both {others[0].path.name} and {copies.sources.main.path.name}",
            at=causes[0].at if causes else None,
            hint="leave out --single-file: each is then a separate file",
        )


def init_text(name: str, helpers: dict[str, str], registering: Sequence[str] = ()) -> str:
    """The output package's own docstring, and imports of what registers its classes alone."""
    is_parallel = any(Path(helper).stem == "tensor_parallel" for helper in helpers)
    what = "tensor parallel" if is_parallel else "as scheduled"
    text = f'"""{name}, {what}; rewrite.diff shows what changed."""\n'
    if registering:
        noted = "  # noqa: F401 -- their classes are registered"
        text += f"\nfrom . import {', '.join(sorted(registering))}{noted}\n"
    return text
