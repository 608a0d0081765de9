"""What a constructor writes into parameters of which a rank has its part."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial

from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.code.build import call


def cut_what_is_written(
    text: ClassText, is_owner: Callable[[ast.expr, ast.FunctionDef], bool], name: str | None = None
) -> None:
    """Writes a rank's part of what methods copy: `self.proj.bias.copy_(values)`.

    Args:
        text: The class.
        is_owner: Whether an expression in a method is the module that holds the parameters.
        name: The parameter's name; None for all of the module's, of which some may be whole.
    """
    for method in text.methods():
        for node in ast.walk(method):
            into = _copied_into(node)
            if into is None or name not in (None, into.attr) or not is_owner(into.value, method):
                continue
            assert isinstance(node, ast.Call)
            function = text.helper("tensor_parallel", "own_part")
            text.replace(
                node.args[0],
                partial(call, function, ast.unparse(into.value), f'"{into.attr}"'),
                f"cut what is written into `{into.attr}` to this rank's part",
            )


def _copied_into(node: ast.AST) -> ast.Attribute | None:
    """The parameter that a call copies its one argument into."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "copy_":
        return None
    into = node.func.value
    if isinstance(into, ast.Attribute) and into.attr == "data":
        into = into.value
    return into if isinstance(into, ast.Attribute) else None
