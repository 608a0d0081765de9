"""Analyses a file's own handling of precision: reads of a dtype, blocks without autocast."""

from __future__ import annotations

import ast

from slapo_rewrite.code.syntax import extent
from slapo_rewrite.code.text import Place

# Methods of tensors that use a dtype argument only as the dtype of their result.
_CASTS = {"to", "type", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "softmax"}
_TORCH = {"torch", "nn", "F"}


def is_harmless(tree: ast.Module, place: Place) -> bool:
    """Whether a dtype that is read at a place is only used to cast others to it."""
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    reads = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "dtype")
    here = (n for n in reads if extent(n) == place.at)
    return any(_is_cast(node, above) for node in here)


def without_autocast(tree: ast.Module, place: Place) -> bool:
    """Whether a place is in a block that computes in the precision of its operands.

    That is `with torch.autocast(..., enabled=False):`, or a function whose name ends like that.
    """
    for block in ast.walk(tree):
        if isinstance(block, ast.With) and block.lineno <= place.line <= (block.end_lineno or 0):
            calls = (item.context_expr for item in block.items)
            if any(isinstance(call, ast.Call) and _disables(call) for call in calls):
                return True
    return False


def _disables(call: ast.Call) -> bool:
    named = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {keyword.arg: keyword.value for keyword in call.keywords}.get("enabled")
    return named.endswith("autocast") and isinstance(given, ast.Constant) and given.value is False


def _is_cast(node: ast.expr, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether an expression is only passed to functions that make a tensor of that dtype."""
    parent = above[node]
    match parent:
        case ast.Call(func=ast.Attribute(attr="finfo")):
            # The smallest number of either dtype masks the values that it is added to or replaces.
            return isinstance(taken := above[parent], ast.Attribute) and taken.attr == "min"
        case ast.Call(func=ast.Attribute(attr=name)) if parent.func is not node:
            return name in _CASTS
        case ast.keyword(arg="dtype"):
            call = above[parent]
            return isinstance(call, ast.Call) and _makes_tensor(call.func)
        case ast.Assign() | ast.Tuple() if name := _name_given(node, above):
            function = _function_of(parent, above)
            return function is not None and all(
                _is_cast(read, above)
                for read in ast.walk(function)
                if isinstance(read, ast.Name) and read.id == name
                if isinstance(read.ctx, ast.Load)
            )
        case ast.Compare():
            return _chooses_a_cast(parent, above)
    return False


def _name_given(value: ast.expr, above: dict[ast.AST, ast.AST]) -> str:
    """The variable that a value is assigned to, as `b` for the 2 in `a, b = 1, 2`; else ''."""
    match above[value], above[above[value]]:
        case ast.Assign(targets=[ast.Name(id=name)]), _:
            return name
        case ast.Tuple(elts=values), ast.Assign(targets=[ast.Tuple(elts=targets)]):
            match targets[values.index(value) : values.index(value) + 1]:
                case [ast.Name(id=name)] if len(targets) == len(values):
                    return name
    return ""


def _makes_tensor(function: ast.expr) -> bool:
    """Whether a function is torch's, except `finfo`, or a casting method."""
    if isinstance(function, ast.Attribute) and function.attr in _CASTS:
        return True
    while isinstance(function, ast.Attribute):
        if function.attr == "finfo":
            return False
        function = function.value
    return isinstance(function, ast.Name) and function.id in _TORCH


def _chooses_a_cast(test: ast.expr, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether a condition only decides about casts: `if ...: x = x.to(...)`."""
    node: ast.AST = test
    while isinstance(above[node], ast.BoolOp):
        node = above[node]
    statement = above[node]
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and all(map(_casts_itself, statement.body))
    )


def _casts_itself(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=given), attr="to")),
        ):
            return name == given
    return False


def _function_of(node: ast.AST, above: dict[ast.AST, ast.AST]) -> ast.FunctionDef | None:
    while node in above:
        node = above[node]
        if isinstance(node, ast.FunctionDef):
            return node
    return None
