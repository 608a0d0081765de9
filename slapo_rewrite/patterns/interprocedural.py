"""Looks through calls: what the called function returns, and what it does besides."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from slapo_rewrite.code.arguments import Signature, first_parameter
from slapo_rewrite.code.effects import is_expression, own_calls, plain_calls, stored, writes
from slapo_rewrite.code.facts import names_of
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.patterns.known_ops import Given, Listed
from slapo_rewrite.patterns.value_graph import Graph, Use, Value

MAX_DEPTH = 4


@dataclass(frozen=True, eq=False)
class Called:
    """A function of a source file that a call reaches."""

    value: Value  # the call
    file: SourceFile  # the file of the function
    function: ast.FunctionDef
    given: Given  # the arguments
    owner: str | None = None  # the path of the module whose method it is; None for a plain function


class Through(Listed):
    """Follows what is called."""

    def run(self, function: ast.FunctionDef) -> None:
        """Follows the statements of a function."""
        raise NotImplementedError

    def expr(self, node: ast.expr) -> Value:
        """What an expression gives."""
        raise NotImplementedError

    def hold(self, name: str, value: Value) -> None:
        """Binds a local name, or an attribute as `self.path`."""
        raise NotImplementedError

    def _inner(self, value: Value, file: SourceFile) -> Self:
        """A builder for what is reached through a call; nothing in it counts as a use."""
        return type(self)(
            Graph(file, None),
            self.facts,
            self.resolve if file is self.file else names_of(file),
            through=value,
            depth=self.depth + 1,
            pattern=self.pattern,
        )

    def look_into(self, called: Called, effects: bool = True) -> None:
        """Has a call be looked through, and notes what it does besides."""
        called.value.look_through = lambda: self._through(called)
        if effects:
            self._effects(called)

    def _through(self, called: Called) -> Value | None:
        """What a function returns for these arguments; None where that is not one value."""
        if not is_expression(called.function):
            return None
        inner = self._followed(called)
        if inner is None or inner.graph.mutations or inner.stores:
            return None
        (returned,) = inner.graph.returned
        used = {id(each) for each in returned.walk()}
        idle = (each for each in inner.graph.values if id(each) not in used)
        return returned if all(each.pure and not each.random for each in idle) else None

    def _followed(self, called: Called) -> Self | None:
        """The builder that has followed a function; None where its arguments are not known."""
        if self.depth >= MAX_DEPTH or any(key in ("*", "**") for key, _ in called.given):
            return None
        inner = self._inner(called.value, called.file)
        if not inner.bind_parameters(called.function, called.given, called.owner):
            return None
        inner.run(called.function)
        return inner

    def _effects(self, called: Called) -> None:
        """Notes what a call writes to: its arguments' memory, attributes of the module."""
        value = called.value
        reached = list(self._reached(called.file, called.function, called.owner))
        for method, path in reached:
            for name in stored(method) if path is not None else ():
                # Not what the call gives, whose name it would pass for.
                left = self.make(
                    "member", [("input", value)], value.node, literal=name, pure=False, lazy=True
                )
                self.hold(f"self.{path}.{name}" if path else f"self.{name}", left)
        if not any(writes(inner) for inner, _ in reached):
            return
        inner = self._followed(called)
        if inner is None:
            for _, argument in called.given:
                self.overwrite(argument, value.node)
        else:
            for mutation in inner.graph.mutations:
                self.overwrite(mutation.target, value.node)

    def _reached(
        self, file: SourceFile, function: ast.FunctionDef, owner: str | None
    ) -> Iterator[tuple[ast.FunctionDef, str | None]]:
        """A function, the functions of its file and the methods of its module that it calls.

        With each method comes the path of its module, with each plain function None.
        """
        pending: list[tuple[SourceFile, ast.FunctionDef, str | None]] = [(file, function, owner)]
        seen: set[int] = set()
        while pending:
            home, each, path = pending.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            yield each, path
            named = (home.functions.get(name) for name in plain_calls(each))
            pending += [(home, inner, None) for inner in named if inner is not None]
            located = (
                (self.facts.method(path, n) for n in own_calls(each)) if path is not None else ()
            )
            pending += [(*place, path) for place in located if place is not None]

    def bind_parameters(self, function: ast.FunctionDef, given: Given, owner: str | None) -> bool:
        """Gives a call's arguments to the parameters of a function; False where they do not fit."""
        takes = Signature.of(function, bound=owner is not None)
        bound = takes.bind(given)
        if bound.rest or bound.extra or bound.repeated:
            return False
        me = first_parameter(function)
        if owner is not None and me is not None:
            self.scope[me] = self.leaf("self", owner, function)
        for star, literal in ((function.args.vararg, ()), (function.args.kwarg, None)):
            if star is not None:  # what is left over for them is nothing
                self.scope[star.arg] = self.make("rest", [], star, literal=literal)
        for name in bound.missing:
            if name not in takes.defaults:
                return False
            bound.given[name] = self.expr(takes.defaults[name])
        self.scope |= bound.given
        return True

    def read(self, value: Value, node: ast.AST, why: str) -> None:
        """Notes that a statement reads a value."""
        self.use(value, Use(node, None, why, self.next()))
