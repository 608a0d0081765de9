"""The names that statements and expressions read and bind."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Set

# Built-in functions that do not change their arguments.
_READING = {"len", "set", "list", "tuple", "sorted", "min", "max", "sum", "any", "all", "bool"}


def names_in(*nodes: ast.AST, context: type[ast.expr_context] | None = None) -> Set[str]:
    """The names in some nodes, each once: all of them, or those in a context (read, bound)."""
    found = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id: None for n in found if context is None or isinstance(n.ctx, context)}.keys()


def read_in(*nodes: ast.AST) -> Set[str]:
    """The names that some nodes read."""
    return names_in(*nodes, context=ast.Load)


def bound_in(*nodes: ast.AST) -> Set[str]:
    """The names that some nodes bind."""
    return names_in(*nodes, context=ast.Store)


def assigned_in(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The targets of a statement, each with its value, or None if that is not known."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if not isinstance(target, ast.Tuple):
                    yield target, value
                    continue
                values = value.elts if isinstance(value, ast.Tuple) else []
                yield from itertools.zip_longest(target.elts, values[: len(target.elts)])
        case ast.AnnAssign(target=target, value=value) | ast.AugAssign(target=target, value=value):
            yield target, value if isinstance(statement, ast.AnnAssign) else None


def parameters_in(node: ast.AST) -> Set[str]:
    """The parameters of the functions and lambdas in a node."""
    return {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}


def uses_of(
    node: ast.AST, name: str, context: type[ast.expr_context] = ast.expr_context
) -> list[ast.Name]:
    """The occurrences of a name in a node: all of them, or those in a context (read, bound)."""
    named = (n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name)
    return [n for n in named if isinstance(n.ctx, context)]


def stays_as_it_is(function: ast.FunctionDef, use: ast.Name) -> bool:
    """Whether a list variable is, apart from one use, only unpacked, counted or iterated over.

    Any other use may change the list: `xs.reverse()`, `shuffle(xs)`, `ys = xs`.
    """
    harmless: set[ast.expr] = {use}
    for node in ast.walk(function):
        match node:
            case ast.AugAssign(target=ast.Name(id=name)) if name == use.id:
                return False
            case ast.Starred(value=value):
                harmless.add(value)
            case ast.Call(func=ast.Name(id=name), args=args) if name in _READING:
                harmless.update(args)
            case ast.Compare(left=left, comparators=others):
                harmless.update([left, *others])
            case ast.For(iter=value) | ast.comprehension(iter=value):
                harmless.add(value)
    return all(isinstance(n.ctx, ast.Store) or n in harmless for n in uses_of(function, use.id))


def body_of(function: ast.FunctionDef) -> list[ast.stmt]:
    """A function's statements without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body
