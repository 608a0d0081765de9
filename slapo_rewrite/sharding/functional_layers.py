"""Functional calls with a layer's parameters: `F.linear(x, self.up.weight, self.up.bias)`.

With all of the layer's parameters, such a call is equivalent to calling the layer. It is analysed
and rewritten as that call, since a sharded layer adds its bias once and sums its input's gradient.
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
    """The layer that a functional call is equivalent to, the call's place, and the layer's text."""
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
    """Whether a module's `forward` is that of `nn.Linear`."""
    return type(module).forward is nn.Linear.forward


def _named(call: ast.expr | None) -> str | None:
    """The text of the layer in a call's second argument, `<layer>.weight`."""
    if not isinstance(call, ast.Call):
        return None
    weight = arguments_by(call, "input", "weight").get("weight")
    if not isinstance(weight, ast.Attribute) or weight.attr != "weight":
        return None
    return ast.unparse(weight.value)
