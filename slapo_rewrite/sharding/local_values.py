"""Collectives at local variables of methods: finds where one is missing, and runs with them.

In the output such a collective is a statement of its own, `k = all_reduce_gradient(k)`. For a run,
the method is recompiled with a call in the place of that statement, so that the run does what the
output will do.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from slapo_rewrite.code.syntax import position
from slapo_rewrite.model.tree import Node
from slapo_rewrite.sharding.operation_places import is_method, place_at
from slapo_rewrite.sharding.placements import PARTIAL, REPLICATE, PlacementError
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import (
    CannotFollow,
    LocalValue,
    MissingCollective,
    ModuleBoundary,
)

# Modules, each with a collective for the same local value.
Wanted = list[tuple[Node, ModuleBoundary]]


def missing_at(run: Run, error: PlacementError | CannotFollow) -> Iterator[MissingCollective]:
    """The collectives at local variables of modules' methods that would fix an error.

    Each is for the operand that the error names, or for a value that it was computed from; those
    of the innermost method come first. The statement is the method's current one.
    """
    slices = getattr(error, "to_scatter", None)
    wanted = slices[0] if slices else getattr(error, "tensor", None)
    frames, traceback = [], error.__traceback__
    if wanted is None:
        return
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    for frame, instruction in reversed(frames):
        owner = run.method_owner(frame) if run.editable(frame.f_code.co_filename) else None
        place = place_at(frame.f_code, instruction)
        if owner is None or place is None:
            continue
        if is_method(type(run.tree.nodes[owner].live), frame.f_code):
            names = {id(v): n for n, v in frame.f_locals.items() if isinstance(v, torch.Tensor)}
            for tensor in [wanted] if slices else _makers(run, wanted):
                if (name := names.pop(id(tensor), None)) is not None:
                    value = LocalValue(name, place)
                    if slices:
                        yield MissingCollective(owner, "fwd_post", "scatter", slices[1], value)
                    else:
                        yield _collective(run, owner, tensor, value)


def _collective(run: Run, owner: str, tensor: torch.Tensor, value: LocalValue) -> MissingCollective:
    """The collective that makes a value whole, or sums its gradient if it is."""
    kind = run.flow.of(tensor).kind
    if kind == REPLICATE:
        return MissingCollective(owner, "bwd_post", "all_reduce", value=value)
    if kind == PARTIAL:
        return MissingCollective(owner, "fwd_post", "all_reduce", value=value)
    axis = next(iter(run.split_axes(tensor)), -1)
    axis = -1 if axis == tensor.dim() - 1 else axis
    return MissingCollective(owner, "fwd_post", "all_gather", axis, value)


def _makers(run: Run, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A value, and the values of its placement that it was computed from, the nearest first."""
    kind = run.flow.of(tensor).kind
    waiting, seen = [tensor], {id(tensor)}
    for each in waiting:
        yield each
        for maker in run.makers.get(id(each), ()):
            state = run.flow.of(maker)
            mends = state.kind == kind and maker.requires_grad and state.grad_reduced is None
            if mends and id(maker) not in seen:
                seen.add(id(maker))
                waiting.append(maker)


def install_values(
    run: Run,
    cross: Callable[[Node, ModuleBoundary, torch.Tensor], torch.Tensor],
    undo: list[Callable[[], None]],
) -> None:
    """Puts the requested collectives at local values into the methods' code.

    `cross` applies a collective to a value of a module.
    """
    functions: dict[types.FunctionType, dict[LocalValue, Wanted]] = {}
    for path, borders in run.request.borders.items():
        node = run.tree.nodes[path]
        for border in borders:
            if border.value is not None:
                wanted = functions.setdefault(_function_at(node, border.value), {})
                wanted.setdefault(border.value, []).append((node, border))
    for function, wanted in functions.items():
        name = f"_collective_{len(undo)}"
        function.__globals__[name] = functools.partial(_crossed, cross, list(wanted.values()))
        undo.append(functools.partial(function.__globals__.__delitem__, name))
        undo.append(functools.partial(setattr, function, "__code__", function.__code__))
        tree = run.request.texts[next(iter(wanted)).statement.filename]
        function.__code__ = _code(tree, function.__code__, _Calls(name, list(wanted)))


def _crossed(
    cross: Callable[[Node, ModuleBoundary, torch.Tensor], torch.Tensor],
    values: Sequence[Wanted],
    number: int,
    module: Any,
    value: Any,
) -> Any:
    """Applies a module's collectives to one of the values."""
    for node, border in values[number]:
        if node.live is module:
            value = cross(node, border, value)
    return value


def _function_at(node: Node, value: LocalValue) -> types.FunctionType:
    """The method of a module that contains the value's statement."""
    place = value.statement
    file = os.path.realpath(place.filename)  # the user may have given a relative path
    for base in node.cls.__mro__:
        for found in filter(inspect.isfunction, vars(base).values()):
            function = inspect.unwrap(found)
            assert isinstance(function, types.FunctionType)
            code = function.__code__
            lines = {line for _, _, line in code.co_lines()}
            if os.path.realpath(code.co_filename) == file and place.line in lines:
                return function
    raise PlacementError(
        f"line {place.line} is in no method of {node.shown} that can be followed",
        "put the sync on a module inside or around it",
        node.path,
    )


class _Calls(ast.NodeTransformer):
    """Inserts statements `value = function(number, module, value)` before or after others."""

    def __init__(self, function: str, values: Sequence[LocalValue]) -> None:
        self.function, self.values, self.me = function, values, ""

    def visit(self, node: ast.AST) -> Any:
        new = super().visit(node)
        if not isinstance(node, ast.stmt):
            return new
        sides: tuple[list[ast.stmt], list[ast.stmt]] = [], []
        for number, value in enumerate(self.values):
            if value.statement.at[:2] == position(node):
                text = f"{value.name} = {self.function}({number}, {self.me}, {value.name})"
                (call,) = ast.parse(text).body
                for each in ast.walk(call):
                    ast.copy_location(each, node)
                sides[value.is_bound].append(call)
        return [*sides[False], new, *sides[True]] if any(sides) else new


def _code(tree: ast.Module, old: types.CodeType, calls: _Calls) -> types.CodeType:
    """The code of a method with the statements of `calls` inserted."""
    owner, method = next(
        (cls, each)
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for each in cls.body
        if isinstance(each, ast.FunctionDef) and each.name == old.co_name
        if each.lineno <= max(line for *_, line in old.co_lines() if line) <= each.end_lineno  # type: ignore[operator]
    )
    calls.me = old.co_varnames[0]
    method = calls.visit(copy.deepcopy(method))
    free = ", ".join(name for name in old.co_freevars if name != "__class__")
    scene = ast.parse(f"def scene({free}):\n    class {owner.name}:\n        pass")
    scene.body[0].body[0].body = [method]  # type: ignore[attr-defined]
    code = compile(scene, old.co_filename, "exec", dont_inherit=True)
    for name in ("scene", owner.name, old.co_name):
        inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
        code = next(c for c in inner if c.co_name == name)
    return code
