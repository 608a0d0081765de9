"""Calls of a layer that are written as what it computes: `F.linear(x, self.up.weight, ...)`.

With all of a layer's parameters, and in one call, that is the layer's own call, and is followed and
written as one: a sharded layer knows when its bias is to be added, and its gradient to be summed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn import functional

from slapo_rewrite.code.arguments import arguments_by
from slapo_rewrite.code.text import Place
from slapo_rewrite.sharding.operation_places import calling_frame, expression_at, place_of


def spelled_call(
    layers: Iterable[nn.Module],
    func: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    editable: Callable[[str], str | None],
) -> tuple[nn.Module, Place, str] | None:
    """The layer whose call an operation is, with the call's place and how it names the layer."""
    if func is not functional.linear or len(args) + len(kwargs) not in (2, 3) or not args:
        return None
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    layer = next((m for m in layers if m._parameters.get("weight") is given.get("weight")), None)
    if layer is None or layer._parameters.get("bias") is not given.get("bias"):
        return None
    frame = calling_frame()
    place = place_of(frame) if frame is not None else None
    name = _named(expression_at(place, editable)) if place is not None else None
    return (layer, place, name) if place is not None and name is not None else None


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what `F.linear` does of its parameters."""
    return type(module).forward is nn.Linear.forward


def _named(call: ast.expr | None) -> str | None:
    """How a call names the layer whose weight it is given second."""
    if not isinstance(call, ast.Call):
        return None
    weight = arguments_by(call, "input", "weight").get("weight")
    if not isinstance(weight, ast.Attribute) or weight.attr != "weight":
        return None
    return ast.unparse(weight.value)
