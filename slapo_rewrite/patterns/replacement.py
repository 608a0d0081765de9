"""Places where one call can replace a match, and the text that it replaces there."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slapo_rewrite.code.dataflow import bound_in, names_in, parameters_in, uses_of
from slapo_rewrite.code.names import unique
from slapo_rewrite.code.text import accessor, within
from slapo_rewrite.patterns.graph_of_function import captured
from slapo_rewrite.patterns.value_graph import Graph, Value, described

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True)
class Replaced:
    """The text that a call replaces."""

    node: ast.AST  # the expression that computes the match's result, or a statement
    # The text before the call if it becomes a statement: `scores = `, `out, weights = `.
    target: str = ""
    removed: tuple[ast.stmt, ...] = ()  # the statements that compute nothing else, to be removed
    # Statements that compute parts of the match and something else: they stay, so that a call alone
    # cannot replace the match.
    kept: tuple[ast.stmt, ...] = ()
    # Whether `node` stays, and the call becomes a statement above it.
    above: bool = False
    # Expressions that compute a result, each with the name that replaces it.
    reads: tuple[tuple[ast.AST, str], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether one call replaces the whole match."""
        return not self.kept


@dataclass(frozen=True, eq=False)
class Place:
    """A place for the call."""

    node: ast.AST  # the expression or statement that it replaces, or is inserted above
    value: Value  # the value computed there now: a result, or the tuple of results
    moment: tuple[int, ...]  # the call's position in the order of evaluation
    outer: tuple[Value, ...]  # the values that other code may use
    named: bool = False  # whether the call becomes an assignment of several results
    above: bool = False  # whether it is a statement of its own above `node`

    @property
    def statement(self) -> ast.stmt | None:
        """The statement that contains it."""
        return self.value.site.statement


def places(graph: Graph, results: Sequence[Value]) -> Iterator[Place]:
    """The possible places for a call that returns these results, the best first."""
    if len(results) == 1:
        (root,) = results
        yield Place(root.site.node, root, root.order, (root,))
        return
    sites = [result.site for result in results]
    for value in graph.values:
        if value.operation == "tuple" and [v for _, v in value.arguments] == sites:
            yield Place(value.node, value, value.order, (value,))
    outer = tuple(results)
    for result in sorted(results, key=lambda value: value.order, reverse=True):
        statement = result.site.statement
        match statement:
            case ast.Assign(value=ast.Tuple(elts=elts)) if elts == [site.node for site in sites]:
                yield Place(statement.value, result, result.order, outer)
            case ast.stmt() if gives(statement, [result]):
                yield Place(statement, result, result.order, outer, named=True)
            case ast.stmt() if isinstance(statement, _SIMPLE) and all(
                isinstance(node, ast.stmt) for node, _ in result.regions
            ):
                first = min(v.order for v in graph.values if v.statement is statement)
                yield Place(statement, result, first, outer, named=True, above=True)


@dataclass(frozen=True, eq=False)
class Target:
    """The name of a result at the call's place."""

    result: Value
    name: str  # its name; `_` if nothing reads it
    read: ast.AST | None = None  # the expression that becomes that name
    several: bool = False  # whether it is read by several names, of which this is one


class Standing:
    """The changes if a call at one place replaces a match.

    `names` are suggestions for results without a name.
    """

    def __init__(
        self, graph: Graph, nodes: Sequence[Value], place: Place, names: Sequence[str]
    ) -> None:
        self.graph, self.place, self.names = graph, place, names
        self.nodes = [*nodes] if place.value in nodes else [*nodes, place.value]
        visible = {id(value) for value in place.outer}
        visible |= {id(value.site) for value in place.outer}
        self.inner = [node for node in self.nodes if id(node) not in visible]

    @functools.cached_property
    def replaced(self) -> Replaced:
        """The text that one call would replace."""
        node, target = self.place.node, ""
        removed = self._removed
        if self.place.named:
            names = [target.name for target in self.targets]
            reads = tuple((t.read, t.name) for t in self.targets if t.read is not None)
            kept = tuple(self._kept(removed))
            above = self.place.above
            return Replaced(node, f"{', '.join(names)} = ", tuple(removed), kept, above, reads)
        if isinstance(node, ast.AugAssign):
            target = f"{ast.unparse(node.target)} = "
        inside = list[ast.stmt]()
        if isinstance(node, ast.If):
            inside = [*node.body, *node.orelse]
            target = next((f"{name} = " for s in inside for name in bound_in(s)), "")
            inside = inside if self._chooses(node, removed) else []
            removed = [s for s in removed if s not in inside]
        kept = tuple(self._kept([*removed, *inside]))
        if isinstance(node, ast.If) and not inside:
            kept += (node,)
        return Replaced(node, target, tuple(removed), kept)

    # Statements -----------------------------------------------------------------------------------

    @functools.cached_property
    def _statements(self) -> list[ast.stmt]:
        """The statements that compute or name parts of the match, without the place's own."""
        early = [*self.place.outer] if self.place.named else []
        found = [value.site.statement for value in (*self.inner, *early)]
        always, before = ({id(v.site) for v in values} for values in (self.inner, early))
        for bound in self.graph.bound:
            early_name = id(bound.value) in before and self._runs_before(bound.statement)
            if id(bound.value) in always or early_name:
                found.append(bound.statement)
        own = self.place.statement
        return list(dict.fromkeys(s for s in found if s is not None and s is not own))

    def _runs_before(self, statement: ast.stmt) -> bool:
        """Whether a statement is above the place."""
        own = self.place.statement
        assert own is not None
        return statement.lineno < own.lineno

    @functools.cached_property
    def _removed(self) -> list[ast.stmt]:
        """The statements to be removed."""
        given = [*self.inner, *(target.result for target in self.targets if target.read is None)]
        own = {id(value.site) for value in (*self.inner, *self.place.outer)}
        named = [target.result for target in self.targets if target.read is not None]
        bound = self.graph.bound
        removed = [
            s
            for s in self._statements
            if (gives(s, given) and not gives(s, named))
            or unpacks(s, given)
            or (is_alias(s) and any(b.statement is s and id(b.value) in own for b in bound))
        ]
        for branch in [s for s in self._statements if isinstance(s, ast.If)]:
            if self._chooses(branch, removed):
                removed = [s for s in removed if s not in (*branch.body, *branch.orelse)]
                removed.append(branch)
        return sorted(removed, key=lambda s: s.lineno)

    def _kept(self, gone: Sequence[ast.stmt]) -> list[ast.stmt]:
        """The statements that compute or name parts of the match and are not removed."""
        covered = {id(node) for statement in gone for node in ast.walk(statement)}
        read = [t for t in self.targets if t.read is not None]
        covered |= {id(t.result.site.statement) for t in read if self._is_read_only(t)}
        return [s for s in self._statements if id(s) not in covered]

    def _is_read_only(self, target: Target) -> bool:
        """Whether a statement's only part of the match is the expression of a result."""
        assert target.read is not None
        inside = {id(node) for node in ast.walk(target.read)}
        statement = target.result.site.statement
        return all(
            id(value.site.node) in inside
            for value in (*self.inner, *self.place.outer)
            if value.site.statement is statement
        )

    @staticmethod
    def _chooses(branch: ast.If, removed: list[ast.stmt]) -> bool:
        """Whether a branch only chooses a value of the match."""
        inside = [*branch.body, *branch.orelse]
        names = {name for statement in inside for name in bound_in(statement)}
        return len(names) == 1 and all(s in removed or is_alias(s) for s in inside)

    # The names of several results -----------------------------------------------------------------

    @functools.cached_property
    def targets(self) -> list[Target]:
        """The name of each of several results."""
        if not self.place.named:
            return []
        fresh = self._fresh()
        return [
            self._target(result, name) for result, name in zip(self.place.outer, fresh, strict=True)
        ]

    def _target(self, result: Value, fresh: str) -> Target:
        own, statement = self.place.statement, result.site.statement
        assert own is not None and statement is not None
        name = next(iter(bound_in(statement))) if gives(statement, [result]) else None
        if statement is own and name is not None and not self.place.above:
            return Target(result, name)
        nested = is_nested(result, self.place.outer)
        if not nested and not self._runs_before(statement):
            if name is not None and statement is not own and self._is_free(name, statement):
                return Target(result, name)
            return Target(result, fresh, result.site.node)
        held = [name for name in self._holding(result) if self._is_read(name, result)]
        return Target(result, held[0] if held else "_", several=len(held) > 1)

    def _holding(self, result: Value) -> list[str]:
        """The names of a result after the call."""
        own = self.place.statement
        assert own is not None
        names = self.graph.names if self.place.above else self.graph.after
        found = [n for n, v in names[own].items() if v is result.site and not n.startswith("self.")]
        inner = [b.name for b in self.graph.bound if b.walrus and b.value is result.site]
        return list(dict.fromkeys([*found, *inner]))

    def _is_read(self, name: str, result: Value) -> bool:
        """Whether anything outside of the match reads a result by this name."""
        return any(
            node.id == name and id(node) not in self._own and self.may_be(value, result.site)
            for node, value in self.graph.loads.items()
        )

    @functools.cached_property
    def _own(self) -> set[int]:
        """The ids of nodes in the match's text, and in statements that alias its results."""
        computed = [v.site.node for v in self.nodes if not isinstance(v.site.node, ast.Tuple)]
        return {id(inner) for node in (*computed, *self._aliases) for inner in ast.walk(node)}

    @functools.cached_property
    def _aliases(self) -> list[ast.stmt]:
        """The statements above the place that only alias results."""
        results = {id(value.site) for value in self.place.outer}
        return [
            b.statement
            for b in self.graph.bound
            if id(b.value) in results and is_alias(b.statement) and self._runs_before(b.statement)
        ]

    def may_be(self, value: Value, result: Value) -> bool:
        """Whether a value that a name has where it is read may be the result."""
        around = [node for node, _ in self.place.value.regions if isinstance(node, _LOOPS)]
        seen: set[int] = set()
        pending = [value]
        while pending:
            value = pending.pop()
            if value is result or (value.operation == "loop" and value.node in around):
                return True
            if id(value) not in seen and value.operation in ("choice", "merge", "loop"):
                seen.add(id(value))
                pending += [v for key, v in value.arguments if key != "test"]
        return False

    def _is_free(self, name: str, until: ast.stmt) -> bool:
        """Whether a name can be bound at the place already, instead of further down."""
        own, function = self.place.statement, self.graph.function
        assert own is not None and function is not None
        end = own.end_lineno or own.lineno
        return name not in captured(function) and not any(
            end < node.lineno < until.lineno for node in uses_of(function, name)
        )

    def _fresh(self) -> list[str]:
        """Names that the function does not use yet."""
        function = self.graph.function
        assert function is not None
        taken = {*names_in(function), *parameters_in(function)}
        found = []
        for name in self.names:
            found.append(unique(name, taken.__contains__, "_"))
            taken.add(found[-1])
        return found

    @functools.cached_property
    def covered(self) -> set[int]:
        """The ids of all nodes in removed statements and replaced expressions."""
        gone = [*self.replaced.removed, *(node for node, _ in self.replaced.reads)]
        gone += [] if self.place.above else [self.place.node]
        return {id(inner) for node in gone for inner in ast.walk(node)}

    # Operands -------------------------------------------------------------------------------------

    @functools.cached_property
    def held(self) -> dict[str, Value]:
        """The values of names at the place, after the removals."""
        last = self.place.statement
        names = dict(self.graph.names.get(last, {})) if last is not None else {}
        for bound in self.graph.bound:  # bound by `:=` in the same statement
            if bound.statement is last and bound.walrus and bound.order < self.place.moment:
                names[bound.name] = bound.value
        for statement in reversed(self._removed):
            before = self.graph.names[statement]
            for name in bound_in(statement):
                if any(names.get(name) in (value, value.site) for value in self.nodes):
                    names.pop(name)
                    names |= {name: before[name]} if name in before else {}
        return names

    def name_of(self, value: Value) -> str | None:
        """The local name, or attribute, of a value at the place."""
        read = value.node.id if isinstance(value.node, ast.Name) else None
        holding = [name for name, held in self.held.items() if held is value]
        plain = [name for name in holding if not name.startswith("self.")]
        return read if read in plain else next(iter([*plain, *holding]), None)

    def moves(self, value: Value) -> bool:
        """Whether an operand's text must move to the place, since it has no name there."""
        statement = value.site.statement
        if value.is_leaf or statement is None or value.inside is not None:
            return False
        stays = statement is self.place.statement and not self.place.above
        return not stays and self.name_of(value) is None

    def text(self, value: Value) -> str:
        """The text of an operand at the place."""
        return self.name_of(value) or text_of(value)


def is_nested(result: Value, results: Iterable[Value]) -> bool:
    """Whether the text of a result is part of that of another, and is replaced with it."""
    others = (each.site.node for each in results if each is not result)
    return any(within(other, result.site.node) for other in others)


def gives(statement: ast.stmt, values: Iterable[Value]) -> bool:
    """Whether a statement only binds a name to one of the values."""
    match statement:
        case (
            ast.Assign(targets=[ast.Name()], value=given)
            | ast.AnnAssign(target=ast.Name(), value=ast.expr() as given)
        ):
            return any(value.site.node is given for value in values)
        case ast.AugAssign(target=ast.Name()):
            return any(value.site.node is statement for value in values)
    return False


def unpacks(statement: ast.stmt, values: Iterable[Value]) -> bool:
    """Whether a statement only binds names to some of the values: `first, rest = x[:n], x[n:]`."""
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=given)):
            sites = [value.site.node for value in values]
            plain = len(names) == len(given) and all(isinstance(n, ast.Name) for n in names)
            return plain and all(node in sites for node in given)
    return False


def is_alias(statement: ast.stmt) -> bool:
    """Whether a statement only assigns one variable to another."""
    match statement:
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
            return isinstance(target, ast.Name) and isinstance(value, ast.Name)
    return False


def text_of(value: Value) -> str:
    """The text of a value where it is computed."""
    written = value.inside is None and isinstance(value.node, ast.expr)
    match value.operation:
        case "constant":
            return accessor(value.path) if value.path else repr(value.literal)
        case "attribute":
            return accessor(str(value.literal))
        case "name" if written and isinstance(value.node, ast.Name | ast.Attribute):
            return value.file.segment(value.node)
        case "parameter" | "name":
            return str(value.literal)
        case "training" if not (written and isinstance(value.node, ast.Attribute)):
            return accessor(value.path or "training")
    return value.file.segment(value.node) if written else described(value)
