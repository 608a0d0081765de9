"""Derives a schedule from a source file: finds a model, runs a step, and decides what to split."""

from __future__ import annotations

import ast
import re
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.auto import hugging_face_model, plain_model
from slapo_rewrite.auto.flow import Flow, are_layers, flow_of, told_apart
from slapo_rewrite.auto.hugging_face_model import is_one
from slapo_rewrite.auto.oracle import Oracle
from slapo_rewrite.auto.placement_search import Search
from slapo_rewrite.auto.schedule_text import schedule_text, shared
from slapo_rewrite.auto.shard_groups import Found, Group
from slapo_rewrite.auto.step import DoesNotRun, Given, Step, first_that_runs, in_a_line, tried
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.locate import locate
from slapo_rewrite.emit.construct import UNFIT
from slapo_rewrite.emit.draft import Trial
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.garbage import collector_paused
from slapo_rewrite.model.path_patterns import modules_at
from slapo_rewrite.model.tree import Node
from slapo_rewrite.schedule.source_module import import_source

ADVICE = (
    "write a file with model(m), inputs(model) and, if the model computes no loss, loss(outputs). "
    "Add verify_model(m) if the model is large. Then use --schedule auto:FILE.py"
)


@dataclass(frozen=True)
class Derived:
    """A derived schedule."""

    text: str  # the file's text
    head: str  # the part of the text before the function `schedule`
    title: str  # the model's title
    groups: tuple[Group, ...]  # the layers that are split
    share: float  # the share of the parameters that is split
    why: str  # why nothing is checkpointed; empty otherwise
    others: tuple[str, ...]  # remarks for output on other models of the source


@collector_paused()
def derive(source: str, wanted: str = "") -> Derived:
    """Derives a schedule for a model.

    Args:
        source: A file or an importable module.
        wanted: A class of the source, or a file that defines `model(m)` and may define `inputs`
            and more; if empty, a class is chosen.

    Raises:
        ScheduleError: No model of the source can be built and run without further information.
    """
    path, name = locate(source)
    module = import_source(SourceFile.read(path, name))
    others: tuple[str, ...] = ()
    if wanted.endswith(".py"):
        step = _given(wanted, module)
    else:
        step, others = _made_up(source, module, wanted)
    oracle = Oracle(source, step)
    model, inputs = oracle.small()
    flow = flow_of(model.train(), inputs, oracle.project.tree.root.live)
    search = Search(oracle, flow, step.has_loss)
    found, root = search.run(), oracle.project.tree.root
    by_stage = told_apart(model, inputs, root.live, search.stages)
    if by_stage is not None:
        oracle.asked = 0
        other = Search(oracle, by_stage, step.has_loss).run()
        if _share(other, root) > _share(found, root):
            found, flow = other, by_stage
    lists, uncounted, why = _lists(oracle, flow, found)
    cuts = oracle.refusal(["s.cut_evenly(2)"]) is None
    head, title = step.text(), step.title
    if isinstance(step, Given):
        title = f"{type(model).__name__} as {Path(step.title).name} builds it"

    def written(found: Found) -> str:
        return schedule_text(title, head, found, lists, uncounted & lists.keys(), cuts, why)

    while True:
        text = written(found)
        refused = _refused(source, text)
        unmade = refused is None and _not_taken(source, text, lists, oracle)
        if unmade:
            lists = {path: parts for path, parts in lists.items() if path not in unmade}
            why = "" if lists else next(iter(unmade.values()))
        elif refused is None:
            share = _share(found, root)
            return Derived(text, head, title, found.groups, share, why, others)
        elif not found.groups:
            raise refused
        else:
            ways = _without_one(found, refused, root)
            found = next((f for f in ways[:-1] if _refused(source, written(f)) is None), ways[-1])


def _share(found: Found, root: Node) -> float:
    """The share of a model's parameters that is split; tied parameters count once."""
    split = {
        id(parameter): parameter.numel()
        for group in found.groups
        for pattern in group.patterns
        for node in modules_at(root, pattern)
        for parameter in node.live.parameters(recurse=False)
    }
    return sum(split.values()) / max(1, sum(p.numel() for p in root.live.parameters()))


def _given(wanted: str, module: types.ModuleType) -> Step:
    file = Path(wanted)
    if not file.is_file():
        raise errors.ScheduleError(f"there is no file `{wanted}`")
    step = Given.read(file)
    if any(isinstance(n, ast.FunctionDef) and n.name == "schedule" for n in step.tree().body):
        raise errors.ScheduleError(
            f"`{wanted}` already defines `schedule`", hint=f"use it directly: --schedule {wanted}"
        )
    try:
        return tried(step, module)
    except DoesNotRun as error:
        raise errors.ScheduleError(
            f"the step that `{wanted}` describes does not run: {error}"
        ) from error


def _made_up(source: str, module: types.ModuleType, wanted: str) -> tuple[Step, tuple[str, ...]]:
    """A step of the first model that runs, and remarks on the models tried before and on others.

    Raises:
        ScheduleError: No model runs.
    """
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    ]
    if not classes:
        raise errors.ScheduleError(
            f"`{source}` defines no model: none of its own classes is a torch.nn.Module",
            hint="name the file or module that defines the model's class",
        )
    if wanted:
        named = {cls.__name__: cls for cls in classes}
        if wanted not in named:
            raise errors.ScheduleError(
                f"`{source}` defines no module class `{wanted}`",
                hint=errors.did_you_mean(wanted, named) or "it defines " + ", ".join(named),
            )
        classes = [named[wanted]]
    reasons: dict[str, str] = {}
    without_loss: Step | None = None
    for cls, steps in _attempts(classes, module):
        if without_loss is not None and not is_one(cls):
            break
        try:
            step, why = first_that_runs(steps, module)
        except Exception as error:  # the user's constructors may raise anything
            step, why = None, in_a_line(error)
        if step is not None and (step.has_loss or not is_one(cls)):
            passed = [f"not `{name}`: {no}" for name, no in reasons.items()]
            further = plain_model.in_order(classes, module) if not is_one(cls) else ()
            beside = [c.__name__ for c in further if c is not cls and c.__name__ not in reasons]
            if beside:
                passed.append(f"other models there: {', '.join(beside)} (--schedule auto:NAME)")
            return step, tuple(passed)
        if step is not None:  # a class with another head may compute the loss for training
            without_loss, why = without_loss or step, "it computes no loss on generated inputs"
        reasons[cls.__name__] = why or "its inputs are not known"
    if without_loss is not None:
        return without_loss, ()
    said = "; ".join(f"`{name}`: {why}" for name, why in reasons.items())
    raise errors.ScheduleError(
        f"no model of `{source}` runs a training step on generated inputs"
        + (f" ({said})" if said else ""),
        hint=ADVICE,
    )


def _attempts(
    classes: Sequence[type], module: types.ModuleType
) -> Iterator[tuple[type, Iterator[Step]]]:
    for cls in hugging_face_model.in_order(list(classes)):
        yield cls, hugging_face_model.steps_of(cls)
    for cls in plain_model.in_order(list(classes), module):
        yield cls, plain_model.steps_of(cls, module)


def _lists(oracle: Oracle, flow: Flow, split: Found) -> tuple[dict[str, str], set[str], str]:
    """The lists whose elements can be checkpointed, or why there are none.

    By path, with the selector of modules in an element that is itself a list; and the paths of
    lists checkpointed as a whole or not at all, since the code that builds them has no index.
    """
    nodes = oracle.project.tree.nodes
    lists = {
        path: parts
        for path, node in nodes.items()
        if (
            isinstance(node.live, (nn.ModuleList, nn.Sequential))
            or (isinstance(node.live, nn.ModuleDict) and len({*map(type, node.live.values())}) == 1)
        )
        and (
            path in flow.apart
            or any(p.startswith(f"{path}.*.") for p in (*flow.layers, *flow.between))
        )
        and (parts := _checkpointed(node)) is not None
    }
    # A list of one element counts only if there are no longer ones: its element may be reused.
    several = {path: lists[path] for path in lists if len(nodes[path].children) > 1}
    found = several or lists

    def refusal(paths: Sequence[str], part: float, *lines: str) -> errors.RewriteError | None:
        own = [f's["{path}"][:{part}]{found[path]}.checkpoint()' for path in paths]
        return oracle.refusal([*lines, *own]) if own else None

    # First all together, as in the schedule; if that is refused, each one alone.
    every = shared(found)
    alone = every if refusal(every, 1.0) is not None else ()
    refused = {path: no for path in alone if (no := refusal([path], 1.0)) is not None}
    ways = [[path] for path in every if path not in refused]
    # Lists that one class builds have to be changed in all of its instances together.
    makers = {path: nodes[path].owner for path in refused}
    for cls in dict.fromkeys(owner.cls for owner in makers.values() if owner is not None):
        alike = [path for path, owner in makers.items() if owner is not None and owner.cls is cls]
        if len(alike) > 1 and refusal(alike, 1.0) is None:
            ways.append(alike)
    kept = {path for way in ways for path in way}
    # Questions with the split layers are slow: all lists that pass without them are tried at once.
    counted = ways
    if refusal([path for way in ways for path in way], 0.5) is not None:
        counted = [way for way in ways if refusal(way, 0.5) is None]
    if refusal([path for way in counted for path in way], 0.5, *split.lines()) is not None:
        counted = [way for way in counted if refusal(way, 0.5, *split.lines()) is None]
    uncounted = kept.difference(*counted)
    why = "" if found else "Nothing is checkpointed: there is no list of layers."
    for path in (path for path in refused if path not in kept):
        why = f"`{path}` is not checkpointed: {refused[path].message}."
    return {path: parts for path, parts in found.items() if path in kept}, uncounted, why


def _checkpointed(node: Node) -> str | None:
    """The selector, in an element of a list, of the modules that are called; None if none are."""
    if not any(True for _ in node.live.parameters()):
        return None  # for example of `nn.Identity`, whose number may differ in a small model
    called = [dict(_called_in(each.live)) for each in node.children.values()]
    if all("" in own for own in called):
        return ""
    if not are_layers(node.live):
        return None
    alike = (path for path in called[0] if all(path in own for own in called))
    return f'["{{{",".join(path for path in alike if any(own[path] for own in called))}}}"]'


def _called_in(module: nn.Module, path: str = "") -> Iterator[tuple[str, bool]]:
    """Paths of the modules in a list's element that are called; and if they have parameters."""
    if type(module).forward is not nn.Module.forward:
        yield path, any(True for _ in module.parameters())
        return
    for name, child in module.named_children():
        yield from _called_in(child, f"{path}.{name}".removeprefix("."))


def _not_taken(source: str, text: str, lists: Mapping[str, str], oracle: Oracle) -> dict[str, str]:
    """The lists for whose layers the code that builds them would keep the original's class; why.

    Only writing the output shows it, and only layers of other files are affected.
    """
    nodes, main = oracle.project.tree.nodes, oracle.project.module.__name__
    kinds = {each.cls.__module__ for path in lists for each in nodes[path].children.values()}
    if not kinds - {main}:
        return {}
    no = _refused(source, text, ["ckpt_ratio=1.0"], lambda *_: None)  # built, but not run
    if no is None:
        return {}
    said = no.render()
    named = [path for path in lists if f'"{path}"' in said]
    return {path: f"`{path}` is not checkpointed: {no.message}." for path in named or lists}


def _refused(
    source: str, text: str, settings: Sequence[str] = (), trial: Trial | None = None
) -> errors.RewriteError | None:
    """Why the tool refuses a schedule; None if it carries it out, final checks included.

    If no trial is given, an output that could not be compared with the original is refused too.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.py"
        file.write_text(text, encoding="utf-8")
        try:
            output = rewrite(source, str(file), settings, tries=trial)
        except errors.RewriteError as error:
            return error
    unfit = next((warning for warning in output.warnings if UNFIT in warning), None)
    return errors.Unsupported(unfit) if unfit is not None else None


def _without_one(found: Found, refused: errors.RewriteError, root: Node) -> list[Found]:
    """Candidates without one group that may have caused a refusal; the last is the fallback.

    It is one whose modules the refusal names, or the smallest; each, if only numbers differ.
    """
    if any(group.head for group in found.groups):  # first try with gathered logits
        whole = tuple(replace(group, head=None) for group in found.groups)
        return [replace(found, groups=whole)]
    by_size = sorted(found.groups, key=lambda g: g.parameters)
    if isinstance(refused, errors.OtherNumbers):
        ways = [_less(found, group, refused) for group in by_size]
        return [*ways, ways[0]] if len(ways) > 1 else ways
    said = refused.render()
    paths = tuple(f"{path}." for path in re.findall(r"`([\w.]+)`", said))
    named = [
        group
        for group in by_size
        for pattern in group.patterns
        if pattern in said
        or any(f"{node.path}.".startswith(paths) for node in modules_at(root, pattern))
    ]
    return [_less(found, (named or by_size)[0], refused)]


def _less(found: Found, gone: Group, refused: errors.RewriteError) -> Found:
    left = tuple(group for group in found.groups if group is not gone)
    whole = {**found.whole, **dict.fromkeys(gone.patterns, refused.message)}
    return replace(found, groups=left, whole=whole)
