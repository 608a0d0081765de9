"""Decorators of a file's top-level definitions."""

from __future__ import annotations

import ast

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def decorated_alike(tree: ast.Module, line: int) -> list[tuple[Definition, ast.expr]]:
    """The definitions with the decorator at a line, with any arguments, and their decorators."""
    known = [
        (each, decorator)
        for each in tree.body
        if isinstance(each, Definition)
        for decorator in each.decorator_list
    ]
    called = {callee(d) for _, d in known if d.lineno <= line <= (d.end_lineno or d.lineno)}
    return [(each, d) for each, d in known if callee(d) in called]


def callee(decorator: ast.expr) -> str:
    """The function that a decorator calls, or is."""
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
