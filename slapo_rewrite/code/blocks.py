"""Blocks of statements: iteration over them, and functions with replaced statements."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def first_line(statement: ast.stmt) -> int:
    """The first line of a statement, decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of a compound statement."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        inner = getattr(statement, name, [])
        if name in ("handlers", "cases"):
            yield from (each.body for each in inner)
        elif inner:
            yield inner


def statements(body: Iterable[ast.stmt], enter: bool = False) -> Iterator[ast.stmt]:
    """Statements with those inside them, in the order of the text.

    The bodies of functions and classes are included if `enter`.
    """
    for statement in body:
        yield statement
        if enter or not isinstance(statement, DEFINITIONS):
            for block in blocks(statement):
                yield from statements(block, enter)


def every_block(function: Function) -> Iterator[list[ast.stmt]]:
    """The blocks of a function and of functions inside it, outer blocks first."""
    for node in ast.walk(function):
        if isinstance(node, ast.stmt):
            yield from blocks(node)


def with_statements(
    function: ast.FunctionDef, instead: Callable[[ast.stmt, ast.stmt], list[ast.stmt]]
) -> ast.FunctionDef:
    """A copy of a function with replaced statements; those that stay are the same objects.

    `instead` returns the replacements of a statement, given the original and a copy of it whose own
    blocks are replaced already.
    """

    def replaced(body: Iterable[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            made = statement
            if any(True for _ in blocks(statement)):
                made = copy.copy(statement)
                for name in ("body", "orelse", "finalbody"):
                    if inner := getattr(statement, name, None):
                        setattr(made, name, replaced(inner))
            found += instead(statement, made)
        return found

    made = copy.copy(function)
    made.body = replaced(function.body)
    return made
