"""Searches the functions of a module for patterns; returns matches and near misses."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

from slapo_rewrite import errors
from slapo_rewrite.code.facts import Facts, NoFacts, Property, Submodule
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.sinking import Sunk
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.patterns.graph_of_function import chain_graph, graph_of
from slapo_rewrite.patterns.legality import Judge
from slapo_rewrite.patterns.matching import Bindings, Matcher, Mismatch, outermost
from slapo_rewrite.patterns.pattern import Pattern
from slapo_rewrite.patterns.replacement import Replaced, places, text_of
from slapo_rewrite.patterns.value_graph import Graph, Value

SEQUENTIAL = "torch.nn.Sequential"


@dataclass(frozen=True, eq=False)
class Scope:
    """A function of a module to be searched."""

    path: str  # the module's path
    function: str  # the function's name
    graph: Graph  # its value graph


@dataclass(frozen=True, eq=False)
class Match:
    """A match of a pattern."""

    path: str  # the module's path
    function: str  # the function of the module's class or file: usually `forward`
    file: SourceFile  # the file of the function
    values: dict[str, Value]  # the value of each of the pattern's parameters
    operands: dict[str, str]  # the text of each of these at the place of the call
    nodes: tuple[Value, ...]  # the computed values in order; the last is a result
    replaced: Replaced  # the text that one call would replace
    results: tuple[Value, ...]  # the values that the pattern returns: one, or those of its tuple
    # Statements to sink into the arms of a branch first, if one with a known condition intervenes.
    drawn: Sunk | None = None
    # Checks extensions of the match; None for a call that a predicate found.
    judge: Judge | None = None

    def with_call(self, name: str) -> Match | None:
        """The match extended by the call that computes an operand, or None if that is not legal.

        The operand becomes the call's only argument.
        """
        call, judge = self.values[name], self.judge
        if judge is None or call.site is not call or [key for key, _ in call.given] != [""]:
            return None
        operand = judge.pattern.wildcards[name]
        wanted = replace(operand, operation=call.operation)
        held = {**judge.pairing.held, wanted: call, operand: call.given[0][1]}
        pairing = replace(judge.pairing, held=held, nodes=(call, *judge.pairing.nodes))
        wider = Judge(judge.pattern, judge.graph, pairing, judge.results, judge.place)
        if wider.stop() is not None or not wider.replaced.whole:
            return None
        scope = Scope(self.path, self.function, judge.graph)
        return replace(_match(scope, judge.pattern, wider), drawn=self.drawn)

    @property
    def root(self) -> Value:
        """The result; of several, the one at the call's place, or their tuple."""
        return self.nodes[-1]

    @property
    def calls(self) -> list[str]:
        """The paths, relative to the module, of the submodules that it calls."""
        paths = [node.called for node in self.nodes if node.called is not None]
        return list(dict.fromkeys(paths))

    @property
    def lines(self) -> list[int]:
        """The lines of the match in the file, 1-based."""
        sites = [node.site.node for node in self.nodes]
        return sorted({line for site in sites for line in _lines(site)})

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The character offsets of each operation in the file, in order."""
        sites = [node.site for node in self.nodes]
        return sorted({site.file.span(site.node) for site in sites if site.file is self.file})

    @property
    def statements(self) -> list[ast.stmt]:
        """The statements that compute it."""
        found = [*(node.site.statement for node in self.nodes), *self.replaced.removed]
        return list(dict.fromkeys(s for s in found if s is not None))

    @property
    def place(self) -> errors.Span:
        """The place of the result for a diagnostic."""
        return self.file.at(self.root.site.node)

    def __str__(self) -> str:
        lines = self.lines
        numbers = f"{lines[0]}-{lines[-1]}" if lines[0] != lines[-1] else f"{lines[0]}"
        given = ", ".join(f"{name} = {text}" for name, text in self.operands.items())
        where = f"{self.path or 'the model'}, {self.function}, line {numbers}"
        if self.drawn is not None:
            test = self.file.segment(self.drawn.branch.test)
            where += f", through `if {test}`"
        return f"{where}: {given}" if given else where


@dataclass(frozen=True)
class Miss:
    """The nearest miss of a pattern: its place, and what stopped it."""

    path: str  # the module's path
    function: str
    pattern: str  # the pattern's name
    size: int  # the number of the pattern's operations
    stop: Mismatch  # what stopped it

    def render(self) -> str:
        """The reason, with the line of the model and that of the pattern."""
        stop = self.stop
        where = f"`{self.path}`" if self.path else "the model"
        head = f"`{self.pattern}` is not found in {where}, {self.function}: {stop.reason}"
        head += f" ({stop.matched} of {self.size} operations found)"
        return errors.excerpt(head, self.places, stop.hint)

    @property
    def places(self) -> list[errors.Span]:
        """The places: in the model, then in the pattern."""
        spots = (*self.stop.spots, *([self.stop.wanted] if self.stop.wanted else []))
        return [spot.file.at(spot.node, spot.note) for spot in spots]


@dataclass(frozen=True, eq=False)
class Matches(Sequence[Match]):
    """The results of a search: a sequence of matches, false if empty."""

    found: tuple[Match, ...]  # the matches, in the order of the tree and of the text
    misses: tuple[Miss, ...] = ()  # the nearest miss of each module without a match
    first: str = ""  # the pattern's first parameter
    branched: tuple[Scope, ...] = ()  # the functions in which a branch may have prevented a match

    @overload
    def __getitem__(self, index: int) -> Match: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Match]: ...
    def __getitem__(self, index: int | slice) -> Match | Sequence[Match]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    @property
    def nearest(self) -> Miss | None:
        """The miss that came furthest."""
        return max(self.misses, key=lambda miss: miss.stop.reach, default=None)

    @property
    def groups(self) -> list[tuple[Match, ...]]:
        """Groups of matches with the same operand, such as query, key and value projections."""
        groups: dict[tuple[object, ...], list[Match]] = {}
        for match in self.found:
            operand = match.values.get(self.first)
            if operand is not None and operand.operation != "constant":
                key = (match.path, match.function, id(operand))
                groups.setdefault(key, []).append(match)
        return [tuple(group) for group in groups.values() if len(group) > 1]

    def __str__(self) -> str:
        if self.found:
            return "\n".join(map(str, self.found))
        return self.nearest.render() if self.nearest else "nothing found"

    def __repr__(self) -> str:
        return f"<{len(self.found)} matches>"


@dataclass(frozen=True)
class CallSite:
    """A call, for a predicate."""

    operation: str  # its canonical name: `gelu`, `matmul`, `softmax`
    path: str  # the relative path of the called submodule; '' for a function
    # The text of each argument, by parameter name if known.
    arguments: dict[str, str] = field(default_factory=dict)
    line: int = 1  # its line in the file, 1-based


def scopes_of(path: str, facts: Facts) -> list[Scope]:
    """The functions to search: a module's `forward`, and methods and functions that it mentions."""
    own = facts.look("")
    if isinstance(own, Submodule) and own.cls == SEQUENTIAL:
        places = [place for name in own.children if (place := facts.place(name)) is not None]
        if not places:
            return []
        file, node = places[-1]
        return [Scope(path, "forward", chain_graph(file, node, facts, own))]
    if isinstance(own, Submodule) and own.cls.startswith("torch.nn."):
        return []
    found: dict[str, Scope] = {}
    pending = [("forward", True)]
    home: SourceFile | None = None
    while pending:
        name, method = pending.pop(0)
        if name in found:
            continue
        if method:
            located = None if facts.look(name) == Property() else facts.method("", name)
        else:
            located = (home, home.functions[name]) if home and name in home.functions else None
        if located is None:
            continue
        home = home or located[0]
        graph = graph_of(*located, facts if method else NoFacts(), method=method)
        found[name] = Scope(path, name, graph)
        pending += _named(*located)
    return list(found.values())


def _named(file: SourceFile, function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """The methods and functions of the file that a function mentions, in the order of the text."""
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Load()):
                yield name, True
            case ast.Name(id=name, ctx=ast.Load()) if name in file.functions:
                yield name, False


def find_pattern(pattern: Pattern, scopes: Sequence[Scope]) -> Matches:
    """All matches of a pattern in some functions."""
    found: list[Match] = []
    misses: list[Miss] = []
    branched: list[Scope] = []
    for path, group in itertools.groupby(scopes, key=lambda scope: scope.path):
        here: list[Match] = []
        near: list[Miss] = []
        for scope in group:
            matcher = Matcher(pattern, scope.graph)
            here += _matches(matcher, scope)
            branched += [scope] if matcher.branched else []
            if matcher.nearest is not None:
                near.append(Miss(path, scope.function, pattern.name, pattern.size, matcher.nearest))
        found += here
        if near and not here:
            misses.append(max(near, key=lambda miss: miss.stop.reach))
    first = next(iter(pattern.parameters), "")
    return Matches(tuple(found), tuple(misses), first, tuple(branched))


def _matches(matcher: Matcher, scope: Scope) -> Iterator[Match]:
    taken: set[int] = set()
    for root in matcher.starts():
        for pairing in matcher.at(root):
            judge = _judged(matcher, scope.graph, pairing)
            if judge is not None and taken.isdisjoint(map(id, judge.nodes)):
                taken.update(map(id, judge.nodes))
                yield _match(scope, matcher.pattern, judge)
                break


def _judged(matcher: Matcher, graph: Graph, pairing: Bindings) -> Judge | None:
    """The bindings at the best place for a call; None if there is no place."""
    results = [pairing.held[outermost(root, pairing)] for root in matcher.pattern.roots]
    partly: Judge | None = None
    for place in places(graph, results):
        judge = Judge(matcher.pattern, graph, pairing, results, place)
        stop = judge.stop()
        if stop is not None:
            matcher.stop(stop)
        elif judge.replaced.whole:
            return judge
        else:
            partly = partly or judge
    return partly


def _match(scope: Scope, pattern: Pattern, judge: Judge) -> Match:
    held = judge.pairing.held
    values = {name: held[wanted] for name, wanted in pattern.wildcards.items() if wanted in held}
    nodes = sorted(judge.nodes, key=lambda node: node.order)
    nodes = [node for node in nodes if node is not judge.place.value]
    return Match(
        scope.path,
        scope.function,
        scope.graph.file,
        values,
        {name: judge.text(value) for name, value in values.items()},
        (*nodes, judge.place.value),
        judge.replaced,
        tuple(judge.results),
        judge=judge,
    )


def find_calls(scopes: Sequence[Scope], wanted: Callable[[str, CallSite], bool]) -> Matches:
    """All calls that a predicate accepts."""
    found = [
        match
        for scope in scopes
        for value in scope.graph.values
        if (isinstance(value.node, ast.Call) or value.called is not None)
        and not value.number
        and (match := _call_match(scope, value, wanted)) is not None
    ]
    return Matches(tuple(found), (), "0")


def _call_match(
    scope: Scope, value: Value, wanted: Callable[[str, CallSite], bool]
) -> Match | None:
    given = value.given or value.arguments
    named = {key or str(number): v for number, (key, v) in enumerate(given)}
    held = scope.graph.names.get(value.statement, {}) if value.statement is not None else {}
    names = {
        id(v): name for name, v in held.items() if isinstance(v.node, ast.stmt) and "." not in name
    }
    texts = {name: names.get(id(v)) or text_of(v) for name, v in named.items()}
    name = value.operation.removeprefix("module ").removeprefix("call ")
    site = CallSite(name, value.called or "", texts, _lines(value.node)[0])
    if not wanted(scope.path, site):
        return None
    replaced = Replaced(value.node)
    return Match(
        scope.path, scope.function, scope.graph.file, named, texts, (value,), replaced, (value,)
    )


def path_predicate(regex: re.Pattern[str], base: str) -> Callable[[str, CallSite], bool]:
    """A predicate for calls of submodules whose path, relative to a module, matches a regex.

    As in Slapo, the regex must match at the beginning and need not reach the end.
    """

    def wanted(path: str, call: CallSite) -> bool:
        inner = path[len(base) :].lstrip(".") if base else path
        return bool(call.path and regex.match(joined_path(inner, call.path)))

    return wanted


def _lines(node: ast.AST) -> range:
    first = getattr(node, "lineno", 1)
    return range(first, (getattr(node, "end_lineno", None) or first) + 1)
