"""Output heads without a layer of their own: `x @ self.embedding.weight.T`, with a sharded table.

If the collectives are to be inferred, such a product is replaced by one with whole logits: the
input's gradient is all-reduced, and the parts of the logits are gathered.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import torch

from slapo_rewrite.sharding.operation_places import calling_frame, expression_at
from slapo_rewrite.sharding.placements import REPLICATE, State
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import TiedHead

_PRODUCTS = {"matmul", "__matmul__", "mm"}
_AXES = {"0, 1", "1, 0", "-1, -2", "-2, -1"}
_TRANSPOSED = {"t": {""}, "transpose": _AXES, "swapaxes": _AXES, "permute": {"1, 0"}}
# Equations of `einsum` for a product of features with the rows of a table.
_EQUATION = re.compile(r"(?P<rows>\w*|\.\.\.)(\w),(\w)\2->(?P=rows)\3")


def logits(run: Run, func: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The logits of a product with a sharded embedding's table; None for any other operation."""
    if name == "einsum":
        args = args[1:]
    elif name not in {*_PRODUCTS, "linear"}:
        return None
    if len(args) != 2 or kwargs.keys() - {"bias"}:
        return None
    if kwargs.get("bias") is not None or not run.request.tied_heads:
        return None
    x, table = args
    layers: Iterator[Any] = (
        m for m in run.layers if str(m._followed_path) in run.request.tied_heads
    )
    layer = next((m for m in layers if _is_table(table, m.weight, name not in _PRODUCTS)), None)
    if layer is None or run.flow.of(x).kind != REPLICATE:
        return None
    place, owner = run.editable_place(), run.method_owner(calling_frame())
    written = expression_at(place, run.editable) if place is not None else None
    if place is None or owner is None or head_of(written) is None:
        return None
    if run.request.borders.get(owner):
        return None  # the schedule places the collectives itself
    path = str(layer._followed_path)
    run.flow.cover(x, path)
    run.followed.tied_heads.add(TiedHead(place, owner, path))
    shape = run.next_entry(func).outputs[0]
    whole = run.made(x, shape, x.requires_grad or layer.weight.requires_grad)
    run.whole[id(whole)] = shape
    run.flow.set(whole, State())
    run.alive.append(whole)
    return whole


def _is_table(tensor: Any, weight: torch.Tensor, as_it_is: bool) -> bool:
    """Whether a factor is the table as it is, or its transpose."""
    if as_it_is or not isinstance(tensor, torch.Tensor):
        return tensor is weight
    whole = weight.t()
    same = tensor.shape == whole.shape and tensor.stride() == whole.stride()
    return tensor._base is weight and same


def head_of(product: ast.AST | None) -> ast.expr | None:
    """The expression of the embedding whose `weight` a product is written with, if it is."""
    match product:
        case ast.BinOp(op=ast.MatMult(), left=x, right=table):
            transposed = True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[x, table]):
            transposed = name in _PRODUCTS
        case ast.Call(args=[ast.Constant(value=str(equation)), x, table]):
            found = _EQUATION.fullmatch(equation.replace(" ", ""))
            letters = "".join(found.groups()) if found else "--"
            if len(letters.replace(".", "")) > len({*letters} - {"."}):
                return None
            transposed = False
        case _:
            return None
    table, turned = _below(table, x)
    if turned is not transposed or not isinstance(table, ast.Attribute) or table.attr != "weight":
        return None
    # A call's result need not be the embedding, even if its `weight` is the table.
    named = isinstance(table.value, ast.Name | ast.Attribute | ast.Subscript)
    return table.value if named else None


def _below(factor: ast.expr, x: ast.expr) -> tuple[ast.expr, bool]:
    """A factor without transposes and casts to the dtype of `x`, and whether it is transposed."""
    turns: bool | None = True
    match factor:
        case ast.Attribute(value=inner, attr="T" | "mT"):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), args=[inner, *to]):
            turns = _turns(name, to)
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=to):
            is_cast = (name == "type_as" and _alike(to, [x])) or (
                name == "to" and _alike(to, [ast.Attribute(x, "dtype", ast.Load())])
            )
            turns = False if is_cast else _turns(name, to)
        case _:
            return factor, False
    if turns is None:
        return factor, False
    table, turned = _below(inner, x)
    return table, turns is not turned


def _turns(name: str, axes: list[ast.expr]) -> bool | None:
    """True if an operation transposes a matrix; None for any other."""
    return True if ", ".join(map(ast.unparse, axes)) in _TRANSPOSED.get(name, ()) else None


def _alike(some: list[ast.expr], others: list[ast.expr]) -> bool:
    return [*map(ast.dump, some)] == [*map(ast.dump, others)]
