"""Heads without a layer of their own: `x @ self.embedding.weight.T`, of a table that is split.

Where the collectives are left to be inferred, such a product becomes one of whole values: the input
gets the sum of its gradients, and the parts of the logits are gathered.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from slapo_rewrite.sharding.operation_places import calling_frame, place_of, text_at
from slapo_rewrite.sharding.placements import REPLICATE, State
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import TiedHead

_PRODUCTS = {"matmul", "__matmul__", "mm"}
_TRANSPOSED = {"T", "mT", "t()", "transpose(0, 1)", "transpose(1, 0)", "transpose(-1, -2)"}


def logits(run: Run, func: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """What the product with a split embedding's table gives; None where an operation is none.

    Raises:
        PlacementError: The gradient of the input is summed already.
    """
    if name not in {*_PRODUCTS, "linear"} or len(args) != 2 or kwargs.keys() - {"bias"}:
        return None
    if kwargs.get("bias") is not None or not run.request.tied_heads:
        return None
    x, table = args
    layers: Iterator[Any] = (
        m for m in run.layers if str(m._followed_path) in run.request.tied_heads
    )
    layer = next((m for m in layers if _is_table(table, m.weight, name == "linear")), None)
    if layer is None or run.flow.of(x).kind != REPLICATE:
        return None
    frame = calling_frame()
    place = place_of(frame) if frame else None
    if frame is None or place is None or not run.editable(frame.f_code.co_filename):
        return None
    owner, path = run.method_owner(frame), str(layer._followed_path)
    try:
        written = head_of(ast.parse(text_at(place, run.editable).strip(), mode="eval").body)
    except SyntaxError:
        return None
    if owner is None or written is None or run.request.borders.get(owner):
        return None  # or it is stated there what is done
    run.flow.cover(x, path)
    run.followed.tied_heads.add(TiedHead(place, owner, path))
    shape = run.next_entry(func).outputs[0]
    run.depth += 1
    try:
        trained = x.requires_grad or layer.weight.requires_grad
        whole: torch.Tensor = x.new_empty(shape, requires_grad=trained)
    finally:
        run.depth -= 1
    run.whole[id(whole)] = shape
    run.flow.set(whole, State())
    run.alive.append(whole)
    return whole


def _is_table(tensor: Any, weight: torch.Tensor, as_it_is: bool) -> bool:
    """Whether a factor is a table, or its transpose."""
    if as_it_is or not isinstance(tensor, torch.Tensor):
        return tensor is weight
    whole = weight.t()
    same = tensor.shape == whole.shape and tensor.stride() == whole.stride()
    return tensor._base is weight and same


def head_of(product: ast.AST) -> ast.expr | None:
    """The embedding by whose table a product is written, if it is written so that that shows."""
    match product:
        case ast.BinOp(op=ast.MatMult(), right=table):
            transposed = True
        case ast.Call(func=function, args=[_, table]):
            transposed = getattr(function, "attr", getattr(function, "id", "")) in _PRODUCTS
        case _:
            return None
    if transposed:
        text = ast.unparse(table)
        way = next((way for way in _TRANSPOSED if text.endswith(f".weight.{way}")), None)
        if way is None:
            return None
        table = ast.parse(text.removesuffix(f".{way}"), mode="eval").body
    if not isinstance(table, ast.Attribute) or table.attr != "weight":
        return None
    # What a call gives need not be the embedding, although its `weight` is the table.
    named = isinstance(table.value, ast.Name | ast.Attribute | ast.Subscript)
    return table.value if named else None
