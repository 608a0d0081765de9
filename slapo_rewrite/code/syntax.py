"""Syntactic properties of functions, loops and calls."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Set
from typing import Any

from slapo_rewrite.code.arguments import values_given
from slapo_rewrite.code.blocks import statements
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.liveness import binds
from slapo_rewrite.code.text import Position
from slapo_rewrite.groups import grouped

PLACED = (ast.expr, ast.stmt, ast.arg, ast.keyword, ast.alias, ast.excepthandler, ast.pattern)


def tree_of(defined: Any) -> ast.Module:
    """The syntax of a live function or class; an empty module if its source is not available."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(defined)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def counter_of(target: ast.expr, iterable: ast.expr) -> str | None:
    """The variable of a loop that counts its iterations from 0."""
    match target, iterable:
        case ast.Name(id=name), ast.Call(func=ast.Name(id="range"), args=[_]):
            return name
        case ast.Name(id=name), ast.Call(func=ast.Name(id="range"), args=[first, _]):
            return name if is_zero(first) else None
        case ast.Tuple(elts=[ast.Name(id=name), _]), ast.Call(func=ast.Name(id="enumerate")):
            return name if all(map(is_zero, values_given(iterable)[1:])) else None
        case ast.Tuple(elts=elts), ast.Call(func=ast.Name(id="zip"), args=args):
            counters = (counter_of(t, a) for t, a in zip(elts, args, strict=False))
            return next((c for c in counters if c), None)
    return None


# The syntax of expressions that may be repeated; calls of `len` may be as well.
REPEATABLE = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.expr_context)


def count_of(iterable: ast.expr) -> ast.expr | None:
    """An expression for the number of iterations of a loop; None if there is no simple one."""
    match iterable:
        case ast.Call(func=ast.Name(id="range"), args=[count]):
            pass
        case ast.Call(func=ast.Name(id="range"), args=[first, count]) if is_zero(first):
            pass
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
            return count_of(inner)
        case ast.Name() | ast.Attribute():
            length = ast.Call(ast.Name("len", ast.Load()), [iterable], [])
            count = ast.fix_missing_locations(ast.copy_location(length, iterable))
        case _:
            return None
    calls = [node for node in ast.walk(count) if isinstance(node, ast.Call)]
    repeatable = all(isinstance(n, REPEATABLE) or n in calls for n in ast.walk(count))
    repeatable &= all(isinstance(c.func, ast.Name) and c.func.id == "len" for c in calls)
    return count if repeatable else None


def is_zero(expr: ast.expr) -> bool:
    """Whether an expression is the literal 0."""
    return isinstance(expr, ast.Constant) and expr.value == 0


@functools.lru_cache(maxsize=4096)
def _assignments(function: ast.FunctionDef) -> dict[str, list[ast.stmt]]:
    every = statements(function.body)
    return grouped((name, statement) for statement in every for name in binds(statement))


def assignments(function: ast.FunctionDef, name: str) -> list[ast.stmt]:
    """The statements of a function that bind a local name, in the order of the text."""
    return _assignments(function).get(name, [])


def position(node: ast.AST) -> tuple[int, int]:
    """The beginning of a node, for comparison."""
    return extent(node)[:2]


def end_position(node: ast.AST) -> tuple[int, int]:
    """The end of a node, likewise."""
    return extent(node)[2:]


def extent(node: ast.AST) -> Position:
    """The beginning and end of a node."""
    first = last = node
    if isinstance(node, ast.comprehension):
        first, last = node.target, node.ifs[-1] if node.ifs else node.iter
    assert isinstance(first, PLACED), f"a {type(node).__name__} has no place of its own"
    assert isinstance(last, PLACED)
    end, column = last.end_lineno or last.lineno, last.end_col_offset or last.col_offset
    return first.lineno, first.col_offset, end, column


def encloses(outer: Position, inner: Position) -> bool:
    """Whether a position is inside another."""
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


# Names that read a tensor's sizes, and names that read the device, precision or compiler.
_SIZES = {"shape", "size", "numel", "nelement"}
_MACHINE = {"cuda", "is_cuda", "cpu", "is_cpu", "mps", "meta", "is_meta"}
_MACHINE |= {"is_compiling", "is_autocast_enabled", "float16", "bfloat16", "half"}


def sizes_in_tests(function: ast.AST) -> Set[str]:
    """The tests of a function that depend on sizes of tensors, except those that only raise."""
    return _asked(
        function, lambda node: isinstance(node, ast.Attribute) and node.attr in _SIZES, _is_number
    )


def machine_in_tests(function: ast.AST) -> Set[str]:
    """The tests that depend on the device, the precision or a compiler, likewise."""
    words = ("attr", "id", "value")
    answers = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Attribute)
    return _asked(
        function,
        lambda node: any(str(getattr(node, word, "")) in _MACHINE for word in words),
        lambda value: isinstance(value, answers),
    )


def _asked(
    function: ast.AST, tells: Callable[[ast.AST], bool], may_answer: Callable[[ast.expr], bool]
) -> Set[str]:
    """The tests of a function with a node that `tells`, or a variable assigned from one."""
    names: set[str] = set()

    def told(expr: ast.expr) -> bool:
        return any(tells(n) or (isinstance(n, ast.Name) and n.id in names) for n in ast.walk(expr))

    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and told(node.value) and may_answer(node.value):
            wanted = node.targets[0]
            each = wanted.elts if isinstance(wanted, ast.Tuple) else [wanted]
            names |= {n.id for n in each if isinstance(n, ast.Name)}
    return {ast.unparse(test) for test in _tests(function, raising=False) if told(test)}


def changing_in_tests(function: ast.AST) -> Set[str]:
    """The tests of a function on attributes that it assigns itself, such as a counter."""
    named = [n for n in ast.walk(function) if isinstance(n, ast.Attribute)]
    bound = {n.attr for n in named if isinstance(n.ctx, ast.Store)}
    return {
        ast.unparse(test)
        for test in _tests(function)
        if any(isinstance(n, ast.Attribute) and n.attr in bound for n in ast.walk(test))
    }


def names_in_tests(function: ast.AST) -> Set[str]:
    """The names in the tests of a function."""
    subjects = (node.subject for node in ast.walk(function) if isinstance(node, ast.Match))
    return names_in(*_tests(function), *subjects)


def _tests(function: ast.AST, raising: bool = True) -> Iterator[ast.expr]:
    """The tests of a function's branches and loops; if `raising`, also those that only raise."""
    for node in ast.walk(function):
        match node:
            case ast.If(body=[ast.Raise()]) if not raising:
                pass
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield test


def _is_number(expr: ast.expr) -> bool:
    """Whether an expression with sizes is a number, since it only calls functions of numbers."""
    calls = [n.func for n in ast.walk(expr) if isinstance(n, ast.Call)]
    return all(
        (isinstance(f, ast.Attribute) and f.attr in _SIZES)
        or (isinstance(f, ast.Name) and f.id in {"int", "len", "max", "min"})
        for f in calls
    )
