"""Divides a flat `forward` into pieces at the cuts, with the values that each reads and binds."""

from __future__ import annotations

import ast
import logging
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slapo_rewrite import errors
from slapo_rewrite.code.liveness import breaks, local_names, parts_of
from slapo_rewrite.code.names import self_path
from slapo_rewrite.code.subgraphs import MUTATING
from slapo_rewrite.code.text import accessor
from slapo_rewrite.directive import Directive
from slapo_rewrite.errors import Span
from slapo_rewrite.stages.environment import Environment, rounds_of
from slapo_rewrite.stages.flat import Flat
from slapo_rewrite.stages.loops import loop_over, path_of, sliced
from slapo_rewrite.stages.set_apart import is_path, list_of

# A value: its name and the number of the piece that binds it; -1 for an argument of `forward`.
Version = tuple[str, int]
ARGUMENT = -1
# The logging methods of a logger.
MESSAGES = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")
# Converts a number of layers of a list before a cut to a model of another depth.
Depth = Callable[[str, int], int]


@dataclass(frozen=True)
class Cut:
    """A module that a stage ends after."""

    path: str
    cause: Directive  # the directive that asks
    target: str  # the library that runs the stages, one of `TARGETS`
    may_move: bool = False  # whether the stage may end elsewhere if it cannot end there
    # In that case, the modules that all stages end after instead.
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layers:
    """Some iterations of a loop over a list of layers."""

    listed: str  # the text of the list
    first: int  # the first layer
    stop: int | None  # the layer after the last one; None for all remaining layers


@dataclass(frozen=True)
class Piece:
    """A statement, or some iterations of a loop."""

    text: str  # its source; for a loop, that of the whole loop
    at: Span  # its origin
    stage: int  # the stage that it belongs to
    # Its iterations of the loop; None for all of them, and for other statements.
    layers: Layers | None = None
    reads: tuple[Version, ...] = ()  # the values that it needs
    binds: tuple[str, ...] = ()  # the names that it binds and that are read later

    @property
    def node(self) -> ast.stmt:
        """The statement as parsed."""
        return ast.parse(self.text).body[0]

    def source(self, depth: Depth | None = None) -> str:
        """The text; a loop has its iterations only, or those for a model of another depth."""
        if self.layers is None:
            return self.text
        first, stop = self.layers.first, self.layers.stop
        if depth is not None:
            first = depth(self.layers.listed, first)
            stop = None if stop is None else depth(self.layers.listed, stop)
        return sliced(self.text, first, stop, self.binds)


@dataclass(frozen=True)
class Program:
    """A flat `forward` in pieces."""

    parameters: tuple[str, ...]  # its parameters
    pieces: tuple[Piece, ...]  # the statements
    loss: str  # the expression of the loss
    loss_reads: tuple[Version, ...]  # the values that the loss reads
    stages: int  # the number of stages


def divided(flat: Flat, cuts: Sequence[Cut], model: Any, world: Mapping[str, Any]) -> Program:
    """Cuts a flat `forward`."""
    statements = [ast.parse(line.text).body[0] for line in flat.lines]
    ends: dict[int, dict[int | None, Cut]] = {}
    for cut in cuts:
        number, layer = place_of(cut, statements, flat, model)
        same = ends.setdefault(number, {})
        if layer in same:
            raise errors.CannotCut(
                f"a stage already ends after `{cut.path}`",
                at=cut.cause.at,
                also=[c.at for c in [same[layer].cause] if c.at and c is not cut.cause],
                hint="cut once",
            )
        same[layer] = cut
    pieces: list[Piece] = []
    stage = 0
    for number, line in enumerate(flat.lines):
        after = ends.get(number, {})
        inside = sorted(layer for layer in after if layer is not None)
        first = 0
        for stop in inside:
            layers = Layers(list_of(statements[number]), first, stop)
            pieces.append(Piece(line.text, line.at, stage, layers))
            first, stage = stop, stage + 1
        rest = Layers(list_of(statements[number]), first, None) if inside else None
        pieces.append(Piece(line.text, line.at, stage, rest))
        stage += None in after
    return linked(flat, pieces, stage + 1, cuts[0].cause.at, world)


def _length(model: Any, listed: str) -> int | None:
    """The number of modules in a list; None if it is no list of modules with a plain path."""
    try:
        return len(model.get_submodule(path_of(listed)))
    except AttributeError:
        return None


def place_of(
    cut: Cut, statements: Sequence[ast.stmt], flat: Flat, model: Any
) -> tuple[int, int | None]:
    """The statement before a cut, and the number of the loop's iterations before it, if inside."""
    also = [cut.cause.at] if cut.cause.at else []

    def refused(message: str, number: int | None = None, hint: str | None = None) -> Exception:
        places = [*([flat.lines[number].at] if number is not None else []), *also]
        first = places[0] if places else None
        return errors.CannotCut(message, at=first, also=places[1:], hint=hint)

    def inside(statement: ast.stmt, number: int) -> Exception:
        kinds = {ast.For: "loop that is not over layers", ast.With: "`with` block"}
        message = f"`{cut.path}` is called inside a {kinds.get(type(statement), 'branch')}"
        return refused(message, number, "cut before or after the whole statement")

    parent, _, name = cut.path.rpartition(".")
    rounds = rounds_of(model.get_submodule(parent))
    if name in rounds:
        layer, total = rounds.index(name), len(rounds)
        loops = [
            (number, statement, loop)
            for number, statement in enumerate(statements)
            if (loop := loop_over(statement)) is not None
            and accessor(parent) in loop.lists
            and loop.first <= layer
            and not loop.ends_before(layer)
        ]
        for number, statement, loop in loops:
            if len(loops) > 1:
                raise refused(
                    f"`{cut.path}` is called in {len(loops)} loops: it is not clear which one to "
                    "cut",
                    loops[1][0],
                    "cut after another module",
                )
            if loop.is_last(layer, total):
                return number, None
            assert isinstance(statement, ast.For)
            if statement.orelse or breaks(statement):
                word = "`else`" if statement.orelse else "`break`"
                raise refused(
                    f"a loop with {word} cannot be divided: its later rounds may not run",
                    number,
                    "cut before or after the loop",
                )
            lengths = {_length(model, listed) for listed in loop.lists}
            if len(lengths) > 1:
                what = "are not all of modules" if None in lengths else "differ in length"
                raise refused(f"the lists of this loop {what}", number, "cut elsewhere")
            return number, layer + 1
    found = [
        (number, node)
        for number, statement in enumerate(statements)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and self_path(node.func) == cut.path
    ]
    if not found and (last := last_inside(cut.path, statements)) is not None:
        return last, None
    if not found and any(
        isinstance(n, ast.Call) and self_path(n.func) == cut.path
        for n in ast.walk(ast.parse(flat.loss))
    ):
        raise refused(f"only the loss follows `{cut.path}`", hint="remove the cut")
    if not found:
        for number, statement in enumerate(statements):
            for node in ast.walk(statement):
                if name in rounds and isinstance(node, ast.expr) and self_path(node) == parent:
                    if isinstance(statement, ast.With | ast.If):
                        raise inside(statement, number)
                    raise refused(
                        f"`{cut.path}` is not called in a loop over `{parent}`",
                        number,
                        "a stage ends between the rounds of `for layer in self.layers`, also with "
                        "`enumerate`, `zip` of such lists, `range(len(self.layers))` or a slice",
                    )
        raise refused(
            f"no stage can end after `{cut.path}`: training does not call it by this name",
            hint="cut after a module that `forward` calls as `self.name(...)`, or after a layer",
        )
    number, call = found[0]
    if len(found) > 1:
        raise refused(
            f"`{cut.path}` is called {len(found)} times: it is not clear which call to cut after",
            found[1][0],
            "cut after another module",
        )
    statement = statements[number]
    if hasattr(statement, "body"):
        raise inside(statement, number)
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and node is not call and call in ast.walk(node):
            called = ast.unparse(node.func)
            if is_path(node.func):
                raise refused(
                    f"the result of `{cut.path}` goes directly into `{called}(...)`",
                    number,
                    "bind it to a name first, on a separate line",
                )
    return number, None


def last_inside(path: str, statements: Sequence[ast.stmt]) -> int | None:
    """The last statement that calls a submodule of an inlined module.

    None if that statement passes the result directly to another module.
    """
    inside = f"{path}."
    for number, statement in reversed(list(enumerate(statements))):
        loop = loop_over(statement)
        if loop is not None and any(f"{path_of(each)}.".startswith(inside) for each in loop.lists):
            return number
        calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and is_path(n.func)]
        called = [f"{self_path(n.func)}." for n in calls]
        if any(each.startswith(inside) for each in called):
            return number if called[0].startswith(inside) else None
    return None


def linked(
    flat: Flat,
    pieces: Sequence[Piece],
    stages: int,
    cause: Span | None,
    world: Mapping[str, Any],
) -> Program:
    """The pieces, each with the values that it reads and binds."""
    function = made_of([piece.text for piece in pieces], flat.loss, flat.parameters)
    current: dict[str, int] = dict.fromkeys(flat.parameters, ARGUMENT)
    found = []
    statements = function.body[:-1]
    *parts, last = parts_of(function, [[statement] for statement in function.body])
    read_later = [set(part.inputs) for part in (*parts, last)]
    names = local_names(function)
    for number, (piece, statement) in enumerate(zip(pieces, statements, strict=True)):
        for name in altered_in(statement, {n: v for n, v in world.items() if n not in names}):
            if name not in names:
                raise errors.CannotCut(
                    f"`{name}` is no local name, and writes to it do not reach other stages",
                    at=piece.at,
                    also=[cause],
                    hint="hand it on as a value",
                )
        part = parts[number]
        reads = tuple((n, current[n]) for n in part.inputs if n in current)
        later = set().union(*read_later[number + 1 :])
        altered = [n for n in altered_in(statement, {}) if n in current and n in later]
        binds = tuple(dict.fromkeys([*part.outputs, *altered]))
        found.append(replace(piece, reads=reads, binds=binds))
        current.update(dict.fromkeys(binds, number))
    loss_reads = tuple((n, current[n]) for n in last.inputs if n in current)
    return Program(flat.parameters, tuple(found), flat.loss, loss_reads, stages)


def made_of(texts: Iterable[str], returned: str, parameters: Iterable[str]) -> ast.FunctionDef:
    """The syntax tree of a `forward` with these statements and returned expression."""
    text = f"def forward(self, {', '.join(parameters)}):\n"
    body = textwrap.indent("\n".join([*texts, f"return {returned}"]), "    ")
    (function,) = ast.parse(text + body).body
    assert isinstance(function, ast.FunctionDef)
    return function


def altered_in(statement: ast.stmt, world: Mapping[str, Any]) -> Iterator[str]:
    """The names whose values a statement mutates: `mapping[key] = x`, `x = found.pop()`.

    `world` has the names of the model's file, by which calls that only log are recognised.
    """
    for node in ast.walk(statement):
        base: ast.expr | None = None
        match node:
            case (
                ast.Subscript(value=value, ctx=ast.Store() | ast.Del())
                | ast.Attribute(value=value, ctx=ast.Store())
            ):
                base = value
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=value) as called)):
                base = None if is_message(called, world) else value
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in MUTATING:
                base = value
        while isinstance(base, ast.Subscript | ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id != "self":
            yield base.id


def is_message(called: ast.Attribute, world: Mapping[str, Any]) -> bool:
    """Whether a function only warns, logs or asserts.

    A logger's method must be that of the standard library or of transformers (`warning_once`).
    """
    owner = Environment(None, None, "", {}, world, {}).global_at(called.value)
    function = getattr(owner, called.attr, None)
    if isinstance(owner, logging.Logger | logging.LoggerAdapter):
        own = getattr(function, "__module__", "") in ("logging", "transformers.utils.logging")
        return own and called.attr.removesuffix("_once") in MESSAGES
    return function is warnings.warn or function is torch._assert
