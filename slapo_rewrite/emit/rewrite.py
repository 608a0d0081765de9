"""The main job: a source file and a schedule in, the output's files out, all in memory."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import os
import re
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slapo_rewrite import __version__, errors
from slapo_rewrite.changes.imports import Reference
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code import import_lines
from slapo_rewrite.code.file import SourceFile, lines_of, locate
from slapo_rewrite.code.splice import Change, Edit, apply_edits
from slapo_rewrite.directive import Directive, depth_of, merged_causes
from slapo_rewrite.emit import record
from slapo_rewrite.emit.failures import Causes
from slapo_rewrite.emit.helpers import (
    helper_files,
    inlined_helpers,
    library_uses,
    optional_helpers,
)
from slapo_rewrite.emit.inputs import is_own, own_modules
from slapo_rewrite.emit.shard_check import check_parts, check_subclasses
from slapo_rewrite.emit.sibling_files import SiblingFiles, absolute_imports
from slapo_rewrite.emit.support_folder import as_recorded, use_support
from slapo_rewrite.garbage import collector_paused
from slapo_rewrite.lowering.lower import lower
from slapo_rewrite.model import small_model
from slapo_rewrite.model.emitted import Emitted, imported
from slapo_rewrite.model.join import Sources
from slapo_rewrite.model.meta_device import without_dynamo
from slapo_rewrite.model.rehearsal import OtherNumbersError, not_run, rehearse, worlds
from slapo_rewrite.model.tree import Tree, build_model, uncompiled
from slapo_rewrite.schedule.load import MODULE as SCHEDULE
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.schedule.plan import Plan
from slapo_rewrite.schedule.selection import Selection


@dataclass(frozen=True)
class Original:
    """What a rewritten file is compared with.

    Attributes:
        text: The source.
        absolute: The same, with those imports absolute that are so in the rewritten file.
        lines: The lines of the rewritten file on which these begin.
    """

    text: str
    absolute: str
    lines: tuple[int, ...]

    @classmethod
    def of(cls, file: SourceFile, rewritten: str) -> Original:
        """The source of a rewritten file."""
        before = set(lines_of(file.text))  # what was absolute stays, as do examples in strings
        imported = {
            number: line.split()[1]
            for number, line in enumerate(lines_of(rewritten), 1)
            if line.lstrip().startswith("from ") and len(line.split()) > 1 and line not in before
        }
        known = set(imported.values())
        edits = [e for e in (absolute_imports(file) if file.package else []) if e.text in known]
        text = file.as_stored(apply_edits(file.text, edits)[0])
        made = {e.text for e in edits}
        own = tuple(number for number, module in imported.items() if module in made)
        return cls(file.as_stored(file.text), text, own)


@dataclass
class Output:
    """What a rewrite gives.

    Attributes:
        files: The output folder's files, by name.
        originals: The sources, by the names of the rewritten files.
        model_file: The name of the rewritten model file.
        warnings: What could not be checked, in words.
        seconds: CPU time of each part of the work.
        inputs: The user's files that it is made from.
        uses: The names that it uses of its support folder, by helper module.
    """

    files: dict[str, str]
    originals: dict[str, Original]
    model_file: str
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    inputs: list[Path] = field(default_factory=list)
    uses: dict[str, set[str]] = field(default_factory=dict)

    def diff(self, context: int = 3) -> str:
        """The unified diff of the rewritten files against their originals.

        Imports that only became absolute are one remark above it.
        """
        return whole_diff(self.originals, self.files, context)


class Project:
    """A source file, its module, a schedule, and the model that both give.

    Args:
        source: A file or an importable module, as the user gave it.
        schedule: A file, or the name of a schedule that ships with the tool.
    """

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

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the CPU time that is spent inside to a part of the work; inner parts count apart."""
        start, before = time.process_time(), sum(self.seconds.values())
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - before
            own = time.process_time() - start - inner
            self.seconds[part] = self.seconds.get(part, 0.0) + own

    @contextmanager
    def placed(self, function: str) -> Iterator[None]:
        """What is refused meanwhile, and says no place, is given the nearest that is known.

        The line of the schedule that was running, else the one that selected what is named, else
        the head of the function that was carried out.
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

    def plan(self, knobs: dict[str, Any]) -> Plan:
        """Runs the schedule."""
        length = line_length(self.original.text)
        plan = Plan(self.tree, self.schedule, self.sources, self._changed, length)
        self.directives = plan.directives
        selection = Selection(plan, [self.tree.root])
        run = functools.partial(self.schedule.module.schedule, selection, **knobs)
        self.schedule.guarded(run, "`schedule`")
        plan.check_cuts()
        return plan

    def _changed(self, directive: Directive, rewrite: Rewrite) -> tuple[Tree, Sources]:
        """Changes the source, and builds the model that it defines then."""
        text, self.changes = apply_edits(self.file.text, rewrite.edits, self.changes)
        for reference in rewrite.references:
            causes = self.references.get(reference, ())
            self.references[reference] = merged_causes(causes, [directive])
        self.file = self.file.edited(text)
        self.module = run_source(self.file, self.references)
        try:
            with self.timed("tree"):
                self.tree = Tree(build_model(self.schedule.module.model, self.module))
        except errors.ModelError as error:
            error.also = (*error.also, *([directive.at] if directive.at else []))
            raise
        self.sources = Sources(self.file, {SCHEDULE})
        return self.tree, self.sources


@collector_paused()
def rewrite(
    source: str,
    schedule: str,
    settings: Sequence[str] = (),
    *,
    single_file: bool = False,
    further: Sequence[str] = (),
    support: str | None = None,
    rehearses: bool = True,
) -> Output:
    """Carries out a schedule on a source file; writes nothing.

    Args:
        source: A file or an importable module.
        schedule: A file, or the name of a schedule that ships with the tool.
        settings: Knobs, as `name=value`.
        single_file: Put the helpers into the model file, instead of a package around it.
        further: Names of helpers to be added that are left out otherwise.
        support: The name of the folder beside the output that is to hold its helpers.
        rehearses: Whether a small model of the output is run against the original's.

    Raises:
        RewriteError: Something in the source, the schedule or the knobs is wrong.
    """
    optional = optional_helpers(further)
    project = Project(source, schedule)
    original = project.module
    try:
        with project.placed("schedule"):
            return carry_out(project, settings, single_file, optional, original, support, rehearses)
    finally:
        # While the schedule changed the source, its name stood for what it was changed to.
        sys.modules[project.original.name] = original


@without_dynamo()
def carry_out(
    project: Project,
    settings: Sequence[str],
    single_file: bool,
    optional: Mapping[str, set[str]],
    original: types.ModuleType,
    support: str | None,
    rehearses: bool = True,
) -> Output:
    """Carries out the schedule of a project, as `rewrite` does.

    Args:
        project: The project.
        settings: Knobs, as `name=value`.
        single_file: Whether the helpers go into the model file.
        optional: Further helpers, by the module that has them.
        original: The module of the source as it was before the schedule ran.
        support: The name of the folder beside the output that is to hold its helpers.
        rehearses: Whether a small model of the output is run against the original's.
    """
    with project.timed("rewrite"):
        knobs = project.schedule.settings(settings)
        plan = project.plan(knobs)
        length = line_length(project.original.text)

        def inputs() -> dict[str, Any]:
            module, model = project.schedule.module, project.tree.root.live
            make = functools.partial(small_model.training_inputs, module, model)
            try:
                made: dict[str, Any] = project.schedule.guarded(make, "`inputs`")
            except ValueError as error:
                raise errors.ScheduleError(str(error)) from error
            return made

        def small() -> tuple[Any, dict[str, Any]]:
            model = small_model.build_small(project.schedule.module, project.module)
            return model, small_model.training_inputs(project.schedule.module, model)

        sizes: tuple[int, ...] = ()
        if not _has_own_code(plan):
            sizes = worlds(project.schedule.module, project.tree.root.live)
        before = merged_causes(*(change.causes for change in project.changes))
        lowered = lower(
            project.tree,
            plan.states,
            len(plan.directives),
            before,
            project.sources,
            inputs,
            small,
            length,
            # What runs on both world sizes, in eval mode too, is told sooner and by its line.
            thorough=len(sizes) != 1,
        )
        outputs = lowered.files
        name = f"{outputs.stem(project.file)}.py"
        definitions, moved = project.schedule, list[Change]()
        if more := [*lowered.edits.pop(SCHEDULE, ())]:
            more += outputs.named(SCHEDULE).imports.edits(length)
            text, moved = apply_edits(definitions.text, more)
            definitions = definitions.edited(text)
        imports = outputs.main.imports
        own = lowered.edits.get(project.file.name, [])
        named: set[str] = set()
        if project.references:
            named = _used(parsed(apply_edits(project.file.text, own)[0], project.file))
        for reference, why in project.references.items():
            if reference.written.partition(".")[0] in named:
                imports.refer(reference, why)
        copies = SiblingFiles(project.sources, outputs, lowered.edits)
        copies.check_made(project.tree, project.changes)
        if single_file:
            check_single(copies, lowered.edits)
        used = used_helpers(copies, outputs)
        for module, names in optional.items():
            used.setdefault(module, set()).update(names)
        inlined = inlined_helpers(used, definitions, project.file) if single_file and used else None
        texts: dict[str, str] = {}
        changes: dict[str, list[Change]] = {}
        lengths: dict[str, int] = {}
        for file in copies.files.values():
            own = lowered.edits.get(file.name, [])
            own_length = length if file is project.file else line_length(file.text)
            idle: Set[str] = frozenset()
            if len(copies.files) > 1:
                idle = idle_names(file, apply_edits(file.text, own)[0])
            redirected = copies.redirections(file, own_length, idle)
            added = outputs.of_file(file).imports.edits(own_length, inlined)
            edits = [*redirected, *own, *added]
            if file is not project.file:
                text, written = rewritten(file, edits, own, own_length)
            else:
                earlier = project.changes
                text, written = rewritten(file, edits, own, length, earlier, project.original)
            check_text(text, file)
            texts[copies.name(file)], changes[copies.name(file)] = text, written
            lengths[copies.name(file)] = own_length
        header = (
            f"# Written by slapo-rewrite {__version__} for {name}; rewrite.json says from what."
        )
        helpers = {} if single_file else helper_files(used, definitions, header)
    cuts = {path: state.cut for path, state in plan.states.items() if state.cut}
    causes: dict[str, tuple[Directive, ...]] = {}
    for output in outputs:
        for module, because in output.imports.causes().items():
            causes[module] = merged_causes(causes.get(module, ()), because)
    moved_cuts: tuple[str, ...] = ()
    if cuts:
        from slapo_rewrite.emit.pipeline_file import pipeline_text
        from slapo_rewrite.stages.program import Cut

        with project.timed("stages"), Causes(texts, changes, {}).told():
            files = {**texts, **helpers}
            sliced = slicing(plan.states.values(), lowered.inferred)
            ends = [Cut(path, cut.cause, cut.target, cut.may_move) for path, cut in cuts.items()]
            stages = pipeline_text(project, ends, files, name, single_file, sliced)
            for module, names in stages.helpers().items():
                used.setdefault(module, set()).update(names)
            staged = {"pipeline.py": stages.written(header)}
            staged |= helper_files(used, definitions, header)
            moved_cuts = stages.warnings
        of_stages = {Path(each).stem for each in staged.keys() - helpers.keys()}
        because = merged_causes(*((cut.cause,) for cut in cuts.values()))
        causes = {**dict.fromkeys(of_stages, because), **causes}
        helpers = staged
    uses: dict[str, set[str]] | None = None
    if support is not None:
        uses = library_uses(used, definitions)
        all_files = use_support(support, uses, {**texts, **helpers}, changes, lengths)
        texts = {each: all_files.pop(each) for each in texts}
        helpers = all_files
    by_file = {n: causes.get(Path(n).stem) or causes.get("tensor_parallel", ()) for n in helpers}
    files = {**texts, **helpers}
    users = own_modules(project, project.loaded)
    anew = [*users, project.original.name]
    told = Causes(files, changes, by_file).told()
    with project.timed("construct"), told, imported(files, name, anew) as emitted:
        is_split = any(state.shards for state in plan.states.values())
        built = emitted.tree(project.schedule.module.model, 2 if is_split else 1)
        copies.check_built(built, project.tree, project.changes)
        for file in copies.files.values():
            own_name = copies.name(file)
            check_subclasses(file, texts[own_name], changes[own_name], built)
        check_parts(emitted, built, project.tree, plan.states, project.sources)
        # Where nothing changes, a class of transformers only is in another package, and draws so.
        if sizes and rehearses and any(changes.values()):
            with project.timed("rehearse"):
                rehearsed(project, original, plan, emitted, sizes)
    left = not_run(project.schedule.module, project.module, project.tree.root.live, plan.shares)
    warnings = [*plan.warnings, *left, *lowered.warnings, *moved_cuts]
    with project.timed("write"):
        files = {each: text for each, text in files.items() if Path(each).name == each}
        if not single_file:
            files["__init__.py"] = init_text(name, helpers)
        files |= {copies.name(f): f.as_stored(texts[copies.name(f)]) for f in copies.files.values()}
        sources = {copies.name(f): f for f in copies.files.values()} | {name: project.original}
        originals = {n: Original.of(file, files[n]) for n, file in sources.items()}
        if diff := whole_diff(originals, files, 1):
            files["rewrite.diff"] = diff
        given = dict(item.split("=", 1) for item in settings)
        if moved and (modules := helpers.get("modules.py")):
            changes["modules.py"] = carried(moved, definitions.text, modules)
        files["rewrite.json"] = record.written(
            project,
            name,
            [*plan.directives, *lowered.inferred],
            knobs,
            given,
            files,
            changes,
            by_file,
            single_file,
            [name for names in optional.values() for name in names],
            {n: each.lines for n, each in originals.items() if each.lines},
            {copies.name(f): f for f in copies.files.values() if f is not project.file},
            plan.notes,
            users,
            None if uses is None else {"folder": support, "uses": as_recorded(uses)},
            warnings,
        )
    return Output(
        dict(sorted(files.items())),
        originals,
        name,
        warnings,
        project.seconds,
        [project.file.path, project.schedule.path, *users.values()],
        uses or {},
    )


def rehearsed(
    project: Project,
    original: types.ModuleType,
    plan: Plan,
    emitted: Emitted,
    sizes: tuple[int, ...],
) -> None:
    """Runs a small model of the output against the original's.

    Raises:
        OtherNumbers: It computes something else.
    """
    try:
        draws_alike = not any(state.replacement for state in plan.states.values())
        depth = depth_of(plan.shares)
        rehearse(project.schedule.module, original, emitted, sizes, depth, draws_alike)
    except OtherNumbersError as error:
        inside = [path for path in plan.states if path and error.name.startswith(f"{path}.")]
        near = [plan.states[path].causes() for path in sorted(inside, key=len, reverse=True)]
        causes = [*(c for found in near for c in found), *plan.directives]
        places = list(dict.fromkeys(c.at for c in causes if c.at is not None))
        raise errors.OtherNumbers(
            f"what comes of this schedule is not the model any more: {error}",
            at=places[0] if places else None,
            also=places[1:3],
            hint=error.hint,
        ) from error


def _has_own_code(plan: Plan) -> bool:
    """Whether the schedule puts code of its own into the model, that may mean something else."""
    return any(
        directive.primitive in ("replace", "replace_all") for directive in plan.directives
    ) or any(not isinstance(sync.op, str) for state in plan.states.values() for sync in state.syncs)


def slicing(states: Iterable[ModuleRequests], inferred: Iterable[Directive]) -> Directive | None:
    """What lets ranks hold slices of the values between layers, if anything does."""
    ops = {"scatter", "reduce_scatter", "all_to_all"}
    asked = (s.cause for state in states for s in state.syncs if s.op in ops)
    guessed = (d for d in inferred if d.inferred and any(op in d.inferred for op in ops))
    return next(iter([*asked, *guessed]), None)


def rewritten(
    file: SourceFile,
    edits: Sequence[Edit],
    own: Sequence[Edit],
    line_length: int,
    earlier: Sequence[Change] = (),
    original: SourceFile | None = None,
) -> tuple[str, list[Change]]:
    """The text of a file with its edits, and without the imports that they leave idle.

    Args:
        file: The file as it is before the last edits.
        edits: Every edit of it.
        own: What changed in its classes and functions.
        line_length: The file's own.
        earlier: Lines that edits before these wrote.
        original: The file before all edits, where that is another one.
    """
    text, _ = apply_edits(file.text, edits)
    idle = idle_imports(file, text, [*own, *earlier], line_length, original)
    # What stands inside a statement that is written anew is part of that.
    kept = [e for e in edits if not any(i.start < e.start and e.end < i.end for i in idle)]
    # Where an import is redirected, idle names are left out there.
    idle = [i for i in idle if not any(e.start <= i.start < e.end for e in kept)]
    return apply_edits(file.text, [*kept, *idle], earlier)


def used_helpers(copies: SiblingFiles, outputs: OutputFiles) -> dict[str, set[str]]:
    """The names that the rewritten files use of each helper module."""
    used: dict[str, set[str]] = {}
    for file in copies.files.values():
        for module, names in outputs.of_file(file).imports.helpers.items():
            if module not in map(outputs.stem, copies.files.values()):
                used.setdefault(module, set()).update(names)
    return used


def check_single(copies: SiblingFiles, edits: Mapping[str, Sequence[Edit]]) -> None:
    """One file cannot hold what others define: their names may mean something else in it.

    Raises:
        Unsupported: A class of another file than the model's changes.
    """
    others = [f for f in copies.files.values() if f is not copies.sources.main]
    if others:
        causes = merged_causes(*(e.causes for f in others for e in edits.get(f.name, ())))
        raise errors.Unsupported(
            f"the schedule changes {others[0].path.name} beside {copies.sources.main.path.name}",
            at=causes[0].at if causes else None,
            hint="leave out --single-file: each then keeps to a file of its own",
        )


def import_source(file: SourceFile) -> types.ModuleType:
    """The module of a source file, imported the way its own package imports it.

    What lies beside it can be imported too, as where it is run in its own folder.

    Raises:
        SourceError: The import fails.
    """
    folder = file.path.absolute().parents[file.package.count(".") + 1 if file.package else 0]
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end, so that it hides nothing
    try:
        if file.package or not is_own(str(file.path)):
            with chdir("."):
                module = importlib.import_module(file.name)
            if Path(str(module.__file__)).resolve() == file.path.resolve():
                return module
        spec = importlib.util.spec_from_file_location(file.name, file.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.name] = module
        with chdir("."):
            spec.loader.exec_module(module)
        return module
    except (errors.RewriteError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a file that calls sys.exit() as well
        here = os.path.realpath(file.path)
        line = next(
            (
                f.tb_lineno
                for f in _frames(error)
                if os.path.realpath(f.tb_frame.f_code.co_filename) == here
            ),
            None,
        )
        if isinstance(error, SyntaxError) and os.path.realpath(error.filename or "") == here:
            line = error.lineno  # what parses need not compile
        at = errors.Span(file.display, line, 1, 1, file.line(line)) if line else None
        raise errors.SourceError(
            f"`{file.display}` cannot be imported: {type(error).__name__}: {error}",
            at=at,
            hint="a file of a package is imported as part of it: give its dotted module name",
        ) from error


def run_source(file: SourceFile, references: Iterable[Reference] = ()) -> types.ModuleType:
    """The module of a file whose text is not the one on disk.

    Args:
        file: The file.
        references: What it uses from elsewhere, and imports only when it is written.
    """
    module = types.ModuleType(file.name)
    module.__file__, module.__package__ = str(file.path), file.package
    for reference in references:
        home, _, name = reference.origin.rpartition(".")
        value = getattr(importlib.import_module(home), name) if home else None
        owner, _, written = reference.written.rpartition(".")
        if owner:
            setattr(module.__dict__.setdefault(owner, types.SimpleNamespace()), written, value)
        else:
            setattr(module, written, value)
    if "." not in file.name:
        sys.modules[file.name] = module
    with uncompiled():
        exec(
            compile(file.text, str(file.path), "exec", dont_inherit=True),
            module.__dict__,
        )
    return module


def carried(changes: Sequence[Change], before: str, after: str) -> list[Change]:
    """The lines that edits wrote, in a text of which definitions were taken and laid out anew."""
    matcher = difflib.SequenceMatcher(None, lines_of(before), lines_of(after), False)
    found = []
    for change in changes:
        lines = [
            (first + max(change.first - 1 - a, 0), last - max(b - change.last, 0))
            if tag == "equal"
            else (first, last)
            for tag, a, b, first, last in matcher.get_opcodes()
            if a < change.last and b > change.first - 1
        ]
        if lines:
            found.append(replace(change, first=lines[0][0] + 1, last=max(lines[-1][1], 1)))
    return found


def _frames(error: BaseException) -> list[types.TracebackType]:
    found, traceback = [], error.__traceback__
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def idle_names(file: SourceFile, text: str) -> Set[str]:
    """The imported names that a file uses, and that its rewritten text uses no more."""
    return (file.imports.keys() & _used(file.tree)) - _used(parsed(text, file))


def idle_imports(
    file: SourceFile,
    text: str,
    edits: Sequence[Edit | Change],
    line_length: int,
    original: SourceFile | None = None,
) -> list[Edit]:
    """Takes out imported names that the original uses and the rewritten text no longer does.

    Args:
        file: The file as it is before the last edits.
        text: The rewritten text.
        edits: What changed in it.
        line_length: The file's own.
        original: The file before all edits, where that is another one.
    """
    idle = idle_names(original or file, text) & file.imports.keys()
    causes = merged_causes(*(e.causes for e in edits))
    removed = []
    for node in file.tree.body if idle else ():
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        kept = [a for a in node.names if (a.asname or a.name) not in idle]
        if len(kept) == len(node.names) or import_lines.is_remarked(file, node):
            continue  # a comment there may be about the import: leave both
        placed = import_lines.without(file, node)
        if kept:
            names = ast.unparse(ast.Import(kept)).removeprefix("import ")
            lead = "import"
            if isinstance(node, ast.ImportFrom):
                lead = f"from {file.resolve_import(node)} import"
            placed = import_lines.instead(file, node, [f"{lead} {names}"], line_length)
        removed.append(placed.caused_by(causes, "import what is used, no more"))
    return removed


def _used(tree: ast.Module) -> set[str]:
    """Names that a file uses, those in strings (`__all__`, quoted annotations) included."""
    used: set[str] = set()
    waiting: list[Any] = [tree]
    while waiting:  # twice as fast as `ast.walk`, and whole files are walked
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.update(re.findall(r"\w+", node.value))
        elif isinstance(node, ast.AST):
            waiting += [getattr(node, name, None) for name in node._fields]
    return used


def line_length(text: str) -> int:
    """The length a file's lines keep to: the least usual limit that holds its code."""
    longest = max(
        (len(line) for line in lines_of(text) if "#" not in line and '"' not in line), default=0
    )
    return next((limit for limit in (88, 100, 119, 120) if longest <= limit), 120)


def check_text(text: str, file: SourceFile) -> None:
    """The result must parse, and define every class and function that the original defines."""

    def defined(tree: ast.Module) -> set[str]:
        return {n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}

    lost = defined(file.tree) - defined(parsed(text, file))
    if lost:
        raise AssertionError(f"the rewritten file no longer defines {sorted(lost)}")


@functools.lru_cache(maxsize=2)
def parsed(text: str, file: SourceFile) -> ast.Module:
    """The syntax tree of a file as it was rewritten.

    Raises:
        Unsupported: It is indented by tabs, and new lines are not.
        BrokenOutput: It does not parse: a defect.
    """
    try:
        return ast.parse(text)
    except SyntaxError as error:
        line = lines_of(text)[(error.lineno or 1) - 1]
        at = errors.Span(f"rewritten/{file.path.name}", error.lineno or 1, 1, len(line) or 1, line)
        if tab := re.search(r"^ *\t", file.text, re.M):
            number = file.text.count("\n", 0, tab.start()) + 1
            raise errors.Unsupported(
                f"{file.path.name} is indented by tabs, and a line that is put into it cannot be",
                at=errors.Span(file.display, number, 1, 1, file.line(number)),
                hint="indent the file by spaces",
            ) from None
        raise errors.BrokenOutput(
            f"what was to be written does not parse: {error.msg}",
            at=at,
            hint="this is a defect of slapo-rewrite, not of your input; nothing was written",
        ) from error


def init_text(name: str, helpers: dict[str, str]) -> str:
    """The output package's own docstring."""
    is_parallel = any(Path(helper).stem == "tensor_parallel" for helper in helpers)
    what = "tensor parallel" if is_parallel else "as scheduled"
    return f'"""{name}, {what}; rewrite.diff shows what changed."""\n'


def whole_diff(originals: Mapping[str, Original], files: Mapping[str, str], context: int) -> str:
    """The differences of all rewritten files from their originals, the model file's first."""
    text = ""
    for name, original in originals.items():
        if count := len(original.lines):
            shown = "a relative import" if count == 1 else f"{count} relative imports"
            text += f"# {name}: {shown} of the original made absolute, which is not shown\n"
        text += unified_diff(original.absolute, files[name], name, context)
    return text


def unified_diff(
    before: str,
    after: str,
    name: str,
    context: int,
    sides: tuple[str, str] = ("original", "rewritten"),
) -> str:
    """The difference of two texts, empty where there is none.

    Args:
        before: One text.
        after: The other.
        name: The name of the file that they are of.
        context: How many lines are shown around what differs.
        sides: What the texts are called.
    """
    lines = difflib.unified_diff(
        re.findall(r"[^\n]*\n|[^\n]+", before),
        re.findall(r"[^\n]*\n|[^\n]+", after),
        f"{sides[0]}/{name}",
        f"{sides[1]}/{name}",
        n=context,
    )
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )
