"""Resolves expressions of a method to modules below `self`."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable

from slapo_rewrite.code.arguments import first_parameter
from slapo_rewrite.code.syntax import assignments
from slapo_rewrite.code.text import joined_path


def module_paths(expr: ast.expr, method: ast.FunctionDef) -> tuple[str, ...]:
    """The paths below `self` that an expression of a method may denote, each once.

    Local names are resolved by their assignments: `act = self.up`, a tuple of modules, a loop over
    one. A path is written as in the module tree: `mlp.0.up`. Returns () if it is not below `self`,
    or not known.
    """
    return tuple(dict.fromkeys(_paths(expr, method, 0)))


def self_path(expr: ast.expr) -> str | None:
    """The path of `self.mlp[0].up` as in the module tree, `mlp.0.up`; None for anything else."""
    match expr:
        case ast.Name(id="self"):
            return ""
        case (
            ast.Attribute(value=value, attr=last)
            | ast.Subscript(value=value, slice=ast.Constant(int() | str() as last))
        ):
            above = self_path(value)
            return None if above is None else joined_path(above, str(last))
    return None


def is_name(node: ast.AST, name: str | None) -> bool:
    """Whether a node is this name."""
    return isinstance(node, ast.Name) and node.id == name


def unique(wanted: str, is_taken: Callable[[str], bool], between: str = "") -> str:
    """A name that is not taken: the wanted one, or that with a number appended."""
    others = (f"{wanted}{between}{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([wanted], others) if not is_taken(name))


def _paths(expr: ast.expr | None, method: ast.FunctionDef, depth: int) -> list[str]:
    match expr:
        case ast.Attribute(value=value, attr=attr):
            return [joined_path(each, attr) for each in _paths(value, method, depth)]
        case ast.Subscript(value=value, slice=ast.Constant(int() | str() as index)):
            return [joined_path(each, str(index)) for each in _paths(value, method, depth)]
        case ast.NamedExpr(value=value):
            return _paths(value, method, depth)
        case ast.Name(id=name):
            if name == first_parameter(method):
                return [""]
            return _of_local(name, method, depth + 1)
    return []


def _of_local(name: str, method: ast.FunctionDef, depth: int) -> list[str]:
    """The paths that a local name is bound to, if every binding is to modules."""
    found: list[str] = []
    for each in assignments(method, name) if depth < 5 else ():
        values = _bound(name, each)
        paths = [path for value in values for path in _paths(value, method, depth)]
        if not paths or len(paths) < len(values) or "" in paths:
            return []
        found += paths
    return found


def _bound(name: str, statement: ast.stmt) -> list[ast.expr | None]:
    """The expressions that a statement binds to a name; None for a value that is not known."""
    match statement:
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
            return [_at(name, target, value)]
        case ast.For(target=target, iter=ast.Tuple(elts=elements) | ast.List(elts=elements)):
            return [_at(name, target, element) for element in elements]
    return [None]


def _at(name: str, target: ast.expr, value: ast.expr | None) -> ast.expr | None:
    """The part of a value that a name gets when a target, maybe a tuple, is assigned."""
    if isinstance(target, ast.Name):
        return value if target.id == name else None
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=False)
        found = (_at(name, t, v) for t, v in pairs if len(target.elts) == len(value.elts))
        return next((each for each in found if each is not None), None)
    return None
