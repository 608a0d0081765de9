"""How the loss of a training step is computed from the model's result."""

from __future__ import annotations

import ast
import copy
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.evaluate import is_plain
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.syntax import tree_of
from slapo_rewrite.errors import Span
from slapo_rewrite.model.small_model import loss_parameters
from slapo_rewrite.stages.function_syntax import fields_given, fields_of

FUNCTION = "loss"  # the name of the function in a schedule


@dataclass(frozen=True)
class StepLoss:
    """How the loss is computed from the model's result."""

    # The attributes, keys or elements of the result that it needs; None for all of it.
    parts: tuple[str | int, ...] | None
    # The texts of further arguments of the schedule's function, by parameter. None if the one part
    # is the loss itself, which that function only picks.
    arguments: Mapping[str, str] | None = None
    by_attribute: bool = False  # whether the parts are attributes

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments of the step that the function takes."""
        return tuple(self.arguments or ())

    def picked(self, result: str) -> str:
        """The expression of the one part, for a result that is a variable."""
        assert self.parts is not None
        (part,) = self.parts
        return f"{result}.{part}" if self.by_attribute else f"{result}[{part!r}]"

    def text(self, result: str) -> str:
        """The expression of the loss of a result."""
        if self.arguments is None:
            return result
        if isinstance(ast.parse(result, mode="eval").body, ast.Tuple):
            result = f"({result})"
        return f"{FUNCTION}({', '.join([result, *self.arguments.values()])})"


def step_loss(
    schedule: Any, outputs: Any, loss: Any, inputs: Mapping[str, Any], cause: Span | None
) -> StepLoss:
    """Finds how a loss was computed from a model's result."""
    if outputs is loss:
        return StepLoss(None)
    by_attribute = False
    if isinstance(outputs, Mapping):
        parts: list[tuple[Any, Any]] = list(outputs.items())
    elif isinstance(outputs, tuple | list) and fields_of(type(outputs)) is None:
        parts = list(enumerate(outputs))
    else:
        by_attribute = True
        fields: Any = getattr(outputs, "_asdict", lambda: getattr(outputs, "__dict__", {}))
        parts = list(fields().items())
    for name, part in parts:
        if part is loss:
            return StepLoss((name,), by_attribute=by_attribute)
    function = getattr(schedule, FUNCTION, None)
    if not inspect.isfunction(function):
        raise errors.CannotCut(
            "the model does not return the loss",
            at=cause,
            hint="define loss(outputs) in the schedule, which selects or computes it",
        )
    for name, value in _made_beforehand(function):
        raise errors.CannotCut(
            f"`loss` in the schedule reads `{name}`, a {type(value).__name__} created outside of "
            "it, which the last stage would create again",
            at=cause,
            hint=f"return it from inputs(model), and take it in loss(outputs, {name})",
        )
    by_name = {
        name: name
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
        else f"{name}={name}"
        for name, parameter in loss_parameters(schedule).items()
        if name in inputs
    }
    read = _read(function)
    known = read is not None and {*read} <= {name for name, _ in parts}
    return StepLoss(read if known else None, by_name)


def is_picked_later(function: ast.FunctionDef, loss: StepLoss) -> bool:
    """Whether the loss is a part of a variable that `forward` returns."""
    match function.body[-1]:
        case ast.Return(value=ast.Name()):
            return loss.parts is not None and loss.arguments is None
    return False


def only_loss(
    function: ast.FunctionDef, loss: StepLoss, world: Mapping[str, Any]
) -> ast.FunctionDef:
    """A `forward` that only returns what its loss needs."""
    if loss.parts is None:
        return function
    function = copy.deepcopy(function)
    is_one = loss.arguments is None
    for node in ast.walk(function):
        match node:
            case ast.Return(value=ast.Tuple(elts=elts)) if isinstance(loss.parts[0], int):
                node.value = elts[loss.parts[0]] if loss.parts[0] < len(elts) else None
            case ast.Return(value=ast.Call() as made):
                found = [k for k in _given(made, world) if k.arg in loss.parts]
                if is_one and isinstance(loss.parts[0], str):
                    node.value = found[0].value if found else None
                elif not is_one and len(found) == len(loss.parts) and _is_record(made, world):
                    made.args, made.keywords = [], found
            case ast.Return(value=ast.Dict(keys=keys, values=values) as made):
                items = [
                    (k, v)
                    for k, v in zip(keys, values, strict=True)
                    if isinstance(k, ast.Constant) and k.value in loss.parts
                ]
                if is_one:
                    node.value = items[0][1] if items else None
                elif len(items) == len(loss.parts):
                    made.keys, made.values = [k for k, _ in items], [v for _, v in items]
    return function


def _given(made: ast.Call, world: Mapping[str, Any]) -> list[ast.keyword]:
    """The keyword arguments of a call, including positional fields of a record."""
    fields = fields_given(made, world.get(ast.unparse(made.func)))
    return made.keywords if fields is None else [ast.keyword(n, v) for n, v in fields.items()]


def _is_record(made: ast.Call, world: Mapping[str, Any]) -> bool:
    """Whether a call constructs a record whose fields are all optional."""
    fields = fields_of(world.get(ast.unparse(made.func)))
    return fields is not None and all(fields.values())


def _read(function: Any) -> tuple[str, ...] | None:
    """The attributes or keys of its first argument that a function reads; None if not known."""
    found = next(iter(tree_of(function).body), None)
    if not isinstance(found, ast.FunctionDef):
        return None
    outputs = found.args.args[0].arg
    read: dict[ast.AST, str] = {}
    for node in ast.walk(found):
        match node:
            case (
                ast.Attribute(value=ast.Name() as base, attr=name)
                | ast.Subscript(value=ast.Name() as base, slice=ast.Constant(value=str(name)))
            ):
                read[base] = name
    uses = [node for node in ast.walk(found) if is_name(node, outputs)]
    return tuple(dict.fromkeys(read[n] for n in uses)) if uses and {*uses} <= {*read} else None


def _made_beforehand(function: Any) -> Iterator[tuple[str, Any]]:
    """The globals that a function reads and that are not just code or plain values."""
    waiting, seen = [function.__code__], {function}
    while waiting:
        code = waiting.pop()
        waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if not _is_made_again(value):
                yield name, value
            elif getattr(value, "__module__", "") == function.__module__ and value not in seen:
                seen.add(value)
                waiting += [value.__code__] if inspect.isfunction(value) else []


def _is_made_again(value: Any) -> bool:
    """Whether executing a value's definition again gives an equal value."""
    if isinstance(value, nn.Module):
        return not any(True for _ in (*value.parameters(), *value.buffers()))
    if isinstance(value, tuple):
        return all(map(_is_made_again, value))
    return is_plain(value) or isinstance(value, types.ModuleType) or callable(value)
