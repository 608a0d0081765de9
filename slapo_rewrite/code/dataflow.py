"""The names that stand in statements and expressions."""

from __future__ import annotations

import ast
from collections.abc import Set


def names_in(*nodes: ast.AST, context: type[ast.expr_context] | None = None) -> Set[str]:
    """The names that stand in some nodes, each once: all, or those that are read, or bound."""
    found = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id: None for n in found if context is None or isinstance(n.ctx, context)}.keys()


def read_in(*nodes: ast.AST) -> Set[str]:
    """The names that some nodes read."""
    return names_in(*nodes, context=ast.Load)


def bound_in(*nodes: ast.AST) -> Set[str]:
    """The names that some nodes bind."""
    return names_in(*nodes, context=ast.Store)


def body_of(function: ast.FunctionDef) -> list[ast.stmt]:
    """A function's statements without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body
