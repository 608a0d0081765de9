"""Expressions for the values of attributes before the constructor sets them."""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator

from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.dataflow import assigned_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.syntax import position

# Functions without side effects, which may be called a second time.
_PURE = {"getattr", "hasattr", "int", "float", "len", "max", "min", "round", "abs", "sum", "bool"}


class Late:
    """Expressions that are valid at a statement of a constructor."""

    def __init__(self, file: SourceFile, function: ast.FunctionDef, statement: ast.stmt) -> None:
        self.file, self.function, self.line = file, function, statement.lineno
        self.bound: dict[str, list[tuple[ast.stmt, ast.expr | None]]] = {}
        simple = (
            n for n in ast.walk(function) if isinstance(n, ast.stmt) and not hasattr(n, "body")
        )
        for each in simple:
            for target, value in assigned_in(each):
                name = ast.unparse(target)
                self.bound.setdefault(name, []).append((each, value))

    def attribute(self, name: str) -> str | None:
        """An expression for `self.<name>`; None if none is known to be right."""
        me = f"self.{name}"
        if self._is_there(me):
            return me
        value = self._assigned(me)
        if value is None:
            return None
        text = self.file.segment(value)
        if "\n" not in text and all(self._is_there(n) for n in names_read(value)):
            return text
        written = self.expression(value)
        return ast.unparse(written) if written is not None else None

    def meaning(self, value: ast.expr) -> ast.expr:
        """An expression with its names replaced by their definitions, as far as these are known."""
        return self.expression(value, wholly=True) or value

    def definition(self, name: ast.expr) -> ast.expr | None:
        """The value of a name, or of an attribute of `self`, that is always assigned once."""
        text = ast.unparse(name)
        return self._assigned(text) if text in self.bound else None

    def arguments(self) -> set[str]:
        """The function's parameters without `self`."""
        return {*parameters(self.function)} - {"self"}

    def _is_there(self, name: str) -> bool:
        """Whether a name, or an attribute of `self`, has its value at the statement."""
        bound = self.bound.get(name)
        if bound is not None:
            return all(statement.lineno < self.line for statement, _ in bound)
        if name.startswith("self."):
            return "self" in parameters(self.function)  # a base's constructor sets it
        known = self.arguments() | set(dir(builtins))
        return name in known or name in self.file.names

    def _assigned(self, name: str) -> ast.expr | None:
        """The value of a name that is always assigned once, if it can be repeated."""
        if name not in self.bound:
            return None
        (statement, value), *others = self.bound[name]
        if others or statement not in self.function.body or value is None:
            return None
        calls = [n.func for n in ast.walk(value) if isinstance(n, ast.Call)]
        pure = all(isinstance(f, ast.Name) and f.id in _PURE for f in calls)
        # The names that it reads must not be reassigned afterwards, or in a loop.
        pure = pure and all(
            position(other) < position(statement)
            for read in names_read(value)
            for other, _ in self.bound.get(read, ())
        )
        own = (ast.Lambda, ast.NamedExpr, ast.comprehension, ast.Await, ast.Yield)
        return None if not pure or any(isinstance(n, own) for n in ast.walk(value)) else value

    def expression(
        self, value: ast.expr, depth: int = 0, *, wholly: bool = False
    ) -> ast.expr | None:
        """An expression in names that exist at the statement; None if there is none.

        Names that do not exist yet are replaced by their definitions; if `wholly`, all names are.
        """
        if depth > 4:
            return None
        late = self
        failed = False

        class Writer(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.AST:
                return self._written(node, node.id)

            def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
                if is_name(node.value, "self"):
                    return self._written(node, f"self.{node.attr}")
                return self.generic_visit(node)

            def _written(self, node: ast.expr, name: str) -> ast.AST:
                nonlocal failed
                is_there = late._is_there(name)
                if is_there and not wholly:
                    return node
                value = late._assigned(name) if name in late.bound else None
                new = late.expression(value, depth + 1, wholly=wholly) if value else None
                failed |= new is None and not is_there
                return new or node

        written = Writer().visit(copy.deepcopy(value))
        assert isinstance(written, ast.expr)
        return None if failed else written


def names_read(value: ast.expr) -> Iterator[str]:
    """The names that an expression reads, and the attributes of `self`."""
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and node.id != "self":
            yield node.id
        elif isinstance(node, ast.Attribute) and is_name(node.value, "self"):
            yield f"self.{node.attr}"
