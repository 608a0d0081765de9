"""Works out what a source expression came to when a live module was constructed.

Nothing of the user's is run but attribute access: names are looked up where the finished module
keeps them, arguments are followed to the call that made the module, all else is `Unknown`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from slapo_rewrite.code.arguments import Signature, argument_of, first_parameter
from slapo_rewrite.code.dataflow import bound_in
from slapo_rewrite.code.evaluate import UNKNOWN, Constant, Worth, computed, truth
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import assignments, end_position, position
from slapo_rewrite.model.constructor_values import Frame, Loop

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(abs, all, any, bool, dict, divmod, enumerate, float, frozenset, getattr, hasattr, int),
    *(isinstance, issubclass, len, list, max, min, range, reversed, round, set, sorted, str),
    *(sum, tuple, type, zip),
)
_BUILTINS = {f.__name__: f for f in _FUNCTIONS}
_METHODS = {"count", "endswith", "get", "get_text_config", "index", "items", "keys", "lower"}
_METHODS |= {"removeprefix", "removesuffix", "split", "startswith", "strip", "upper", "values"}
_MAX_DEPTH = 40


class Unknown(Exception):
    """What an expression comes to cannot be told."""


@dataclass
class Scene:
    """Where an expression is evaluated: in the constructor of a live module."""

    live: nn.Module  # the module under construction; finished by now
    file: SourceFile  # the file of the function
    frame: Frame  # the function
    # What a parameter of the constructor was given by the call that made the module.
    argument: Callable[[str], Any]
    # Parameter -> the attribute that keeps it, for those that the constructor stores.
    stored: Mapping[str, str] = field(default_factory=dict)
    # The loops around the place, and which iteration is meant.
    elements: Mapping[ast.AST, int | ast.expr] = field(default_factory=dict)
    # Attributes that were different before the place was reached.
    hidden: frozenset[str] = frozenset()


class Evaluator:
    """Evaluates expressions in one scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._depth = 0

    def evaluate(self, expr: ast.expr, names: Mapping[str, Any] | None = None) -> Any:
        """What the expression came to.

        Raises:
            Unknown: It cannot be told.
        """
        return self._expr(expr, _Place(self.scene.frame, position(expr), names or {}))

    def truth(self, test: ast.expr) -> bool | None:
        """How a test came out; None where that cannot be told."""
        return self._truth(test, _Place(self.scene.frame, position(test), {}))

    def _expr(self, expr: ast.expr, at: _Place) -> Any:
        worth = self._worth(expr, at)
        if not isinstance(worth, Constant):
            raise Unknown
        return worth.value

    def _truth(self, test: ast.expr, at: _Place) -> bool | None:
        def of(operand: ast.expr) -> Worth:
            worth = self._worth(operand, at)
            tensor = isinstance(worth, Constant) and isinstance(worth.value, torch.Tensor)
            return UNKNOWN if tensor else worth

        return truth(test, of)

    def _worth(self, expr: ast.expr, at: _Place) -> Worth:
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH:
                return UNKNOWN
            match expr:
                case ast.Name():
                    return Constant(self._name(expr.id, at))
                case ast.Attribute():
                    return Constant(self._attribute(expr, at))
                case ast.Call():
                    return Constant(self._call(expr, at))
                case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                    turns = self._turns(expr.generators, at)
                    return Constant([self._expr(expr.elt, inner) for inner in turns])
            return computed(expr, lambda operand: self._worth(operand, at)) or UNKNOWN
        except Exception:  # a property of the user's, a method on odd operands
            return UNKNOWN
        finally:
            self._depth -= 1

    def _attribute(self, expr: ast.Attribute, at: _Place) -> Any:
        value = self._expr(expr.value, at)
        if value is self.scene.live and expr.attr in self.scene.hidden:
            raise Unknown
        return getattr(value, expr.attr)

    def _call(self, expr: ast.Call, at: _Place) -> Any:
        if any(k.arg is None for k in expr.keywords):
            raise Unknown
        match expr.func:
            case ast.Name(id=name) if name in _BUILTINS and name not in self.scene.file.names:
                function = _BUILTINS[name]
            case ast.Attribute(value=owner, attr=attr) if attr in _METHODS:
                function = getattr(self._expr(owner, at), attr)
            case ast.Attribute() | ast.Name() if not expr.args and not expr.keywords:
                function = self._expr(expr.func, at)
                name = getattr(function, "__name__", "")
                if not (name.startswith("is_") and name.endswith("_available")):
                    raise Unknown
            case _:
                raise Unknown
        args = self._expr(ast.Tuple(expr.args), at)
        on_live = function in (hasattr, getattr) and args[0] is self.scene.live
        if on_live and args[1] in self.scene.hidden:
            raise Unknown
        return function(*args, **{str(k.arg): self._expr(k.value, at) for k in expr.keywords})

    def _turns(self, generators: list[ast.comprehension], at: _Place) -> Iterator[_Place]:
        first, *rest = generators
        for value in self._expr(first.iter, at):
            inner = replace(at, names={**at.names, **_destructured(first.target, value)})
            ways = [self._truth(test, inner) for test in first.ifs]
            if None in ways:
                raise Unknown
            if all(ways):
                yield from self._turns(rest, inner) if rest else [inner]

    # Names ----------------------------------------------------------------------------------

    def _name(self, name: str, at: _Place) -> Any:
        if name in at.names:
            return at.names[name]
        for node, iteration in self.scene.elements.items():
            target = getattr(node, "target", None)
            if target is not None and name in bound_in(target):
                return self._loop_variable(node, iteration, name, at)
        assigned = self._assigned(name, at)
        if assigned is not None:
            return assigned[0]
        takes = Signature.of(at.frame.function)
        if name in takes.names:
            return self._parameter(name, at.frame)
        if name in (takes.rest, takes.options):
            raise Unknown
        module = sys.modules.get(self.scene.file.name)
        if module is not None and name in vars(module):
            return vars(module)[name]
        if name in _BUILTINS:
            return _BUILTINS[name]
        raise Unknown

    def _loop_variable(
        self, node: ast.AST, iteration: int | ast.expr, name: str, at: _Place
    ) -> Any:
        assert isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
        place = _Place(at.frame, position(node.iter), {})
        if isinstance(iteration, ast.expr):
            return _destructured(node.target, self._expr(iteration, place))[name]
        values = self._expr(node.iter, place)
        values = values if isinstance(values, range) else list(values)
        return _destructured(node.target, values[iteration])[name]

    def _parameter(self, name: str, frame: Frame) -> Any:
        function = frame.function
        if frame.call is not None and frame.parent is not None:
            if _is_self(function, name, frame.call):
                return self.scene.live
            given = argument_of(function, frame.call, name)
            if given is None:
                raise Unknown
            outer = frame.parent if given in ast.walk(frame.call) else frame
            return self._expr(given, _Place(outer, position(frame.call), {}))
        if name == first_parameter(function):
            return self.scene.live
        if name in self.scene.stored:
            return getattr(self.scene.live, self.scene.stored[name])
        if name == "config" and hasattr(self.scene.live, "config"):
            return self.scene.live.config
        return self.scene.argument(name)

    def _assigned(self, name: str, at: _Place) -> tuple[Any] | None:
        """What a local variable was last given before this place; None where nothing was."""
        found: tuple[Any] | None = None
        unknown = False
        bound = assignments(at.frame.function, name)
        match [each.statement for each in bound]:
            case [ast.ImportFrom() as imported]:  # wherever it is read, it was reached
                return (self._given(imported, name, at),)
        for assignment in bound:
            statement = assignment.statement
            if position(statement) >= at.before or at.inside(statement):
                continue
            place = _Place(at.frame, position(statement), at.names)
            ways = [(self._truth(test, place), sense) for test, sense in assignment.guards]
            if any(way is not None and way is not sense for way, sense in ways):
                continue
            if any(way is None for way, _ in ways):
                unknown = True
                continue
            if assignment.looped:
                raise Unknown
            found, unknown = (self._given(statement, name, place),), False
        if unknown:
            raise Unknown
        return found

    def _given(self, statement: ast.stmt, name: str, place: _Place) -> Any:
        match statement:
            case ast.Assign(targets=targets, value=value):
                target = next(t for t in targets if name in bound_in(t))
                if isinstance(target, ast.Name):
                    return self._expr(value, place)
                return _destructured(target, self._expr(value, place))[name]
            case ast.AnnAssign(value=ast.expr() as value):
                return self._expr(value, place)
            case ast.ImportFrom(names=names):
                module = sys.modules.get(self.scene.file.resolve_import(statement))
                own = next(n.name for n in names if name == (n.asname or n.name))
                return getattr(module, own)
        raise Unknown


@dataclass(frozen=True)
class _Place:
    frame: Frame
    before: tuple[int, int]
    names: Mapping[str, Any]

    def inside(self, statement: ast.stmt) -> bool:
        return position(statement) <= self.before < end_position(statement)


def _destructured(target: ast.expr, value: Any) -> dict[str, Any]:
    if isinstance(target, ast.Name):
        return {target.id: value}
    if isinstance(target, ast.Tuple | ast.List) and not any(
        isinstance(e, ast.Starred) for e in target.elts
    ):
        names: dict[str, Any] = {}
        for inner, part in zip(target.elts, list(value), strict=True):
            names |= _destructured(inner, part)
        return names
    raise Unknown


def _is_self(function: ast.FunctionDef, name: str, call: ast.Call) -> bool:
    first = first_parameter(function)
    return name == first == "self" and isinstance(call.func, ast.Attribute)


def iterations(loops: tuple[Loop, ...], numbers: list[int]) -> dict[ast.AST, int | ast.expr]:
    """Which iteration of each loop made the element with these numbers, as far as that is known."""
    found: dict[ast.AST, int | ast.expr] = {x.node: x.value for x in loops if x.value is not None}
    turning = [x for x in loops if x.value is None]
    if len(turning) == len(numbers):
        for loop, number in zip(turning, numbers, strict=True):
            iteration = loop.iteration(number)
            if iteration is not None:
                found[loop.node] = iteration
    return found
