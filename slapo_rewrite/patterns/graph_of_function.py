"""Builds the value graph of a function by abstract interpretation of its statements.

All branches are followed; a name with different values after them becomes a `choice` between these.
A loop's body is followed once, and values carried from one iteration to the next are opaque. All
spellings of an operation give the same value, and the bodies of called functions can be entered.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_rewrite.code.arguments import Signature, all_arguments, first_parameter
from slapo_rewrite.code.dataflow import bound_in, names_in
from slapo_rewrite.code.effects import (
    is_expression,
    is_in_place,
    own_calls,
    plain_calls,
    stored,
    writes,
)
from slapo_rewrite.code.evaluate import Constant
from slapo_rewrite.code.facts import (
    Facts,
    Function,
    Property,
    Resolver,
    Submodule,
    Tensor,
    names_of,
)
from slapo_rewrite.code.file import SourceFile, read_once
from slapo_rewrite.code.liveness import binds
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.patterns.branch_conditions import decided
from slapo_rewrite.patterns.canonical_ops import (
    BINARY,
    CASTS,
    COMPARE,
    DTYPES,
    MIRRORED,
    PARAMETERS,
    SIGNATURES,
    SYNONYMS,
    UNARY,
    Operation,
    Required,
    by_module,
    draws,
    draws_by_name,
    operations,
    parse,
)
from slapo_rewrite.patterns.value_graph import (
    Arm,
    Binding,
    Exit,
    Graph,
    Mutation,
    Use,
    Value,
    equal,
)

Scope = dict[str, Value]
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CONSTANTS = {"math.pi": 3.141592653589793, "math.e": 2.718281828459045}
# The package of rules, whose patterns may call functions of their modules.
RULES = "slapo_rewrite.rules."
# Built-in functions that compute numbers, or inspect a value without keeping it.
_PLAIN = {"len", "int", "float", "bool", "str", "isinstance", "hasattr", "range", "min", "max"}
_PLAIN |= {"tuple", "list", "type", "abs", "sum", "round", "enumerate", "zip", "getattr"}
MAX_DEPTH = 4
# The arguments of a call in order: keyword ('' for a positional one) and value.
Given = Sequence[tuple[str, Value]]
# Gives the value of a call of a certain callee, for its arguments and its node.
Callee = Callable[[Given, ast.AST], Value]
_FOLDED: dict[str, Callable[..., float]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "pow", "neg")},
    **{"div": operator.truediv, "math.sqrt": math.sqrt},
}
# Operations whose result is, or contains, one of their arguments.
_HOLDERS = {"choice", "merge", "loop", "tuple", "item", "member", "element"}
_SHAPES = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad"}
# The bases of a value that shares memory with nothing.
FREE: frozenset[object] = frozenset([("free",)])


@dataclass(frozen=True, eq=False)
class Called:
    """A function of a source file that is called."""

    value: Value  # the call
    file: SourceFile  # the file of the function
    function: ast.FunctionDef
    given: Given  # the arguments
    owner: str | None = None  # the path of the module whose method it is; None for a plain function


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
    """The value graph of a function.

    The first parameter of a `method` is the module that `facts` describe. `resolve` resolves names
    that the function does not bind; by default, at the file's module level. In a `pattern`, the
    module's parameters are wildcards. Arguments in `given` count as constants; if it is not None,
    only the taken arm of a branch with a known condition is followed, as if there were no branch.
    """
    graph = Graph(file, function)
    flow = Flow(graph, facts, resolve or names_of(file), pattern=pattern)
    flow.given = given
    flow.take_parameters(function, method)
    flow.run(function)
    return graph


def chain_graph(file: SourceFile, node: ast.AST, facts: Facts, module: Submodule) -> Graph:
    """The value graph of an `nn.Sequential`, whose `forward` is torch's own."""
    graph = Graph(file, None)
    flow = Flow(graph, facts, names_of(file))
    value = flow.chain("", module, flow.leaf("parameter", "input", node), node)
    graph.returned.append(value)
    flow.read(value, node, "returned")
    return graph


class Flow:
    """Interprets one function: creates its values, and records their uses and mutations.

    Attributes:
        graph: The graph that is built.
        file: The function's file.
        facts: The facts about the module whose method it is.
        resolve: Resolves names that the function does not bind.
        scope: The values of local names; assigned attributes are in it as `self.path`.
        through: The call whose callee's body is interpreted; None for the function itself.
        captured: Local names that inner functions read.
        bindings: All bindings of names so far.
        exits: For each enclosing loop, the scopes at its early exits.
        stores: Whether an attribute of the module is assigned.
    """

    given: Mapping[str, object] | None = None  # as for `graph_of`

    def __init__(
        self,
        graph: Graph,
        facts: Facts,
        resolve: Resolver,
        *,
        through: Value | None = None,
        depth: int = 0,
        pattern: bool = False,
    ) -> None:
        self.graph, self.facts, self.resolve = graph, facts, resolve
        self.file: SourceFile = graph.file
        self.through, self.depth, self.pattern = through, depth, pattern
        self.scope: Scope = {}
        self.captured: frozenset[str] = frozenset()
        self.bindings: list[tuple[str, Value]] = []
        self.exits: list[list[Scope]] = []
        self.stores = False
        self.regions: tuple[Arm, ...] = through.regions if through else ()
        self.statement: ast.stmt | None = through.statement if through else None
        self._prefix = through.order if through else ()
        self._count = 0

    def take_parameters(self, function: ast.FunctionDef, method: bool) -> None:
        """Binds the function's parameters to values."""
        names = all_arguments(function)
        if method and first_parameter(function):
            self.scope[names.pop(0).arg] = self.leaf("self", "", function)
        for argument in names:
            self.scope[argument.arg] = self.leaf("parameter", argument.arg, argument)

    def run(self, function: ast.FunctionDef) -> None:
        """Interprets the statements of a function."""
        self.captured = captured(function)
        self._block(function.body)

    # Statements -----------------------------------------------------------------------------------

    def _block(self, body: Iterable[ast.stmt]) -> bool:
        """Interprets statements; returns whether the statement after them is reached."""
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
                        # Its value cannot be read by this name further on.
                        self.hold(target.id, self.opaque(target))
                        self.scope.pop(target.id)
                    elif isinstance(target, ast.Subscript):
                        self.overwrite(self.expr(target.value), statement)
        return True

    def leave(self, statement: ast.stmt) -> None:
        """Records that a statement leaves the function, or an iteration of a loop."""
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
        """Interprets an expression statement: a call may change its arguments or object."""
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
        """Interprets one arm of a branch; returns the scope after it, or None if it leaves."""
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
        """Merges the scopes of several paths."""
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
        """A merge of values, which uses them only when it is used itself."""
        value = self.make(operation, arguments, node, lazy=True, pure=operation == "choice")
        value.number = all(v.number for key, v in arguments if key != "test")
        self.bindings.append((name, value))
        return value

    def _loop(self, statement: ast.For | ast.AsyncFor | ast.While) -> None:
        if not isinstance(statement, ast.While):
            over = self.expr(statement.iter)
            self.read(over, statement.iter, "looped over")
        bound = (*bound_in(statement), *(f"self.{name}" for name in stored(statement)))
        carried = [name for name in bound if name in self.scope]
        heads = {n: self._lazy("loop", [("before", self.scope[n])], statement, n) for n in carried}
        before = self.scope
        self.scope = {**before, **heads}
        self.exits.append([])
        with self.region(statement, "body"):
            if isinstance(statement, ast.While):
                if self.through is None:
                    self.graph.names[statement] = dict(self.scope)
                self.read(self.expr(statement.test), statement.test, "tested")
            else:
                turn = self.make("element", [("input", over)], statement.target)
                self._bind(statement.target, turn, statement)
            fell = self._block(statement.body)
        ends = [*self.exits.pop(), *([self.scope] if fell else [])]
        for name, head in heads.items():
            for end in ends:
                # A carried value that the next iteration reads counts as used.
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
            for name in binds(case.pattern):
                start[name] = self.make("captured", [("input", subject)], case.pattern)
            self.scope = start
            if case.guard is not None:
                self.read(self.expr(case.guard), case.guard, "tested")
            ends.append(self._arm(statement, f"case {number}", case.body, start))
        self._join(statement, [end for end in ends if end is not None])
        return True

    # Expressions, in the order in which Python evaluates them ------------------------------------

    def hold(self, name: str, value: Value, walrus: ast.NamedExpr | None = None) -> None:
        """Binds a local name, or an attribute by the name `self.path`."""
        self.scope[name] = value
        self.bindings.append((name, value))
        self.stores = self.stores or name.startswith("self.")
        if self.through is None and self.statement is not None:
            self.graph.bound.append(Binding(name, value, self.statement, self.next(), walrus))
        if name in self.captured:
            self.read(value, value.node, "read by an inner function")

    @contextmanager
    def region(self, node: ast.AST, arm: str) -> Iterator[None]:
        """Enters a body of a branch, loop or block."""
        outer = self.regions
        self.regions = (*outer, (node, arm))
        try:
            yield
        finally:
            self.regions = outer

    def expr(self, node: ast.expr) -> Value:
        """The value of an expression."""
        match node:
            case ast.Constant(value=literal):
                return self.constant(literal, node)
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self.call(node)
            case ast.BinOp():
                left, right = self.expr(node.left), self.expr(node.right)
                return self.binary(BINARY[type(node.op)], left, right, node)
            case ast.UnaryOp():
                return self._unary(node)
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp():
                return self._bool_op(node)
            case ast.IfExp():
                test = self.expr(node.test)
                with self.region(node, "body"):
                    then = self.expr(node.body)
                with self.region(node, "orelse"):
                    otherwise = self.expr(node.orelse)
                ways = [("test", test), ("then", then), ("otherwise", otherwise)]
                number = then.number and otherwise.number
                return self.make("choice", ways, node, number=number)
            case ast.Subscript():
                return self._item(node)
            case ast.Slice():
                parts = [("lower", node.lower), ("upper", node.upper), ("step", node.step)]
                none = self.constant(None, node)
                given = [(name, self.expr(part) if part else none) for name, part in parts]
                return self.make("slice", given, node, number=True)
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                return self.tuple_of([self.expr(element) for element in elts], node)
            case ast.NamedExpr():
                value = self.expr(node.value)
                self.hold(node.target.id, value, node)
                return value
            case (
                ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp()
            ):
                return self.opaque(node)
        values = [self.expr(c) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        return self.make(type(node).__name__.lower(), counted(values), node, pure=False)

    def _name(self, node: ast.Name) -> Value:
        if node.id in self.scope:
            value = self.scope[node.id]
            if self.through is None:
                self.graph.loads[node] = value
            return value
        found = self.resolve(node.id)
        if isinstance(found, Constant):
            return self.constant(found.value, node)
        return self._named(found or f"builtins.{node.id}", node)

    def _named(self, name: str, node: ast.AST) -> Value:
        if name in _CONSTANTS:
            return self.constant(_CONSTANTS[name], node)
        return self.leaf("name", DTYPES.get(name, name), node)

    def _attribute(self, node: ast.Attribute) -> Value:
        base = self.expr(node.value)
        if base.operation == "name":
            return self._named(f"{base.literal}.{node.attr}", node)
        of_tensor = base.operation == "attribute" and self.facts.look(str(base.literal)) == Tensor()
        if base.operation in ("self", "attribute") and not of_tensor:
            return self.load_attribute(joined(base, node.attr), node)
        return self.member(base, node.attr, node)

    def _item(self, node: ast.Subscript) -> Value:
        base, index = self.expr(node.value), self.expr(node.slice)
        if base.operation == "attribute" and isinstance(index.literal, int | str):
            path = f"{base.literal}.{index.literal}"
            if isinstance(self.facts.look(path), Submodule):
                return self.load_attribute(path, node)
        arguments = [("input", base), ("index", index)]
        return self.make("item", arguments, node, number=base.number)

    def binary(self, name: str, left: Value, right: Value, node: ast.AST) -> Value:
        """The value of an operator."""
        value = self.named_operation(f"operator.{name}", [("", left), ("", right)], node)
        assert value is not None, name
        return value

    def _unary(self, node: ast.UnaryOp) -> Value:
        operand, name = self.expr(node.operand), UNARY[type(node.op)]
        value = self.named_operation(f"operator.{name}", [("", operand)], node)
        if value is None:
            value = self.make(name, [("input", operand)], node, number=operand.number)
        return value

    def _compare(self, node: ast.Compare) -> Value:
        values = [self.expr(part) for part in (node.left, *node.comparators)]
        if len(values) > 2:
            return self.make("compare", counted(values), node, pure=False)
        name = COMPARE[type(node.ops[0])]
        if name in MIRRORED:
            name, values = MIRRORED[name], values[::-1]
        given = [("", value) for value in values]
        value = self.named_operation(f"operator.{name}", given, node)
        if value is None:
            named = list(zip(("input", "other"), values, strict=True))
            value = self.make(name, named, node, number=True)
        return value

    def _bool_op(self, node: ast.BoolOp) -> Value:
        first, *others = node.values
        values = [self.expr(first)]
        with self.region(node, "rest"):
            values += [self.expr(other) for other in others]
        name = "and" if isinstance(node.op, ast.And) else "or"
        return self.make(name, counted(values), node, number=all(v.number for v in values))

    def opaque(self, node: ast.AST) -> Value:
        """The value of something opaque: a comprehension, a lambda, an inner function or class."""
        values = [self.scope[name] for name in names_in(node) if name in self.scope]
        random = any(isinstance(n, ast.Call) for n in ast.walk(node))
        value = self.make("opaque", counted(values), node, random=random, pure=False)
        if isinstance(node, _COMPREHENSIONS) and writes(node):
            self.overwrite(value, node)
        return value

    # What is called ---------------------------------------------------------------------------

    def call(self, node: ast.Call) -> Value:
        """The value of a call."""
        callee = self._callee(node.func)
        given = [("*" if isinstance(a, ast.Starred) else "", self.expr(a)) for a in node.args]
        given += [(k.arg or "**", self.expr(k.value)) for k in node.keywords]
        return callee(given, node)

    def _callee(self, func: ast.expr) -> Callee:
        if not isinstance(func, ast.Attribute):
            return self.callee_of(self.expr(func))
        on = self.expr(func.value)
        if on.operation == "name":
            return functools.partial(self._function, f"{on.literal}.{func.attr}")
        if on.operation in ("self", "attribute"):
            path = joined(on, func.attr)
            if f"self.{path}" in self.scope:
                return self.callee_of(self.scope[f"self.{path}"])
            held = self._held(path)
            if held is not None:
                return held
            if on.operation == "self":
                return functools.partial(self._own_method, str(on.literal), func.attr)
        return functools.partial(self._method, func.attr, on)

    def callee_of(self, value: Value) -> Callee:
        """The callee if a value is called."""
        if value.operation == "name":
            return functools.partial(self._function, str(value.literal))
        held = self._held(str(value.literal)) if value.operation == "attribute" else None
        return held or functools.partial(self._called, value)

    def _held(self, path: str) -> Callee | None:
        """The submodule or function in an attribute, as a callee."""
        match self.facts.look(path):
            case Submodule() as module:
                return functools.partial(self._module, path, module)
            case Function(method=method) if method:
                return functools.partial(self._own_method, path.rpartition(".")[0], method)
            case Function(name=name, options=options):
                return functools.partial(self._function, name, options=options)
        return None

    def load_attribute(self, path: str, node: ast.AST) -> Value:
        """The value of an attribute of the module."""
        if f"self.{path}" in self.scope:
            return self.scope[f"self.{path}"]
        if path.rpartition(".")[2] == "training":
            return self.leaf("training", None, node, number=True, path=path)
        fact = self.facts.look(path)
        if self.pattern and isinstance(fact, Constant):
            return self.constant(fact.value, node)
        if isinstance(fact, Property):
            return self.make("property", [], node, literal=path, pure=False)
        if isinstance(fact, Submodule | Function):  # something to call, also in a pattern
            return self.leaf("attribute", path, node)
        return self.attribute(path, node, isinstance(fact, Constant))

    def _called(self, value: Value, given: Given, node: ast.AST) -> Value:
        """The value of a call of a value that is no known function or module."""
        if value.operation.startswith("new "):
            return self._instance(value, given, node)
        if value.operation == "opaque" and writes(value.node):
            self.overwrite(value, node)
        arguments = [("function", value), *numbered(given)]
        return self.make("call", arguments, node, random=True, pure=False)

    # Functions and methods ----------------------------------------------------------------------

    def _function(
        self, name: str, given: Given, node: ast.AST, options: Iterable[tuple[str, object]] = ()
    ) -> Value:
        """The value of a call of a function, given keyword arguments that are bound already."""
        given = [*given, *((key, self.constant(value, node)) for key, value in options)]
        match name, [value for _, value in given]:
            case "builtins.getattr", [Value("self" | "attribute") as of, Value(literal=str(attr))]:
                return self.load_attribute(joined(of, attr), node)
        if name.endswith(".call_module") and name.startswith("slapo_rewrite"):
            return self.make("call_module", numbered(given), node, pure=False)
        found = self.named_operation(name, given, node)
        if found is not None:
            return found
        if name == "builtins.setattr" and len(given) == 3 and given[0][1].operation == "self":
            self.hold(f"self.{joined(given[0][1], str(given[1][1].literal))}", given[2][1])
        if name.startswith("torch.") and name.rpartition(".")[2].startswith("set_"):
            self.graph.exits.append(Exit(node, self.next(), total=True))
        if name in by_module():
            return self.make(f"new {name}", numbered(given), node)
        home, _, last = name.rpartition(".")
        file = self._defining(home)
        if file is not None and last in file.functions:
            function = file.functions[last]
            value = self.make(
                f"call {name}",
                numbered(given),
                node,
                random=draws(function, file.functions),
                pure=False,
            )
            self.look_into(Called(value, file, function, given))
            return value
        if home in ("torch", "operator", "torch.Tensor"):
            return self._unlisted(last, given, node, pure=True)
        plain = home == "math" or (home == "builtins" and last in _PLAIN)
        if plain and all(v.operation == "constant" for _, v in given):
            folded = self.folded(name, [v for _, v in given], node)
            if folded is not None:
                return folded
        plain = plain or home == "torch.nn.functional"
        random = draws_by_name(last) if plain else True
        number = plain and home in ("math", "builtins")
        value = self.make(
            f"call {name}", numbered(given), node, random=random, pure=plain, number=number
        )
        self._written(value, given, node)
        return value

    def _defining(self, home: str) -> SourceFile | None:
        """The file whose functions are entered: this file, and in patterns also files of rules."""
        if home == self.file.name:
            return self.file
        is_of_rules = self.pattern and home.startswith(RULES)
        path = getattr(sys.modules.get(home), "__file__", None) if is_of_rules else None
        return read_once(Path(path), home) if path else None

    def _method(self, name: str, on: Value, given: Given, node: ast.AST) -> Value:
        given = [("", on), *given]
        if is_in_place(name):
            value = self._operation(name.rstrip("_"), given, node, overwrites=on)
            return value or self._unlisted(name, given, node, overwrites=on)
        return self._operation(name, given, node) or self._unlisted(name, given, node)

    def _unlisted(
        self,
        name: str,
        given: Given,
        node: ast.AST,
        overwrites: Value | None = None,
        pure: bool = False,
    ) -> Value:
        """The value of an operation that is not listed, known by its name only."""
        random = draws_by_name(name)
        value = self.make(
            name,
            numbered(given),
            node,
            random=random,
            pure=pure and not random,
            overwrites=overwrites,
        )
        if overwrites is not None:
            self.overwrite(overwrites, node)
        self._written(value, given, node)
        return value

    def _written(self, value: Value, given: Given, node: ast.AST) -> None:
        """Records what a call writes into: its `out`, or its first operand if `inplace`."""
        for name, argument in given:
            if name == "out":
                self.overwrite(argument, node)
            if name == "inplace" and argument.literal is not False:
                value.overwrites = given[0][1]
                self.overwrite(given[0][1], node)

    # Methods of the module, submodules ----------------------------------------------------------

    def _own_method(self, path: str, name: str, given: Given, node: ast.AST) -> Value:
        computed = self.facts.look(joined_path(path, name)) == Property()
        found = None if computed else self.facts.method(path, name)
        random = found is None or draws(found[1], found[0].functions)
        value = self.make(f"call self.{name}", numbered(given), node, random=random, pure=False)
        if found is not None:
            marks = found[1].decorator_list
            static = any(is_name(d, "staticmethod") for d in marks)
            owner = None if static else path
            self.look_into(Called(value, *found, given, owner))
        return value

    def _module(self, path: str, module: Submodule, given: Given, node: ast.AST) -> Value:
        if module.regex is not None:
            regex = self.constant(module.regex, node)
            return self.make("call_module", numbered([("", regex), *given]), node, pure=False)
        known = by_module().get(module.cls)
        if known is not None and not all(self._is(path, *each) for each in known.only):
            known = None
        inputs = self._inputs(known, given, node) if known is not None else None
        if known is not None and inputs is not None:
            for name, default in known.parameters[known.inputs :]:
                inputs[name] = self._option(path, known, name, default, node)
            return self.operation(known, inputs, node, called=path, given=given)
        own = self.attribute(path, node)
        forward = self.facts.method(path, "forward") if module.plain else None
        value = self.make(
            f"module {module.cls}",
            [("module", own), *numbered(given)],
            node,
            random=module.random,
            pure=False,
            called=path,
            given=tuple(given),
        )
        if module.cls == "torch.nn.Identity" and len(given) == 1:
            value.look_through = lambda: given[0][1]
        elif module.cls == "torch.nn.Sequential" and len(given) == 1:
            value.look_through = lambda: self._inner(value, self.file).chain(
                path, module, given[0][1], node
            )
        elif forward is not None:
            value.stateful = not module.stateless
            own_alone = module.cls.startswith("torch.nn.")  # those write to their own buffers
            self.look_into(Called(value, *forward, given, path), effects=not own_alone)
        return value

    def _inputs(self, known: Operation, given: Given, node: ast.AST) -> dict[str, Value] | None:
        """The inputs of a call of a `torch.nn` module by name; None if they do not fit."""
        taken = Operation(known.name, known.parameters[: known.inputs])
        return self.bound(taken, given, node)

    def _is(self, path: str, name: str, value: object) -> bool:
        """Whether an attribute of a module has a certain value, or does not exist."""
        fact = self.facts.look(f"{path}.{name}")
        return fact is None or (isinstance(fact, Constant) and equal(fact.value, value))

    def _option(
        self, path: str, known: Operation, name: str, default: object, node: ast.AST
    ) -> Value:
        """The value that a `torch.nn` module passes for a parameter of its operation."""
        if name == "training":
            return self.leaf("training", None, node, number=True, path=f"{path}.training")
        fact = self.facts.look(f"{path}.{name}")
        if name in known.tensors and not isinstance(fact, Constant):
            return self.attribute(f"{path}.{name}", node)
        if self.pattern and name in known.free:
            return self.wildcard(f"{path}.{name}", node)
        if fact is None:  # torch's modules do not have every option of their operation
            return self.constant(default, node)
        if not isinstance(fact, Constant):
            return self.attribute(f"{path}.{name}", node)
        return self.leaf("constant", fact.value, node, number=True, path=f"{path}.{name}")

    def chain(self, path: str, module: Submodule, value: Value, node: ast.AST) -> Value:
        """The value of a `Sequential`: its modules called in order."""
        for name in module.children:
            inner = joined_path(path, name)
            fact = self.facts.look(inner)
            if isinstance(fact, Submodule):
                place = self.facts.place(inner)
                value = self._module(inner, fact, [("", value)], place[1] if place else node)
        return value

    def _instance(self, new: Value, given: Given, node: ast.AST) -> Value:
        """The value of `nn.GELU()(x)`: a call of a module that was just constructed."""
        known = by_module()[new.operation.removeprefix("new ")]
        options = [p for p in known.parameters[known.inputs :] if p[0] != "training"]
        maker = Operation(known.name, tuple(options))
        made = [("" if key.isdecimal() else key, value) for key, value in new.arguments]
        arguments = None if known.tensors else self.bound(maker, made, node)
        inputs = self._inputs(known, given, node)
        altered = any(mutation.target is new for mutation in self.graph.mutations)
        if altered or arguments is None or inputs is None:
            return self.make("call", [("function", new), *numbered(given)], node, pure=False)
        if "training" in known.names:
            arguments["training"] = self.constant(True, node)  # as every new module
        arguments |= inputs
        ordered = {name: arguments[name] for name in known.names}
        return self.operation(known, ordered, node)

    # What the called function returns, and what it does besides ----------------------------------

    def _inner(self, value: Value, file: SourceFile) -> Flow:
        """An interpreter for the body of a call; nothing in it counts as a use."""
        return Flow(
            Graph(file, None),
            self.facts,
            self.resolve if file is self.file else names_of(file),
            through=value,
            depth=self.depth + 1,
            pattern=self.pattern,
        )

    def look_into(self, called: Called, effects: bool = True) -> None:
        """Lets a call's body be entered on demand, and records its side effects."""
        called.value.look_through = lambda: self._through(called)
        if effects:
            self._effects(called)

    def _through(self, called: Called) -> Value | None:
        """The value that a function returns for these arguments; None if it is not one value."""
        if not is_expression(called.function):
            return None
        inner = self._followed(called)
        if inner is None or inner.graph.mutations or inner.stores:
            return None
        (returned,) = inner.graph.returned
        used = {id(each) for each in returned.walk()}
        idle = (each for each in inner.graph.values if id(each) not in used)
        return returned if all(each.pure and not each.random for each in idle) else None

    def _followed(self, called: Called) -> Flow | None:
        """The interpreter after running a function; None if its arguments are not known."""
        if self.depth >= MAX_DEPTH or any(key in ("*", "**") for key, _ in called.given):
            return None
        inner = self._inner(called.value, called.file)
        if not inner.bind_parameters(called.function, called.given, called.owner):
            return None
        inner.run(called.function)
        return inner

    def _effects(self, called: Called) -> None:
        """Records what a call writes to: memory of its arguments, attributes of the module."""
        value = called.value
        reached = list(self._reached(called.file, called.function, called.owner))
        for method, path in reached:
            for name in stored(method) if path is not None else ():
                # A value of its own: it must not be taken for the call's result.
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
        """A function, and the functions of its file and methods of its module that it calls.

        Each method comes with the path of its module, each plain function with None.
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
        """Binds a call's arguments to the parameters of a function; False if they do not fit."""
        takes = Signature.of(function, bound=owner is not None)
        bound = takes.bind(given)
        if bound.rest or bound.extra or bound.repeated:
            return False
        me = first_parameter(function)
        if owner is not None and me is not None:
            self.scope[me] = self.leaf("self", owner, function)
        for star, literal in ((function.args.vararg, ()), (function.args.kwarg, None)):
            if star is not None:  # no arguments are left for them
                self.scope[star.arg] = self.make("rest", [], star, literal=literal)
        for name in bound.missing:
            if name not in takes.defaults:
                return False
            bound.given[name] = self.expr(takes.defaults[name])
        self.scope |= bound.given
        return True

    def read(self, value: Value, node: ast.AST, why: str) -> None:
        """Records that a statement reads a value."""
        self.use(value, Use(node, None, why, self.next()))

    # Listed operations ---------------------------------------------------------------------------

    def named_operation(self, name: str, given: Given, node: ast.AST) -> Value | None:
        """The value of a listed operation called as a function; None if it is none, or misfits."""
        home, _, last = name.rpartition(".")
        if home not in ("torch", "torch.nn.functional", "operator", "torch.Tensor"):
            return None
        signature = SIGNATURES.get(name)
        return self._operation(last, given, node, signature)

    def _operation(
        self,
        name: str,
        given: Given,
        node: ast.AST,
        signature: str | None = None,
        overwrites: Value | None = None,
    ) -> Value | None:
        name = SYNONYMS.get(name, name)
        if name in CASTS and len(given) == 1:
            dtype = self.leaf("name", f"torch.{CASTS[name]}", node)
            name, given = "to", [*given, ("", dtype)]
        elif name == "to" and any(map(_is_device, given)):
            return None
        elif name == "type" and len(given) == 2 and given[1][1].operation != "constant":
            name = "to"
        elif name == "square" and len(given) == 1:
            name, given = "pow", [*given, ("", self.constant(2, node))]
        elif name in MIRRORED and len(given) == 2:
            name, given = MIRRORED[name], list(reversed(given))
        known = operations().get(name)
        arguments = None if known is None else self.bound(known, given, node, signature)
        if known is None or arguments is None:
            return None
        return self.operation(known, arguments, node, overwrites)

    def bound(
        self, known: Operation, given: Given, node: ast.AST, signature: str | None = None
    ) -> dict[str, Value] | None:
        """The arguments of an operation by parameter name; None if they do not fit."""
        parameters, positional = (
            parse(signature) if signature else (known.parameters, known.positional)
        )
        names = [name for name, _ in parameters]
        star = next((name[1:] for name in names if name.startswith("*")), None)
        takes = Signature(
            tuple(name for name in names[:positional] if not name.startswith("*")),
            tuple(name.lstrip("*") for name in names),
            star,
        )
        bound = takes.bind((PARAMETERS.get((known.name, key), key), value) for key, value in given)
        found = bound.given
        if bound.stars or bound.spread or bound.extra or bound.repeated:
            return None
        if bound.rest:
            if star is None or star in found:
                return None
            found[star] = self._packed(bound.rest, node)
        for name, default in (*parameters, *known.parameters):
            if name.lstrip("*") not in found:
                if default is Required:
                    return None
                found[name] = self.constant(default, node)
        return {name: found[name] for name in known.names}

    def _packed(self, values: list[Value], node: ast.AST) -> Value:
        """One value for variadic arguments: `view(2, 3)` is the same as `view((2, 3))`."""
        if len(values) == 1 and not isinstance(values[0].literal, int):
            return values[0]
        return self.tuple_of(values, node)

    def tuple_of(self, values: list[Value], node: ast.AST) -> Value:
        """The value of a tuple or list; a constant if all of its elements are."""
        if all(value.operation == "constant" for value in values):
            return self.constant(tuple(value.literal for value in values), node)
        number = all(value.number for value in values)
        return self.make("tuple", numbered([("", v) for v in values]), node, number=number)

    def operation(
        self,
        known: Operation,
        arguments: dict[str, Value],
        node: ast.AST,
        overwrites: Value | None = None,
        called: str | None = None,
        given: Given = (),
    ) -> Value:
        """The value of a listed operation."""
        inplace = arguments.pop("inplace", None)
        if inplace is not None and inplace.literal is not False:
            overwrites = arguments["input"]
        values = list(arguments.values())
        if known.name == "size":
            return self._size(values, node)
        folded = self.folded(known.name, values, node)
        if folded is not None:
            return folded
        if known.name == "transpose":
            self._sort_dims(arguments)
        scale = arguments.get("alpha")
        training = arguments.get("training")
        draws = known.draws and not (training is not None and training.literal is False)
        value = self.make(
            known.name,
            arguments.items(),
            node,
            overwrites=overwrites,
            random=draws,
            pure=not draws,
            number=known.number or all(v.number for v in values),
            called=called,
            given=tuple(given),
            commutes=known.commutes and (scale is None or equal(scale.literal, 1)),
        )
        if not (known.view or known.draws or known.name == "to" or overwrites is not None):
            value.bases = frozenset([("made", value.order)])
        if overwrites is not None:
            self.overwrite(overwrites, node)
        return value

    def _size(self, values: list[Value], node: ast.AST) -> Value:
        """`x.size(1)` is `x.shape[1]`."""
        shape = self.member(values[0], "shape", node)
        if values[1].operation == "constant" and values[1].literal is None:
            return shape
        return self.make("item", [("input", shape), ("index", values[1])], node, number=True)

    @staticmethod
    def _sort_dims(arguments: dict[str, Value]) -> None:
        one, other = arguments["dim0"], arguments["dim1"]
        match one.literal, other.literal:
            case int(first), int(second) if first > second:
                arguments |= {"dim0": other, "dim1": one}

    def folded(self, name: str, values: list[Value], node: ast.AST) -> Value | None:
        """The result of arithmetic on constants, if it can be folded."""
        function = _FOLDED.get(name)
        numbers = [v.literal for v in values if v.operation == "constant"]
        # `alpha` and `rounding_mode`, where an operation has them
        operands = numbers[:1] if name in ("neg", "math.sqrt") else numbers[:2]
        if function is None or len(numbers) < len(values):
            return None
        if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in operands):
            return None
        try:
            return self.constant(function(*operands), node)
        except (ArithmeticError, ValueError):
            return None

    # Values --------------------------------------------------------------------------------------

    def next(self) -> tuple[int, ...]:
        """The next position in the order of evaluation."""
        self._count += 1
        return (*self._prefix, self._count)

    def make(
        self, operation: str, arguments: Iterable[tuple[str, Value]], node: ast.AST, **more: Any
    ) -> Value:
        """Creates a computed value."""
        value = self._value(operation, tuple(arguments), node, **more)
        if not value.bases:
            value.bases = self._bases(value)
        if not value.lazy:
            for _, argument in value.arguments:
                self.use(argument, Use(node, value, "", value.order))
        self.graph.values.append(value)
        return value

    def leaf(self, operation: str, literal: object, node: ast.AST, **more: Any) -> Value:
        """Creates a value that is not computed: a constant, a parameter, an attribute, a name."""
        value = self._value(operation, (), node, literal=literal, **more)
        if operation == "parameter":
            value.bases = frozenset([(operation, literal)])
        elif operation == "attribute":  # and what holds it
            names = str(literal).split(".")
            paths = (".".join(names[:n]) for n in range(1, len(names) + 1))
            value.bases = frozenset((operation, path) for path in paths)
        return value

    def _value(
        self, operation: str, arguments: tuple[tuple[str, Value], ...], node: ast.AST, **more: Any
    ) -> Value:
        inside = self.through.site if self.through else None
        here = {"regions": self.regions, "statement": self.statement, "inside": inside, **more}
        return Value(operation, arguments, self.file, node, self.next(), **here)

    def constant(self, literal: object, node: ast.AST) -> Value:
        """A constant."""
        return self.leaf("constant", literal, node, number=True)

    def attribute(self, path: str, node: ast.AST, number: bool = False) -> Value:
        """An attribute of the module; in a pattern, a wildcard."""
        if self.pattern:
            return self.wildcard(path, node)
        return self.leaf("attribute", path, node, number=number)

    def wildcard(self, name: str, node: ast.AST) -> Value:
        """A wildcard of a pattern: always the same value for one name."""
        if name not in self.scope:
            self.scope[name] = self.leaf("parameter", name, node)
        return self.scope[name]

    def _bases(self, value: Value) -> frozenset[object]:
        if value.overwrites is not None:
            return value.overwrites.bases
        own = frozenset([("made", value.order)])
        shared = frozenset[object]().union(*(v.bases for _, v in value.arguments))
        return shared if value.operation in _HOLDERS else shared | own

    def use(self, value: Value, use: Use) -> None:
        """Records that a value is used."""
        if self.through is not None:  # inside a call's body: the call itself uses it
            return
        if value.lazy:  # an unused merge does not use its values
            value.lazy = False
            for _, argument in value.arguments:
                self.use(argument, Use(value.node, value, "", value.order))
        value.uses.append(use)

    def overwrite(self, value: Value, node: ast.AST) -> None:
        """Records that the memory of a value is written to."""
        self.graph.mutations.append(Mutation(value, node, self.next()))

    def member(self, value: Value, name: str, node: ast.AST) -> Value:
        """An attribute of a value that is not the module."""
        if name == "training" and value.operation == "parameter":
            return self.leaf("training", None, node, number=True)
        if name == "shape":
            return self.make("shape", [("input", value)], node, number=True, bases=FREE)
        return self.make("member", [("input", value)], node, literal=name, number=name in _SHAPES)


def _is_starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


@functools.lru_cache(maxsize=4096)
def captured(function: ast.FunctionDef) -> frozenset[str]:
    """The names that inner functions read, whenever they are called."""
    inner = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(
        name.id
        for node in ast.walk(function)
        if isinstance(node, inner) and node is not function
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    )


def counted(values: Iterable[Value]) -> list[tuple[str, Value]]:
    """Values as arguments named by position."""
    return [(str(number), value) for number, value in enumerate(values)]


def joined(value: Value, name: str) -> str:
    """The path of an attribute of the module, or of one of its attributes."""
    return joined_path(str(value.literal or ""), name)


def _is_device(given: tuple[str, Value]) -> bool:
    """Whether an argument of `to` is a device, not a dtype."""
    key, value = given
    text = value.operation == "constant" and isinstance(value.literal, str)
    return key == "device" or text or (value.operation == "member" and value.literal == "device")


def numbered(given: Given) -> list[tuple[str, Value]]:
    """Arguments in order: positional ones named by index, others by keyword."""
    return [(key if key.isidentifier() else f"{key}{n}", v) for n, (key, v) in enumerate(given)]
