"""Turns the cuts of a schedule into the text of `pipeline.py`."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.text import listed
from slapo_rewrite.directive import Directive
from slapo_rewrite.errors import Span
from slapo_rewrite.model.calls import calls_noted
from slapo_rewrite.model.tree import Tree, is_container
from slapo_rewrite.runtime.stages import Stage
from slapo_rewrite.stages.defining_files import DefiningFiles
from slapo_rewrite.stages.dry_run import Trial, Written
from slapo_rewrite.stages.fewer_layers import Kept, is_uniform, kept_layers
from slapo_rewrite.stages.inline_forward import Flattening
from slapo_rewrite.stages.pipeline_module import PipelineText, forward_text, loss_text
from slapo_rewrite.stages.program import ARGUMENT, Cut, divided
from slapo_rewrite.stages.set_apart import with_fields_apart, with_loss_apart
from slapo_rewrite.stages.stage_inputs import Planner
from slapo_rewrite.stages.stage_layout import Stages
from slapo_rewrite.stages.stage_modules import (
    check_one_group,
    check_picked,
    held_by,
    shared_names,
    sizes_of,
    ties_of,
)
from slapo_rewrite.stages.step_loss import FUNCTION
from slapo_rewrite.stages.trained_reads import trains

# The other ends of stages that are tested, each in a training step of a small model.
MOST = 6


def pipeline(
    files: Mapping[str, str],
    file: SourceFile,
    schedule: Any,
    cuts: Sequence[Cut],
    sliced: Directive | None,
    module: ModuleType,
    tree: Tree,
) -> PipelineText:
    """The pipeline stages of a rewritten model, defined in `file`, one of the output's `files`.

    `module` is that file, imported, and `tree` its model. `sliced` is the directive, if any, by
    which ranks hold slices of the values between layers (sequence parallelism).
    """
    model = tree.root.live
    at = cuts[0].cause.at
    order = {path: number for number, path in enumerate(tree.nodes)}
    cuts = sorted(cuts, key=lambda cut: order[cut.path])
    if type(model).__module__ != module.__name__:
        raise errors.CannotCut(
            f"the model's class {type(model).__name__} is not defined in {file.path.name}", at=at
        )
    check_attributes(model, file)

    has_shards = "shards.py" in files

    def tried(cuts: Sequence[Cut]) -> PipelineText:
        """Makes the stages, tested in a small model with few layers if these represent all."""
        run = functools.partial(_tried, file, schedule, cuts, sliced, module, tree, has_shards)
        kept = kept_layers(tree, cuts)
        if any(len(numbers) < len(tree.nodes[path].children) for path, numbers in kept.items()):
            # A refusal may come from missing layers: then the model with all layers decides.
            with contextlib.suppress(errors.CannotCut):
                return run(kept)
        return run({})

    try:
        return tried(cuts)
    except errors.CannotCut as error:
        refusal = error

    def others() -> Iterator[Sequence[str]]:
        """Other modules after which the stages may end."""
        if cuts[0].instead:
            yield cuts[0].instead
        if cuts[0].may_move:
            small = Trial(schedule, module, model, at)
            yield from ([path] for path in other_ends(model, small.model, small.step))

    for paths in others():
        with contextlib.suppress(errors.CannotCut):
            found = tried([replace(cuts[0], path=path) for path in paths])
            no, ends = listed(cut.path for cut in cuts), listed(paths)
            words = f"no stage can end after {no}, so it ends after {ends}: "
            return replace(found, warnings=(words + refusal.message,))
    raise refusal


def other_ends(model: nn.Module, small: nn.Module, step: Callable[[], Any]) -> list[str]:
    """The modules after which the first of two stages may end, the most even divisions first.

    A training step calls them exactly once, they are not layers of a list, and parameters are used
    before and after their end.

    Returns:
        At most `MOST` paths. Of several with the same division, the one nearest the root.
    """
    inside = {path: module for path, module in small.named_modules() if path}
    with calls_noted(inside, leaving=True) as returned:
        step()
    counts = Counter(returned)
    modules = dict(model.named_modules())
    total = sum(parameter.numel() for parameter in model.parameters())
    used: dict[int, int] = {}
    found: dict[int, str] = {}
    for path in (path for path in returned if path in modules):
        own = modules[path].parameters(recurse=False)
        used |= {id(parameter): parameter.numel() for parameter in own}
        before = sum(used.values())
        is_layer = any(step.isdigit() for step in path.split("."))
        if counts[path] > 1 or is_layer or is_container(type(modules[path])):
            continue
        nearest = found.get(before)
        if nearest is None or path.count(".") < nearest.count("."):
            found[before] = path
    even = sorted(found.keys() - {0, total}, key=lambda before: abs(2 * before - total))
    return [found[before] for before in even[:MOST]]


def _tried(
    file: SourceFile,
    schedule: Any,
    cuts: Sequence[Cut],
    sliced: Directive | None,
    module: ModuleType,
    tree: Tree,
    has_shards: bool,
    kept: Kept,
) -> PipelineText:
    """The stages, tested in a small model with the kept layers, or with all."""
    model, at = tree.root.live, cuts[0].cause.at
    trial = Trial(schedule, module, model, at, kept)
    inside = ways(tree, cuts)
    has_function = trial.loss.arguments is not None
    own = vars(module) | ({FUNCTION: schedule.loss} if has_function else {})
    defining = DefiningFiles(file, module, own)
    flat = Flattening(model, defining, inside, trial.loss, cuts).flat(trial.inputs)
    trial.world = world = {**own, **defining.values}
    flat = with_loss_apart(flat, lambda text: trains(model, text), at)
    by_name = cuts[0].target == "torch"
    places = [c.cause.at for c in cuts]
    with_records = False
    while True:
        program = divided(flat, cuts, model, world)
        seen = trial.seen(program, with_records)
        planner = Planner(program, seen, model, places, by_name, sliced)
        try:
            stages = planned(trial, planner)
            break
        except errors.CannotCut:
            records = [name for name, n in planner.stuck if planner.seen[name, n].kind == "record"]
            more = with_fields_apart(flat, records[-1]) if records else None
            if more is None and (with_records or not records):
                raise
            # A record used for more than reading its fields is sent with all of its fields.
            flat, with_records = more or flat, more is None
    if kept and not is_uniform(program):
        raise errors.CannotCut("rounds of a loop over layers may differ", at=at)
    if kept and any(program.pieces[n].layers for s in stages.stages for _, n in s.joined):
        raise errors.CannotCut("values that layers add to a list may become longer", at=at)
    trial.check_numbers(stages)
    texts = [forward_text(stages, stage, trial.depth) for stage in stages.stages]
    texts.append(loss_text(stages, trial.depth))
    held = held_by(stages, model)
    paths = [[path for part in parts for path in trial.paths_of(part)] for parts in held]
    sizes = sizes_of(stages, held, model, defining, at)
    # A stage keeps a list without layers, if the small model has none of them for this stage.
    idle = [[part.path for part in parts if not trial.paths_of(part)] for parts in held]
    shells = [[*own, *lists] for own, lists in zip(sizes, idle, strict=True)]
    trial.check(Written(stages, [run(text, world) for text in texts], paths, shells))
    shared = ties_of(held, model)
    if by_name:
        check_rows(stages, trial.inputs, at)
    else:
        check_one_group(shared, at)
        check_picked(held, at)
        check_tensors(stages, trial.inputs, at)
    return PipelineText(
        stages,
        held,
        sizes,
        shared,
        type(model),
        defining,
        flat.settings,
        flat.fixed,
        shared_names(model),
        has_shards,
        has_function,
    )


def planned(trial: Trial, planner: Planner) -> Stages:
    """The stages; no stage recomputes a value that depends on the contents of a missing one."""
    stages = planner.stages()
    while (found := trial.read_for_content(stages)) is not None:
        number, name = found
        planner.once.add(number)
        try:
            stages = planner.stages()
        except errors.CannotCut as error:
            raise errors.CannotCut(
                f"`{name}` is needed after the cut for its elements, but does not get there",
                at=planner.program.pieces[number].at,
                also=[trial.cause],
                hint="cut elsewhere, or bind the value computed from it before the cut",
            ) from error
    return stages


def check_attributes(model: Any, file: SourceFile) -> None:
    """Raises `NameTaken` if the model has an attribute with a name that stages define.

    The last stage defines `step_loss`: one of the two methods would be called instead of the other.
    """
    for name in sorted({*vars(Stage), *Stage.__annotations__, "step_loss"}):
        if not name.startswith("_") and hasattr(model, name):
            raise errors.NameTaken(
                f"`{type(model).__name__}` has an attribute `{name}`, a name that its stages need",
                hint=f"give it another name in {file.path.name}",
            )


def check_tensors(stages: Stages, inputs: Mapping[str, Any], at: Span | None) -> None:
    """Raises `CannotCut` for arguments of a step that are not tensors, for DeepSpeed's engine."""
    given = (*(name for name, _ in stages.stages[0].given), *stages.labels)
    for name in given:
        if not hasattr(inputs[name], "untyped_storage"):
            raise errors.CannotCut(
                f"the step gets `{name}`, {inputs[name]!r}, but the engine takes only tensors",
                at=at,
                hint=f"return a tensor from inputs(model) in the schedule, or leave `{name}` out",
            )


def check_rows(stages: Stages, inputs: Mapping[str, Any], at: Span | None) -> None:
    """Raises for arguments of a step that torch's schedules cannot divide into micro-batches."""
    (label,) = stages.labels
    rows = getattr(inputs[label], "shape", ())[:1]
    for_loss = {name for name, number in stages.stages[-1].hands_on if number == ARGUMENT}
    for name in (label, *stages.arguments().values()):
        shape = getattr(inputs[name], "shape", None)
        if (shape is None and name in {label, *for_loss}) or (
            shape is not None and (not shape or shape[:1] != rows)
        ):
            what = f"of shape {tuple(shape)}" if shape is not None else f"{inputs[name]!r}"
            raise errors.CannotCut(
                f"the step gets `{name}`, {what}, but torch's schedules divide a batch by rows",
                at=at,
                hint=f"give `{name}` a row for each row of `{label}` in inputs(model) of the "
                "schedule, or leave it out",
            )


def run(text: str, world: Mapping[str, Any]) -> Any:
    """Executes a function's text with the names of the model's file; keeps it as docstring."""
    scene = dict(world)
    exec(compile(text, "<stage>", "exec"), scene)
    function = scene["step_loss" if text.startswith("def step_loss") else "forward"]
    function.__doc__ = text
    scene.update(world)  # as a method, it would not hide a global of its name
    return function


def ways(tree: Tree, cuts: Sequence[Cut]) -> set[str]:
    """The modules that contain the cuts, whose `forward` must be inlined."""
    found: set[str] = set()
    for cut in cuts:
        node = tree.nodes[cut.path].parent
        while node is not None and node.path:
            if not node.is_container or node.cls.__name__ == "Sequential":
                found.add(node.path)
            node = node.parent
    return found
