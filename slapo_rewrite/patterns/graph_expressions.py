"""Expressions as values, in the order in which Python evaluates them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.effects import writes
from slapo_rewrite.code.evaluate import Constant
from slapo_rewrite.code.facts import Submodule, Tensor
from slapo_rewrite.patterns.canonical_ops import BINARY, COMPARE, DTYPES, MIRRORED, UNARY
from slapo_rewrite.patterns.graph_calls import Calls, joined
from slapo_rewrite.patterns.value_graph import Binding, Value

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CONSTANTS = {"math.pi": 3.141592653589793, "math.e": 2.718281828459045}


class Expressions(Calls):
    """Makes values of expressions."""

    def hold(self, name: str, value: Value, walrus: ast.NamedExpr | None = None) -> None:
        """Binds a local name, or an attribute as `self.path`."""
        self.scope[name] = value
        self.bindings.append((name, value))
        self.stores = self.stores or name.startswith("self.")
        if self.through is None and self.statement is not None:
            self.graph.bound.append(Binding(name, value, self.statement, self.next(), walrus))
        if name in self.captured:
            self.read(value, value.node, "read by an inner function")

    @contextmanager
    def region(self, node: ast.AST, arm: str) -> Iterator[None]:
        """A body of a branch, a loop or a block."""
        outer = self.regions
        self.regions = (*outer, (node, arm))
        try:
            yield
        finally:
            self.regions = outer

    def expr(self, node: ast.expr) -> Value:
        """What an expression gives."""
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
        """What an operator gives."""
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
        """What is not looked into: a comprehension, a lambda, an inner function or class."""
        values = [self.scope[name] for name in names_in(node) if name in self.scope]
        random = any(isinstance(n, ast.Call) for n in ast.walk(node))
        value = self.make("opaque", counted(values), node, random=random, pure=False)
        if isinstance(node, _COMPREHENSIONS) and writes(node):
            self.overwrite(value, node)
        return value


def counted(values: Iterable[Value]) -> list[tuple[str, Value]]:
    """Values as arguments by their position."""
    return [(str(number), value) for number, value in enumerate(values)]
