"""Finds where methods read or write sizes and parameters of modules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial

from slapo_rewrite.changes.class_hierarchy import ClassHierarchy
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.code.build import call
from slapo_rewrite.code.names import module_paths
from slapo_rewrite.code.syntax import end_position
from slapo_rewrite.code.text import within

# Attributes, and built-in calls, that use a parameter without its values.
_FACTS = {"dtype", "device", "shape", "ndim", "is_meta", "requires_grad"}
_QUESTIONS = {"hasattr", "isinstance", "type", "id"}


def readings(
    classes: ClassHierarchy, class_name: str, path: str, attribute: str
) -> Iterator[ast.Attribute]:
    """The expressions in which a class reads an attribute of the module at a path below it."""
    for method in classes.methods(class_name):
        for node in _read(method, attribute):
            if path in module_paths(node.value, method):
                yield node


def in_forward(classes: ClassHierarchy, class_name: str, node: ast.AST) -> bool:
    """Whether an expression is in the `forward` that instances of a class run."""
    forward = classes.method(class_name, "forward")
    return forward is not None and within(forward, node)


def values_read(method: ast.FunctionDef, name: str) -> Iterator[ast.Attribute]:
    """The expressions in which a method reads the values of an attribute of that name."""
    about = set(map(id, _asked_about(method)))
    return (node for node in _read(method, name) if id(node) not in about)


def cut_what_is_written(
    text: ClassText, is_owner: Callable[[ast.expr, ast.FunctionDef], bool], name: str | None = None
) -> None:
    """Cuts values that methods copy into parameters to a rank's part: `self.b.copy_(values)`.

    Args:
        text: The class.
        is_owner: Whether an expression in a method is the module that owns the parameters.
        name: The parameter's name; None for all of the module's, of which some may be whole.
    """
    for method in text.methods():
        for node in ast.walk(method):
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        ast.Attribute(ast.Attribute() as into, "data") | (ast.Attribute() as into),
                        "copy_",
                    ),
                    args=[value],
                ) if name in (None, into.attr) and is_owner(into.value, method):
                    function = text.helper("tensor_parallel", "own_part")
                    made = partial(call, function, ast.unparse(into.value), f'"{into.attr}"')
                    text.replace(value, made, f"cut what is written into `{into.attr}`")


def _read(method: ast.FunctionDef, name: str) -> Iterator[ast.Attribute]:
    """The expressions in which a method reads an attribute of that name of any object."""
    found = (node for node in ast.walk(method) if isinstance(node, ast.Attribute))
    return (n for n in found if isinstance(n.ctx, ast.Load) and n.attr == name)


def is_question(method: ast.FunctionDef, end: tuple[int, int]) -> bool:
    """Whether the read that ends at a position uses the parameter without its values."""
    found = (*_asked_about(method), *(n for n in ast.walk(method) if _is_call_of(n, {"hasattr"})))
    return any(end_position(n) == end for n in found if isinstance(n, ast.expr))


def _asked_about(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _FACTS:
            yield node.value
        elif isinstance(node, ast.Call) and _is_call_of(node, _QUESTIONS):
            yield from node.args
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            yield from (node.left, *node.comparators)


def _is_call_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
