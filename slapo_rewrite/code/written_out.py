"""Rewrites expressions of a function in terms of a call's arguments."""

from __future__ import annotations

import ast
import copy

from slapo_rewrite.code.arguments import argument_of, parameters
from slapo_rewrite.code.dataflow import body_of, bound_in, names_in, parameters_in
from slapo_rewrite.code.syntax import REPEATABLE
from slapo_rewrite.code.text import within

# The syntax of arguments that may be evaluated several times, or in another order.
_PLAIN = (*REPEATABLE, ast.UnaryOp, ast.unaryop, ast.Tuple, ast.Subscript, ast.Slice)
# Expressions that bind names, or that are not plain values.
_OWN_NAMES = (ast.Lambda, ast.comprehension, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def with_arguments(expr: ast.expr, function: ast.FunctionDef, call: ast.Call) -> ast.expr | None:
    """An expression of a function, with its parameters replaced by the arguments of a call.

    The function must not reassign the parameters. The result has the call's position. None if an
    argument is not known, or if it may not be evaluated twice.
    """
    own = names_in(expr) & {*parameters(function)}
    given = {name: argument_of(function, call, name) for name in own}
    for value in given.values():
        is_there = isinstance(value, ast.Constant) or (value is not None and within(call, value))
        if value is None or not is_there or not all(isinstance(n, _PLAIN) for n in ast.walk(value)):
            return None

    class Writer(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return copy.deepcopy(given.get(node.id)) or node

    written: ast.expr = Writer().visit(copy.deepcopy(expr))
    for node in ast.walk(written):
        ast.copy_location(node, call)
    return written


def returned_by(
    function: ast.FunctionDef,
    returned: ast.expr,
    made: ast.expr,
    call: ast.Call,
    caller: ast.FunctionDef,
) -> ast.Call | None:
    """The call that a function only returns, in terms of its caller's variables.

    `made` is that call, the value of `returned`, in the function's own terms. None if the function
    does anything else, or if arguments contain calls.
    """
    match body_of(function):
        case [ast.Return(value=value)] if value is returned and not function.decorator_list:
            nodes = [*ast.walk(made)]
        case _:
            return None
    if any(isinstance(n, _OWN_NAMES) or (isinstance(n, ast.Call) and n is not made) for n in nodes):
        return None
    in_caller = {*bound_in(caller), *parameters_in(caller)}
    if not in_caller.isdisjoint(names_in(made) - {*parameters(function)}):
        return None  # the name has another meaning in the caller
    written = with_arguments(made, function, call)
    return written if isinstance(written, ast.Call) else None
