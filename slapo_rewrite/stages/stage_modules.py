"""The modules and parameters that each stage holds, and those that several share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.text import accessor, joined_path
from slapo_rewrite.errors import Span
from slapo_rewrite.groups import grouped
from slapo_rewrite.runtime.stages import own_tensors
from slapo_rewrite.stages.defining_files import DefiningFiles
from slapo_rewrite.stages.stage_layout import Stages
from slapo_rewrite.stages.trained_reads import reached, reads_of, source_of


@dataclass(frozen=True)
class Held:
    """A module, layers or a parameter that a stage holds."""

    text: str  # its expression: `self.bert.embeddings`, `self.bert.encoder.layer[6:]`
    path: str  # the path of the module or parameter, or of the list that has the layers
    value: Any  # the module, layers or parameter
    picked: bool = False  # whether the stage indexes it by a key that it computes

    @property
    def tensors(self) -> list[Any]:
        """Its parameters and buffers."""
        if hasattr(self.value, "parameters"):
            return [*self.value.parameters(), *self.value.buffers()]
        return [self.value]


def held_by(stages: Stages, model: Any) -> list[list[Held]]:
    """What each stage holds, in the model's order; the last one also holds unused tensors."""
    found = [_used(stages, number, model) for number in range(len(stages.stages))]
    there = {id(t) for stage in found for h in stage for t in h.tensors}
    names = dict(model.named_modules())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in there:
            path, above = name, name.rpartition(".")[0]
            while above and not _tensors(names[above]) & there:
                path, above = above, above.rpartition(".")[0]
            value = names.get(path, tensor)
            found[-1].append(Held(accessor(path), path, value))
            there |= {id(t) for t in found[-1][-1].tensors}
    return found


def _tensors(module: Any) -> set[int]:
    return {id(t) for t in (*module.parameters(), *module.buffers())}


def _texts(stages: Stages, number: int) -> list[str]:
    """The statements of a stage; those of the last include the loss."""
    stage = stages.stages[number]
    texts = stages.lines(stage, None, stages.returned(stage))
    if number + 1 == len(stages.stages):
        texts += [*stages.lines(stages.tail, None, stages.program.loss), stages.program.loss]
    return texts


def _used(stages: Stages, number: int, model: Any) -> list[Held]:
    found: dict[str, Held] = {}
    for text in _texts(stages, number):
        slices = {
            ast.unparse(node.value): ast.unparse(node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
        }
        picked = {
            ast.unparse(node.value)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Subscript)
            and not isinstance(node.slice, ast.Slice | ast.Constant)
        }
        for steps in reads_of(model, text):
            path = _longest(model, steps)
            if path:
                spelled = accessor(path)
                is_picked = spelled in picked
                value = eval(spelled, {"self": model})
                if spelled in slices and hasattr(value, "parameters"):  # a tensor is held whole
                    spelled = held_slice(slices[spelled])
                    value = eval(spelled, {"self": model})
                is_picked |= spelled in found and found[spelled].picked
                found[spelled] = Held(spelled, path, value, is_picked)
    order = {name: n for n, (name, _) in enumerate(model.named_modules())}
    kept = [h for h in found.values() if not any(h.text.startswith(f"{all_}[") for all_ in found)]
    return sorted(kept, key=lambda held: order.get(held.path, len(order)))


def held_slice(text: str) -> str:
    """The expression for the layers that a slice in a stage needs.

    A variable start becomes the list's beginning; an end that is no constant becomes its end.
    """
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
    first, stop = node.slice.lower, node.slice.upper
    upper = ast.unparse(stop) if isinstance(stop, ast.Constant) else ""
    is_read = first is not None and names_in(first) <= {"self"}
    lower = ast.unparse(first) if first is not None and is_read else ""
    listed = ast.unparse(node.value)
    return f"{listed}[{lower}:{upper}]" if lower or upper else listed


def _longest(model: Any, steps: Sequence[str]) -> str:
    """The path of the called module, list of modules or tensor in a chain of attributes.

    Empty for another attribute of an inlined module, such as its config.
    """
    path, owner, rest = reached(model, steps)
    if rest and rest[0] in own_tensors(owner):
        return ".".join([*path, rest[0]])
    is_other = rest and hasattr(owner, rest[0]) and _is_written_out(owner, rest[0])
    return "" if is_other else ".".join(path)


def sizes_of(
    stages: Stages,
    held: Sequence[Sequence[Held]],
    model: Any,
    files: DefiningFiles,
    at: Span | None,
) -> list[list[str]]:
    """The modules of other stages that each stage reads sizes of: `self.embed.embedding_dim`."""
    found = []
    changed = [
        {key for text in _texts(stages, number) for key in _set_on_modules(model, text)}
        for number in range(len(held))
    ]
    for number, own in enumerate(held):
        there = [f"{part.path}." for part in own]
        sizes: dict[str, None] = {}
        elsewhere = set[tuple[str, str]]().union(*changed) - changed[number]
        for text in _texts(stages, number):
            for path, name in _read_of_modules(model, text):
                is_set = (path, name) in elsewhere
                is_there = (f"{path}.".startswith(h) or h.startswith(f"{path}.") for h in there)
                if not is_set and (not path or any(is_there)):
                    continue
                if is_set or name in files.changing([model.get_submodule(path)], by_itself=True):
                    raise errors.CannotCut(
                        f"stage {number} reads `{joined_path(path, name)}`, which changes as the "
                        "model runs, in another stage",
                        at=at,
                        hint="pass it on as a value, or cut elsewhere",
                    )
                sizes[path] = None
        found.append([*sizes])
    return found


def _attributes_read(model: Any, text: str) -> Iterator[tuple[str, Any, str]]:
    """The reads of modules' attributes other than modules: path, module and attribute name."""
    for steps in reads_of(model, text):
        path, owner, rest = reached(model, steps)
        if rest:
            yield ".".join(path), owner, rest[0]


def _read_of_modules(model: Any, text: str) -> Iterator[tuple[str, str]]:
    """The plain attributes of modules that a text reads, each with the module's path."""
    for path, owner, name in _attributes_read(model, text):
        is_plain = hasattr(owner, name) and name not in own_tensors(owner)
        if is_plain and _is_written_out(owner, name):
            yield path, name


def _set_on_modules(model: Any, text: str) -> Iterator[tuple[str, str]]:
    """The attributes that methods called in a text set on their modules."""
    for path, owner, method in _attributes_read(model, text):
        for node in ast.walk(ast.parse(source_of(getattr(type(owner), method, None)) or "")):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    yield path, name


def _is_written_out(module: Any, step: str) -> bool:
    """Whether reading an attribute does not need the module's tensors or submodules."""
    return step in vars(module) or callable(getattr(type(module), step, None))


@dataclass(frozen=True)
class Tie:
    """Parameters that are shared by the same stages."""

    key: str  # the name of the tie
    names: dict[int, tuple[str, ...]]  # the parameters' names in each stage


def ties_of(held: Sequence[Sequence[Held]], model: Any) -> list[Tie]:
    """The parameters that several stages hold, for each group of stages."""
    named = model.named_parameters(remove_duplicate=False)
    spelled = grouped((id(parameter), name) for name, parameter in named)
    where: dict[int, dict[int, str]] = {}
    for number, stage in enumerate(held):
        for part in stage:
            for tensor in part.tensors:
                names = spelled.get(id(tensor), [])
                own = [n for n in names if f"{n}.".startswith(f"{part.path}.")]
                if own:
                    where.setdefault(id(tensor), {}).setdefault(number, own[0])
    groups = grouped((tuple(each), each) for each in where.values() if len(each) > 1)
    return [
        Tie(
            next(iter(group[0].values())).rpartition(".")[0].rpartition(".")[2] or "shared",
            {number: tuple(by_stage[number] for by_stage in group) for number in numbers},
        )
        for numbers, group in groups.items()
    ]


def check_one_group(ties: Sequence[Tie], at: Span | None) -> None:
    """Raises for several groups of stages with shared parameters: DeepSpeed supports only one."""
    if len(ties) > 1:
        one, other = (next(iter(tie.names.values()))[0] for tie in ties[:2])
        raise errors.CannotCut(
            f"`{one}` and `{other}` are shared by different stages, but DeepSpeed ties a stage to "
            "only one group of others",
            at=at,
            hint='cut so that the same stages share both, or use target="torch"',
        )


def check_picked(held: Sequence[Sequence[Held]], at: Span | None) -> None:
    """Raises if several stages index one container by computed keys.

    Each would hold all of it, and DeepSpeed would sync it by gradients that each stage has for its
    own elements only.
    """
    seen: dict[str, int] = {}
    for number, stage in enumerate(held):
        for part in stage:
            picks = part.picked and hasattr(part.value, "parameters")
            if picks and any(True for _ in part.value.parameters()):
                first = seen.setdefault(part.path, number)
                if first != number:
                    raise errors.CannotCut(
                        f"stages {first} and {number} both take elements of `{part.path}` by a "
                        "computed key, so each would hold all of it",
                        at=at,
                        hint='use target="torch", or keep each element in its layer',
                    )


def shared_names(model: Any) -> list[tuple[str, ...]]:
    """The names of parameters that have several, with `*` for numbers."""
    named = model.named_parameters(remove_duplicate=False)
    names = grouped((id(parameter), re.sub(r"\d+", "*", name)) for name, parameter in named)
    return sorted({tuple(sorted(set(group))) for group in names.values() if len(group) > 1})
