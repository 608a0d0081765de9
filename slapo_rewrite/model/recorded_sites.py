"""Construction sites in functions that nobody follows: where Python was when it made a module.

A builder is called by a schedule, by another builder or as a lambda, and what it makes is given to
a class. Its text alone does not say which element of which list an expression makes. The calls that
were noted while the model was built do, with what the counters of the loops around them were.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.dataflow import bound_in, names_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import counter_of
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.groups import grouped
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.construction_sites import RECORDED, Site
from slapo_rewrite.model.constructor_values import Frame, Loop
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node, is_container

_Loop = ast.comprehension | ast.For | ast.While


@dataclass(frozen=True, eq=False)
class _Call:
    """A call, with what is around it."""

    node: ast.Call
    # The function that carries it out; a lambda as one that returns its value.
    function: ast.FunctionDef
    loops: tuple[_Loop, ...]  # the loops around it there, outermost first
    local: frozenset[str]  # what is bound in the functions around it
    class_name: str  # the class in whose body it stands; '' if in none


def recorded_site(sources: Sources, node: Node) -> Site | None:
    """The call of a module's class that Python passed through when it made the module.

    Its path begins at the nearest module above that has the function as a method, or else at the
    root. Of the numbers in it those are a `*` that a loop around the call counts, in all of the
    lists that the call fills. None where that was not noted, where what is called there is not
    named as a class, where it stands in no function, or in a file that is not rewritten, and for
    all but the first path of a module.
    """
    scope = construction_calls.scope_of(node.live, 0)
    name = str(scope.get("__name__")) if scope is not None else ""
    outside = name in sources.editable or name.partition(".")[0] in ("", "torch")
    file = None if outside else sources.file_named(name)
    call = _call_of(file, construction_calls.stack_of(node.live)) if file is not None else None
    if scope is None or file is None or call is None:
        return None
    made = _Made(sources, node, file, call)
    if node.parent is None or node.path not in made.modules:
        return None
    counted, frame = made.counted(), Frame(call.function)
    site = Site(
        file=file,
        class_name=made.class_name,
        function=call.function,
        path=made.pattern(counted.values()),
        kind=RECORDED,
        statement=file.statement_of(call.node),
        value=call.node,
        steps=tuple(
            Loop(loop, frame, _counter(loop), first=0 if loop in counted else None)
            for loop in call.loops
        ),
        frame=frame,
        order=0,
        container=node.is_container,
    )
    named = site.partial.args[0] if site.partial is not None else call.node.func
    # Another module may stand in the place of what was made there, so its class does not matter.
    is_class = isinstance(_value(named, scope), type)
    return site if is_class and names_in(named).isdisjoint(call.local) else None


def _value(named: ast.expr, scope: Mapping[str, Any]) -> object:
    """What a dotted name means; None of other expressions."""
    if isinstance(named, ast.Attribute):
        return getattr(_value(named.value, scope), named.attr, None)
    return scope.get(named.id) if isinstance(named, ast.Name) else None


def _counter(loop: _Loop) -> str | None:
    return None if isinstance(loop, ast.While) else counter_of(loop.target, loop.iter)


class _Made:
    """What a call made, in one model."""

    def __init__(self, sources: Sources, node: Node, file: SourceFile, call: _Call) -> None:
        self.root, self.path, self.file, self.call = node.root.live, node.path, file, call
        # The modules that the call made, by path.
        self.modules = sources.made_at(node.root, construction_calls.stack_of(node.live)[0])
        self.start, self.class_name = self._held(node.path)

    def _held(self, path: str) -> tuple[int, str]:
        """How long the path of the holder of a module is, and the class that holds the call."""
        segments = path.split(".")
        for length in range(len(segments) - 1, -1, -1):
            for cls in type(self.root.get_submodule(".".join(segments[:length]))).__mro__:
                if (cls.__module__, cls.__name__) == (self.file.name, self.call.class_name):
                    return length, cls.__name__
        return 0, type(self.root).__name__

    def pattern(self, counted: Collection[int]) -> str:
        """The path of the module below its holder, with `*` for numbers that are counted."""
        numbered = enumerate(self.path.split("."))
        return ".".join("*" if n in counted else s for n, s in numbered if n >= self.start)

    def counted(self) -> dict[_Loop, int]:
        """The loops that count elements of lists, and which segment of the path each counts.

        The same loops for all that the call made, wherever that is.
        """
        alike = grouped((with_wildcards(path), path) for path in self.modules)
        found: dict[_Loop, int] = {}
        last = {shape: self._held(paths[0])[0] - 1 for shape, paths in alike.items()}
        for loop in self.call.loops:
            counts = {s: self._counts(_counter(loop), p, last[s] + 1) for s, p in alike.items()}
            places = {shape: place for shape, place in counts.items() if place is not None}
            if len(places) == len(alike):
                last, found[loop] = places, places[with_wildcards(self.path)]
        return found

    def _counts(self, counter: str | None, paths: Sequence[str], start: int) -> int | None:
        """The first number in some paths that is what a loop's counter was, for all of them."""
        scopes = [construction_calls.scope_of(self.modules[path], 0) or {} for path in paths]
        turns = [str(scope.get(counter)) if counter else "" for scope in scopes]
        numbers = list(zip(*(path.split(".") for path in paths), strict=True))
        fitting = (n for n in range(start, len(numbers)) if list(numbers[n]) == turns)
        return next((n for n in fitting if self._is_list(paths[0], n)), None)

    def _is_list(self, path: str, place: int) -> bool:
        holder = ".".join(path.split(".")[:place])
        return is_container(type(self.root.get_submodule(holder)))


def _call_of(file: SourceFile, stack: construction_calls.Stack) -> _Call | None:
    """The innermost call of a stack, where it is one of a file's, in a function."""
    if not stack:
        return None
    known, end = _known.setdefault(file, {}), stack[0][1][2:]
    if end not in known:
        node = file.calls.get(end)
        known[end] = _in_function(file, node) if node is not None else None
    found = known[end]
    is_there = found is not None and construction_calls.depth(file, found.node, stack) == 0
    return found if is_there else None


# The calls of a file that were asked about, by where they end.
_known: WeakKeyDictionary[SourceFile, dict[tuple[int, int], _Call | None]] = WeakKeyDictionary()


def _in_function(file: SourceFile, node: ast.Call) -> _Call | None:
    """A call with what is around it; None where it stands in no function."""
    function: ast.FunctionDef | None = None
    class_name: str | None = None
    loops: list[_Loop] = []
    local: set[str] = set()
    for inner, outer in file.around(node):
        loops = [*_turning(inner, outer), *loops] if function is None else loops
        if isinstance(outer, ast.ClassDef | ast.AsyncFunctionDef) and function is None:
            return None
        if isinstance(outer, ast.ClassDef) and class_name is None:
            class_name = outer.name if file.classes.get(outer.name) is outer else ""
        elif isinstance(outer, ast.FunctionDef | ast.Lambda):
            made = _as_function(outer) if isinstance(outer, ast.Lambda) else outer
            if inner in (outer.body, *made.body):  # and not computed where it is defined
                function = function or made
                local |= {*parameters(outer), *bound_in(outer)}
    if function is None:
        return None
    return _Call(node, function, tuple(loops), frozenset(local), class_name or "")


def _turning(inner: ast.AST, outer: ast.AST) -> list[_Loop]:
    """The loops that carry a part out again for where it stands in something."""
    match outer:
        case ast.For(body=body) if inner in body:
            return [outer]
        case ast.While(orelse=last) if inner not in last:
            return [outer]
        case ast.comprehension(ifs=tests) if inner in tests:
            return [outer]
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            turns: list[_Loop] = [*outer.generators]
            return turns[: turns.index(inner)] if isinstance(inner, ast.comprehension) else turns
    return []


@functools.lru_cache(maxsize=4096)
def _as_function(made: ast.Lambda) -> ast.FunctionDef:
    """A lambda as a function that returns its value."""
    value = ast.copy_location(ast.Return(made.body), made.body)
    return ast.copy_location(ast.FunctionDef("<lambda>", made.args, [value], []), made)
