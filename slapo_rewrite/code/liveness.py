"""Liveness analysis: what statements read and bind, and what the rest of a function needs of it.

Names of the module level and builtins are left out: a function can reach them from anywhere. Both
branches of a test count as possible.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from types import UnionType
from typing import Literal, NamedTuple

from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.blocks import Function, blocks, statements
from slapo_rewrite.code.dataflow import bound_in, parameters_in
from slapo_rewrite.code.text import bound_by

_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class Part:
    """The inputs and outputs of a run of statements, to make it a function of its own."""

    inputs: tuple[str, ...]  # local names whose values it needs, in the order of their first use
    # Local names that it binds and that are read afterwards, in the order of the text.
    outputs: tuple[str, ...]
    # Inputs and outputs that are not bound on every path; then the run cannot be extracted.
    unsure: tuple[str, ...]


def part_of(function: Function, run: Sequence[ast.stmt]) -> Part:
    """The inputs and outputs of consecutive statements of one block of a function.

    A name that only some paths through the run bind, and that is read later, is an input as well.
    """
    (part,) = parts_of(function, [run])
    return part


def parts_of(function: Function, runs: Iterable[Sequence[ast.stmt]]) -> list[Part]:
    """The inputs and outputs of several runs, with one analysis of the function."""
    names = local_names(function)
    backward = _Backward(names)
    live = backward.through(function)
    states = _Forward(names).through(function)
    found = []
    for run in runs:
        after = live[run[-1]] | _captured(function, run)
        bound = _first_places(run, _BINDING, names)
        outputs = [name for name in bound if name in after]
        needed = _Backward(names).before(run, frozenset(outputs))
        before = states.get(run[0], Bound())
        used = _first_places(run, ("read", "unbind", *_BINDING), names)
        inputs = [name for name in used if name in needed & before.maybe]
        there = Bound(before.sure | {n for n in needed if n not in before.maybe}, before.maybe)
        end = _Forward(names).end(run, there)
        unsure = {n for n in inputs if n not in before.sure}
        if end is not None:
            unsure |= {n for n in outputs if n not in end.sure or n in needed - before.maybe}
        # If a statement raises, outputs of earlier ones would be lost.
        unsure |= backward.caught.get(run[0], frozenset()) & set(outputs)
        found.append(Part(tuple(inputs), tuple(outputs), tuple(sorted(unsure))))
    return found


def live_after(function: Function, statement: ast.stmt) -> frozenset[str]:
    """The local names that are live after a statement, at any depth."""
    return _Backward(local_names(function)).through(function)[statement]


def bound_around(function: Function) -> dict[ast.stmt, tuple[Bound, Bound]]:
    """The bound local names before and after each statement that the next one is reached from.

    If a context manager suppresses exceptions, names that its body binds may be unbound after it.
    """
    forward = _Forward(local_names(function))
    before, after = forward.through(function), forward.after
    return {statement: (before[statement], bound) for statement, bound in after.items()}


def dead_behind(function: Function) -> dict[ast.stmt, frozenset[str]]:
    """The local names that are dead after each statement; inner functions keep theirs alive."""
    names = local_names(function)
    kept = _captured(function, [])
    live = _Backward(names).through(function)
    return {statement: names - needed - kept for statement, needed in live.items()}


def local_names(function: Function) -> frozenset[str]:
    """The names that a function binds, including its parameters."""
    bound: set[str] = set()
    elsewhere: set[str] = set()
    for statement in statements(function.body):
        if isinstance(statement, ast.Global | ast.Nonlocal):
            elsewhere.update(statement.names)
        bound.update(e.name for e in _own_events(statement) if e.kind != "read")
    given = parameters(function) if isinstance(function, ast.FunctionDef) else []
    return frozenset(bound.union(given) - elsewhere)


def binds(node: ast.stmt | ast.pattern) -> Set[str]:
    """The names that a statement or pattern binds itself, without the statements inside it."""
    events = _own_events(node) if isinstance(node, ast.stmt) else _events(node)
    return {event.name: None for event in events if event.kind in _BINDING}.keys()


def reads(node: ast.AST) -> set[str]:
    """The names that an expression or statement reads before it binds them itself."""
    found: set[str] = set()
    bound: set[str] = set()
    for event in _events(node):
        if event.kind == "read" and event.name not in bound:
            found.add(event.name)
        elif event.kind == "bind":
            bound.add(event.name)
    return found


# Events -------------------------------------------------------------------------------------------


class _Event(NamedTuple):
    """A name is read, bound, perhaps bound, or unbound."""

    kind: Literal["read", "bind", "maybe", "unbind"]
    name: str


def _events(node: ast.AST) -> Iterator[_Event]:
    """The events of an expression or simple statement, in the order of evaluation."""
    match node:
        case ast.Name(id=name, ctx=context):
            yield _Event(_KINDS[type(context)], name)
        case ast.Assign(targets=targets, value=value):
            yield from _all(value, *targets)
        case ast.AnnAssign(target=target, value=value):
            if value is not None:
                yield from _all(value, target)
        case ast.AugAssign(target=target, value=value):
            if isinstance(target, ast.Name):
                yield _Event("read", target.id)
            yield from _all(value, target)
        case ast.NamedExpr(target=target, value=value):
            yield from _all(value, target)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield from _events(test)
            yield from _perhaps(_all(body, orelse))
        case ast.BoolOp(values=[first, *others]):
            yield from _events(first)
            yield from _perhaps(_all(*others))
        case ast.Lambda(args=args, body=body):
            yield from _all(*args.defaults, *(d for d in args.kw_defaults if d))
            own = parameters_in(args)
            yield from (e for e in _events(body) if e.kind == "read" and e.name not in own)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            yield from _comprehension(node)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            args = node.args
            yield from _all(*node.decorator_list, *args.defaults, *filter(None, args.kw_defaults))
            yield from (_Event("read", name) for name in sorted(_free(node)))
            yield _Event("bind", node.name)
        case ast.ClassDef():
            yield from _all(*node.decorator_list, *node.bases, *(k.value for k in node.keywords))
            inner = [e for s in statements(node.body) for e in _own_events(s)]
            yield from (e for e in inner if e.kind == "read")
            yield _Event("bind", node.name)
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            for alias in names:
                yield _Event("bind", bound_by(alias))
        case (
            ast.MatchAs(name=str(name))
            | ast.MatchStar(name=str(name))
            | ast.MatchMapping(rest=str(name))
        ):
            yield from _all(*ast.iter_child_nodes(node))
            yield _Event("maybe", name)
        case _:
            yield from _all(*ast.iter_child_nodes(node))


_KINDS: dict[type, Literal["read", "bind", "unbind"]] = {
    ast.Load: "read",
    ast.Store: "bind",
    ast.Del: "unbind",
}
_BINDING = ("bind", "maybe")


def _all(*nodes: ast.AST) -> Iterator[_Event]:
    for node in nodes:
        yield from _events(node)


def _perhaps(events: Iterator[_Event]) -> Iterator[_Event]:
    for event in events:
        yield _Event("maybe", event.name) if event.kind == "bind" else event


def _comprehension(node: _Comprehension) -> Iterator[_Event]:
    first, *others = node.generators
    yield from _events(first.iter)
    own = bound_in(*(g.target for g in node.generators))
    elements = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
    inner = [*first.ifs, *(x for g in others for x in (g.iter, *g.ifs)), *elements]
    for event in _perhaps(_all(*inner)):
        if event.name not in own:
            yield event


def _free(function: Function) -> set[str]:
    """The names that an inner function reads from its enclosing function."""
    used = {e.name for s in statements(function.body) for e in _own_events(s) if e.kind == "read"}
    return used - local_names(function)


def _own_events(statement: ast.stmt) -> Iterator[_Event]:
    """The events of a statement without those of its blocks."""
    match statement:
        case ast.If(test=test) | ast.While(test=test):
            yield from _events(test)
        case ast.For() | ast.AsyncFor():
            yield from _all(statement.iter, statement.target)
        case ast.With(items=items) | ast.AsyncWith(items=items):
            yield from _all(*items)
        case ast.Try() | ast.TryStar():
            for handler in statement.handlers:
                if handler.type:
                    yield from _events(handler.type)
                if handler.name:
                    yield _Event("maybe", handler.name)
        case ast.Match(subject=subject, cases=cases):
            yield from _events(subject)
            for case in cases:
                yield from _perhaps(_all(case.pattern, *([case.guard] if case.guard else [])))
        case _:
            yield from _events(statement)


def _first_places(
    run: Sequence[ast.stmt], kinds: Collection[str], names: frozenset[str]
) -> list[str]:
    """The names with events of these kinds in a run, in the order of evaluation."""
    found = {
        event.name: None
        for statement in statements(run)
        for event in _own_events(statement)
        if event.kind in kinds and event.name in names
    }
    return list(found)


def _captured(function: Function, run: Sequence[ast.stmt]) -> set[str]:
    """The names that inner functions outside the run read: they see every change."""
    inside = {id(node) for statement in run for node in ast.walk(statement)}
    found: set[str] = set()
    for node in ast.walk(function):
        if node is function or id(node) in inside:
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= _free(node)
        elif isinstance(node, ast.Lambda):
            found |= reads(node)
    return found


# Backwards: which values are still needed ---------------------------------------------------------

_Live = frozenset[str]


@dataclass
class _Ends:
    """The live names at the targets of `continue`, `break` and exceptions."""

    resumed: _Live = frozenset()
    broken: _Live = frozenset()
    raised: _Live = frozenset()


class _Backward:
    """Computes live names, walking backwards."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.after: dict[ast.stmt, _Live] = {}
        self.caught: dict[ast.stmt, _Live] = {}

    def through(self, function: Function) -> dict[ast.stmt, _Live]:
        """For each statement of a function, the names that are read after it."""
        self._block(function.body, frozenset(), _Ends())
        return self.after

    def before(self, run: Sequence[ast.stmt], after: _Live) -> _Live:
        """The live names before a run, given those after it."""
        return self._block(run, after, _Ends(after, after))

    def _block(self, body: Sequence[ast.stmt], live: _Live, ends: _Ends) -> _Live:
        for statement in reversed(body):
            live |= ends.raised
            self.after[statement] = self.after.get(statement, frozenset()) | live
            self.caught[statement] = self.caught.get(statement, frozenset()) | ends.raised
            live = self._statement(statement, live, ends) | ends.raised
        return live

    def _statement(self, node: ast.stmt, live: _Live, ends: _Ends) -> _Live:
        match node:
            case ast.Return() | ast.Raise():
                return self._take(node, ends.raised)
            case ast.Break():
                return ends.broken
            case ast.Continue():
                return ends.resumed
            case ast.If():
                ways = (self._block(node.body, live, ends), self._block(node.orelse, live, ends))
                return self._take(node, ways[0] | ways[1])
            case ast.While():
                return self._loop(node, self._block(node.orelse, live, ends), live, ends)
            case ast.For() | ast.AsyncFor():
                done = self._block(node.orelse, live, ends)
                head = self._loop(node, done, live, ends)
                return head | self._take(node.iter, frozenset())
            case ast.With() | ast.AsyncWith():
                return self._take(node, self._block(node.body, live, ends))
            case ast.Try() | ast.TryStar():
                return self._try(node, live, ends)
            case ast.Match():
                inside = [self._block(case.body, live, ends) for case in node.cases]
                return self._take(node, live.union(*inside))
        return self._take(node, live)

    def _take(self, node: ast.AST, live: _Live) -> _Live:
        """Goes back over the events of a node."""
        events = _own_events(node) if isinstance(node, ast.stmt) else _events(node)
        for event in reversed(list(events)):
            if event.kind in ("read", "unbind") and event.name in self.names:
                live |= {event.name}
            elif event.kind == "bind":
                live -= {event.name}
        return live

    def _loop(
        self, node: ast.For | ast.AsyncFor | ast.While, done: _Live, after: _Live, ends: _Ends
    ) -> _Live:
        head = done
        while True:
            inner = self._block(node.body, head, _Ends(head, after, ends.raised))
            if isinstance(node, ast.While):
                larger = self._take(node, inner | done)
            else:
                larger = head | (self._take(node.target, inner)) | done
            if larger <= head:
                return head
            head |= larger

    def _try(self, node: ast.Try | ast.TryStar, live: _Live, ends: _Ends) -> _Live:
        failed = self._block(node.finalbody, ends.raised, ends)
        live = self._block(node.finalbody, live, ends)
        handlers = [self._block(handler.body, live, ends) for handler in node.handlers]
        caught = self._take(node, failed.union(*handlers))
        done = self._block(node.orelse, live, ends)
        inside = _Ends(ends.resumed, ends.broken, ends.raised | caught)
        return self._block(node.body, done, inside) | caught


# Forwards: which names are bound ------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """Names that are bound on every path to a place, and those that are on some."""

    sure: frozenset[str] = frozenset()
    maybe: frozenset[str] = frozenset()

    def joined(self, other: Bound | None) -> Bound:
        """Merges two paths."""
        if other is None:
            return self
        return Bound(self.sure & other.sure, self.maybe | other.maybe)


@dataclass
class _Forward:
    """Computes bound names, walking forwards."""

    names: frozenset[str]
    before: dict[ast.stmt, Bound] = field(default_factory=dict)
    after: dict[ast.stmt, Bound] = field(default_factory=dict)

    def through(self, function: Function) -> dict[ast.stmt, Bound]:
        """For each statement of a function, the names that are bound before it."""
        given = parameters(function) if isinstance(function, ast.FunctionDef) else []
        self.end(function.body, Bound(frozenset(given), frozenset(given)))
        return self.before

    def end(self, body: Sequence[ast.stmt], state: Bound | None) -> Bound | None:
        """The names bound after a run; None if its end is never reached."""
        for statement in body:
            if state is None:
                return None
            self.before[statement] = state.joined(self.before.get(statement))
            state = self._statement(statement, state)
            if state is not None:
                self.after[statement] = state.joined(self.after.get(statement))
        return state

    def _statement(self, node: ast.stmt, state: Bound) -> Bound | None:
        start = state
        state = self._take(node, state)
        match node:
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                return None
            case ast.If():
                return _joined(self.end(node.body, state), self.end(node.orelse, state))
            case ast.For() | ast.AsyncFor() | ast.While():
                unbound = frozenset(_first_places(node.body, ("unbind",), self.names))
                # Names that an iteration deletes are unbound at the beginning of the next.
                again = Bound(start.sure - unbound, state.maybe | self._binds(node.body))
                again = self._take(node, again)
                self.end(node.body, again)
                never = start if isinstance(node, ast.For | ast.AsyncFor) else state
                left = Bound(never.sure - unbound, again.maybe)
                end = self.end(node.orelse, left)
                return _joined(end, left if breaks(node) else None)
            case ast.With() | ast.AsyncWith():
                return self.end(node.body, state)
            case ast.Try() | ast.TryStar():
                caught = Bound(start.sure, state.maybe | self._binds(node.body))
                end = self.end(node.body, start)
                end = self.end(node.orelse, end)
                for handler in node.handlers:
                    own = {handler.name} if handler.name else set()
                    given = Bound(caught.sure | own, caught.maybe | own)
                    end = _joined(end, self.end(handler.body, given))
                return self.end(node.finalbody, end if end else None)
            case ast.Match():
                ends = [state, *(self.end(case.body, state) for case in node.cases)]
                return functools.reduce(_joined, ends)
        return state

    def _take(self, node: ast.stmt, state: Bound) -> Bound:
        sure, maybe = set(state.sure), set(state.maybe)
        for event in _own_events(node):
            if event.name not in self.names:
                continue
            if event.kind == "bind":
                sure.add(event.name)
            if event.kind in ("bind", "maybe"):
                maybe.add(event.name)
            if event.kind == "unbind":
                sure.discard(event.name)
        return Bound(frozenset(sure), frozenset(maybe))

    def _binds(self, body: Sequence[ast.stmt]) -> frozenset[str]:
        return frozenset(_first_places(body, _BINDING, self.names))


def _joined(one: Bound | None, other: Bound | None) -> Bound | None:
    return one.joined(other) if one else other


def breaks(
    loop: ast.For | ast.AsyncFor | ast.While, jumps: type[ast.stmt] | UnionType = ast.Break
) -> bool:
    """Whether a loop has a `break` of its own, or another of these jumps."""
    waiting = list(loop.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, jumps):
            return True
        if not isinstance(node, ast.For | ast.AsyncFor | ast.While):
            waiting += [s for block in blocks(node) for s in block]
    return False
