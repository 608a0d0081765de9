"""Replaces a variable that is read once by its expression, where that is safe and readable."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from slapo_rewrite.code.dataflow import uses_of
from slapo_rewrite.code.edit import substituted
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.sinking import are_next, is_alone

# The syntax of expressions that remain readable inside another one.
_PLAIN = (
    *(ast.Call, ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.UnaryOp, ast.keyword),
    *(ast.operator, ast.unaryop, ast.expr_context),
)
MOST_CALLS = 3


@dataclass(frozen=True)
class InPlace:
    """An expression that replaces a variable."""

    gone: ast.Assign  # the assignment of the variable
    name: ast.Name  # the read of it
    text: str  # the expression


def in_place(
    file: SourceFile, function: ast.FunctionDef, reading: ast.stmt, name: str
) -> InPlace | None:
    """The replacement of a variable that one statement assigns and only the next one reads, once.

    None if that would change the order of evaluation, or be harder to read: on a line that is too
    long, among many calls, or with a comment lost.
    """
    block = file.block_of(reading)
    match block[max(block.index(reading) - 1, 0)], reading:
        case ast.Assign(targets=[ast.Name(id=bound)], value=value) as before, ast.Assign(
            value=taking
        ):
            pass
        case _:
            return None
    uses, reads = uses_of(function, name), uses_of(function, name, ast.Load)
    if bound != name or len(uses) != 2 or len(reads) != 1 or not _is_first(taking, reads[0]):
        return None
    parts = [*ast.walk(value), *ast.walk(taking)]
    calls = sum(isinstance(part, ast.Call) for part in parts)
    if not all(isinstance(part, _PLAIN) for part in parts) or calls > MOST_CALLS:
        return None
    if not isinstance(value, ast.Call) or not _is_bare(file, before, reading):
        return None
    text = file.segment(value)
    written = substituted(file, reading, {reads[0]: text})
    if "\n" in written or reading.col_offset + len(written) > file.line_length:
        return None
    return InPlace(before, reads[0], text)


def _is_first(expr: ast.expr, name: ast.Name) -> bool:
    """Whether only names and constants are evaluated before a name, which is always evaluated."""
    match expr:
        case ast.Name():
            return expr is name
        case ast.Attribute(value=value) | ast.UnaryOp(operand=value):
            return _is_first(value, name)
        case ast.BinOp(left=left, right=right):
            return _is_first_of([left, right], name)
        case ast.Call(func=func, args=args, keywords=keywords):
            if isinstance(func, ast.Attribute) and name in ast.walk(func):
                return _is_first(func.value, name)
            is_named = not any(isinstance(n, ast.Call) for n in ast.walk(func))
            given = [*args, *(keyword.value for keyword in keywords)]
            return is_named and _is_first_of(given, name)
    return False


def _is_first_of(given: Sequence[ast.expr], name: ast.Name) -> bool:
    for each in given:
        if name in ast.walk(each):
            return _is_first(each, name)
        if not isinstance(each, (ast.Name, ast.Constant)):
            return False
    return False


def _is_bare(file: SourceFile, first: ast.stmt, second: ast.stmt) -> bool:
    """Whether two statements are on one line each, next to each other, without comments."""
    plain = first.end_lineno == first.lineno and second.end_lineno == second.lineno
    alone = is_alone(file, first) and is_alone(file, second)
    remarked = "#" in file.line(first.lineno - 1)
    return plain and alone and not remarked and are_next(file, first, second)
