"""Follows the statements of a function, and gives the graph of its values.

Branches are all followed, and a name that they leave with different values is a `choice` between
them; a loop is followed once, and what it carries from turn to turn is opaque.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping

from slapo_rewrite.code.arguments import all_arguments, first_parameter
from slapo_rewrite.code.facts import Facts, Resolver, Submodule, names_of
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.patterns.branch_conditions import decided
from slapo_rewrite.patterns.canonical_ops import BINARY
from slapo_rewrite.patterns.graph_calls import joined
from slapo_rewrite.patterns.graph_expressions import Expressions, counted
from slapo_rewrite.patterns.value_graph import Exit, Graph, Value

Scope = dict[str, Value]


def graph_of(
    file: SourceFile,
    function: ast.FunctionDef,
    facts: Facts,
    *,
    method: bool,
    resolve: Resolver | None = None,
    pattern: bool = False,
    given: Mapping[str, object] | None = None,
) -> Graph:
    """The values of a function.

    The first parameter of a `method` is the module whose facts these are. `resolve` says what names
    mean that it does not bind; without it they mean what they do at the file's module level. In a
    `pattern` the module's own parameters stand for any. Arguments in `given` are taken as
    constants; where it is not None, of a branch whose way is known only that way is followed, as if
    the branch were not there.
    """
    graph = Graph(file, function)
    flow = Flow(graph, facts, resolve or names_of(file), pattern=pattern)
    flow.given = given
    flow.take_parameters(function, method)
    flow.run(function)
    return graph


def chain_graph(file: SourceFile, node: ast.AST, facts: Facts, module: Submodule) -> Graph:
    """The values of an `nn.Sequential`, whose `forward` is torch's own."""
    graph = Graph(file, None)
    flow = Flow(graph, facts, names_of(file))
    value = flow.chain("", module, flow.leaf("parameter", "input", node), node)
    graph.returned.append(value)
    flow.read(value, node, "returned")
    return graph


class Flow(Expressions):
    """Follows one function."""

    given: Mapping[str, object] | None = None  # as for `graph_of`

    def take_parameters(self, function: ast.FunctionDef, method: bool) -> None:
        """Makes the function's parameters values."""
        names = all_arguments(function)
        if method and first_parameter(function):
            self.scope[names.pop(0).arg] = self.leaf("self", "", function)
        for argument in names:
            self.scope[argument.arg] = self.leaf("parameter", argument.arg, argument)

    def run(self, function: ast.FunctionDef) -> None:
        """Follows the statements of a function."""
        self.captured = captured(function)
        self._block(function.body)

    # Statements -----------------------------------------------------------------------------------

    def _block(self, body: Iterable[ast.stmt]) -> bool:
        """Follows statements; whether what stands after them is reached."""
        for statement in body:
            outer = self.statement
            if self.through is None:
                self.statement = statement
                self.graph.names[statement] = dict(self.scope)
            goes_on = self._statement(statement)
            if self.through is None:
                self.graph.after[statement] = dict(self.scope)
            self.statement = outer
            if not goes_on:
                return False
        return True

    def _statement(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Assign():
                self._assign(statement)
            case ast.AnnAssign(value=ast.expr() as value):
                self._bind(statement.target, self.expr(value), statement)
            case ast.AugAssign():
                self._augmented(statement)
            case ast.Return():
                if statement.value is not None:
                    returned = self.expr(statement.value)
                    self.read(returned, statement, "returned")
                    self.graph.returned.append(returned)
                self.leave(statement)
                return False
            case ast.Expr():
                self._effect(statement.value)
            case ast.If():
                return self._if(statement)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(statement)
            case ast.With() | ast.AsyncWith():
                return self._with(statement)
            case ast.Try() | ast.TryStar():
                return self._try(statement)
            case ast.Match():
                return self._match(statement)
            case ast.Break() | ast.Continue():
                if self.exits:
                    self.exits[-1].append(dict(self.scope))
                self.leave(statement)
                return False
            case ast.Raise():
                self._read_all(statement, "raised")
                return False
            case ast.Assert():
                self._read_all(statement, "tested")
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                self.hold(statement.name, self.opaque(statement))
            case ast.Import() | ast.ImportFrom():
                self._import(statement)
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.read(self._name(target), target, "deleted")
                        # What the name meant cannot be read by it further on.
                        self.hold(target.id, self.opaque(target))
                        self.scope.pop(target.id)
                    elif isinstance(target, ast.Subscript):
                        self.overwrite(self.expr(target.value), statement)
        return True

    def leave(self, statement: ast.stmt) -> None:
        """Notes that a statement leaves the function, or a turn of a loop."""
        self.graph.exits.append(Exit(statement, self.next()))

    def _read_all(self, statement: ast.stmt, why: str) -> None:
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr):
                self.read(self.expr(child), child, why)

    def _assign(self, statement: ast.Assign) -> None:
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=parts)) if len(
                targets
            ) == len(parts) and not any(map(_is_starred, [*targets, *parts])):
                values = [self.expr(part) for part in parts]
                for target, value in zip(targets, values, strict=True):
                    self._bind(target, value, statement)
            case _:
                value = self.expr(statement.value)
                for target in statement.targets:
                    self._bind(target, value, statement)

    def _bind(self, target: ast.expr, value: Value, statement: ast.stmt) -> None:
        match target:
            case ast.Name(id=name):
                self.hold(name, value)
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                for number, element in enumerate(elts):
                    if _is_starred(element):
                        rest = self.make("rest", [("input", value)], element)
                        assert isinstance(element, ast.Starred)
                        self._bind(element.value, rest, statement)
                        continue
                    index = self.constant(number, element)
                    arguments = [("input", value), ("index", index)]
                    item = self.make("item", arguments, element, number=value.number)
                    self._bind(element, item, statement)
            case ast.Attribute(value=owner, attr=name):
                base = self.expr(owner)
                self.read(value, statement, "kept")
                if base.operation in ("self", "attribute"):
                    self.hold(f"self.{joined(base, name)}", value)
                else:
                    self.overwrite(base, statement)
            case ast.Subscript():
                base = self.expr(target.value)
                self.read(self.expr(target.slice), statement, "read")
                self.read(value, statement, "stored")
                self.read(base, statement, "written to")
                self.overwrite(base, statement)

    def _augmented(self, statement: ast.AugAssign) -> None:
        target = statement.target
        old = self.expr(target)
        other = self.expr(statement.value)
        value = self.binary(BINARY[type(statement.op)], old, other, statement)
        if value.operation != "constant" and not old.number:
            value.overwrites, value.bases = old, old.bases
            self.overwrite(old, statement)
        self._bind(target, value, statement)

    def _effect(self, expr: ast.expr) -> None:
        """A call that stands as a statement: what it is a method of may change."""
        if isinstance(expr, ast.Constant):
            return
        value = self.expr(expr)
        known = value.overwrites is not None or value.called is not None
        if not isinstance(expr, ast.Call) or known or value.look_through is not None:
            return
        touched = [argument for _, argument in value.arguments]
        if value.operation.startswith("call builtins."):
            return
        if not value.operation.startswith("call "):  # a method, of the first
            touched = touched[:1]
        for argument in touched:
            if not argument.number:
                self.overwrite(argument, expr)

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        base = self.file.resolve_import(statement) if isinstance(statement, ast.ImportFrom) else ""
        for alias in statement.names:
            full = joined_path(base, alias.name)
            local = alias.asname or alias.name
            if not base and not alias.asname:
                full = local = alias.name.partition(".")[0]
            self.hold(local, self.leaf("name", full, statement))

    # Branches -----------------------------------------------------------------------------------

    def _arm(self, node: ast.AST, arm: str, body: list[ast.stmt], before: Scope) -> Scope | None:
        """Follows one way of a branch; what names hold after it, None where it leaves."""
        self.scope = dict(before)
        with self.region(node, arm):
            return self.scope if self._block(body) else None

    def _if(self, statement: ast.If) -> bool:
        test = self.expr(statement.test)
        self.read(test, statement.test, "tested")
        way = decided(test, self.facts, self.given or {}) if self.through is None else None
        if way is not None:
            self.graph.decided[statement] = way
            if self.given is not None:
                return self._block(statement.body if way else statement.orelse)
        before = self.scope
        taken = self._arm(statement, "body", statement.body, before)
        other = self._arm(statement, "orelse", statement.orelse, before)
        if taken is None or other is None:
            left = taken if taken is not None else other
            self.scope = left if left is not None else before
            return left is not None
        self._join(statement, [taken, other], test)
        return True

    def _join(self, node: ast.AST, scopes: list[Scope], test: Value | None = None) -> None:
        """What names hold where several ways meet."""
        joined_scope: Scope = {}
        for name in dict.fromkeys(name for scope in scopes for name in scope):
            values = [scope[name] for scope in scopes if name in scope]
            if len(values) == len(scopes) and all(v is values[0] for v in values):
                joined_scope[name] = values[0]
            elif test is not None and len(values) == 2:
                ways = [("test", test), ("then", values[0]), ("otherwise", values[1])]
                joined_scope[name] = self._lazy("choice", ways, node, name)
            else:
                joined_scope[name] = self._lazy("merge", counted(values), node, name)
        self.scope = joined_scope

    def _lazy(
        self, operation: str, arguments: list[tuple[str, Value]], node: ast.AST, name: str
    ) -> Value:
        """A merge of values, which reads them only when it is read itself."""
        value = self.make(operation, arguments, node, lazy=True, pure=operation == "choice")
        value.number = all(v.number for key, v in arguments if key != "test")
        self.bindings.append((name, value))
        return value

    def _loop(self, statement: ast.For | ast.AsyncFor | ast.While) -> None:
        element = None
        if not isinstance(statement, ast.While):
            over = self.expr(statement.iter)
            self.read(over, statement.iter, "looped over")
            element = over
        carried = [name for name in _stored(statement) if name in self.scope]
        heads = {n: self._lazy("loop", [("before", self.scope[n])], statement, n) for n in carried}
        before = self.scope
        self.scope = {**before, **heads}
        self.exits.append([])
        with self.region(statement, "body"):
            if element is not None and not isinstance(statement, ast.While):
                turn = self.make("element", [("input", element)], statement.target)
                self._bind(statement.target, turn, statement)
            if isinstance(statement, ast.While):
                if self.through is None:
                    self.graph.names[statement] = dict(self.scope)
                self.read(self.expr(statement.test), statement.test, "tested")
            fell = self._block(statement.body)
        ends = [*self.exits.pop(), *([self.scope] if fell else [])]
        for name, head in heads.items():
            for end in ends:
                # Read in the next turn, unless nothing reads it there.
                if not head.lazy and end.get(name, head) is not head:
                    self.read(end[name], statement, "read in the next turn")
        self._join(statement, [before, *ends])
        after = self.scope
        ended = self._arm(statement, "orelse", statement.orelse, after)
        self.scope = after
        if ended is not None and statement.orelse:
            self._join(statement, [after, ended])

    def _with(self, statement: ast.With | ast.AsyncWith) -> bool:
        for item in statement.items:
            value = self.expr(item.context_expr)
            self.read(value, item.context_expr, "entered")
            if item.optional_vars is not None:
                entered = self.make("entered", [("input", value)], item.context_expr)
                self._bind(item.optional_vars, entered, statement)
        with self.region(statement, "body"):
            return self._block(statement.body)

    def _try(self, statement: ast.Try | ast.TryStar) -> bool:
        before, start = self.scope, len(self.bindings)
        ends = [self._arm(statement, "body", [*statement.body, *statement.orelse], before)]
        unsure = dict(before)
        for name in dict.fromkeys(name for name, _ in self.bindings[start:]):
            values = [v for n, v in self.bindings[start:] if n == name]
            values += [before[name]] if name in before else []
            unsure[name] = self._lazy("merge", counted(values), statement, name)
        for number, handler in enumerate(statement.handlers):
            if handler.name:
                unsure[handler.name] = self.make("exception", [], handler)
            ends.append(self._arm(statement, f"handler {number}", handler.body, unsure))
        reached = [end for end in ends if end is not None]
        self.scope = before
        if reached:
            self._join(statement, reached)
        with self.region(statement, "finally"):
            finished = self._block(statement.finalbody)
        return finished and bool(reached)

    def _match(self, statement: ast.Match) -> bool:
        subject = self.expr(statement.subject)
        self.read(subject, statement.subject, "tested")
        before = self.scope
        ends: list[Scope | None] = [before]
        for number, case in enumerate(statement.cases):
            start = dict(before)
            for name in _captures(case.pattern):
                start[name] = self.make("captured", [("input", subject)], case.pattern)
            self.scope = start
            if case.guard is not None:
                self.read(self.expr(case.guard), case.guard, "tested")
            ends.append(self._arm(statement, f"case {number}", case.body, start))
        self._join(statement, [end for end in ends if end is not None])
        return True


def _is_starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


def _stored(statement: ast.stmt) -> list[str]:
    """Names, and attributes of `self`, that a statement binds anywhere inside."""
    found = []
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                found.append(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.append(f"self.{name}")
    return list(dict.fromkeys(found))


def _captures(pattern: ast.pattern) -> list[str]:
    names = [getattr(node, "name", None) for node in ast.walk(pattern)]
    names += [getattr(node, "rest", None) for node in ast.walk(pattern)]
    return [name for name in names if name]


@functools.lru_cache(maxsize=4096)
def captured(function: ast.FunctionDef) -> frozenset[str]:
    """Names that functions inside read, whenever they are called."""
    inner = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(
        name.id
        for node in ast.walk(function)
        if isinstance(node, inner) and node is not function
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    )
