"""Finds the number of features of a match: the length of its operands' last axis."""

from __future__ import annotations

import ast
from typing import Any

from slapo_rewrite.fusion.rule import RuleMatch
from slapo_rewrite.patterns.value_graph import Value

# Operations that keep the number of features of their first argument.
KEEPING = ("to", "contiguous", "dropout", "layer_norm", "rms_norm", "silu", "gelu", "relu")
# The attributes of layers with their number of output features.
GIVEN_BY = ("out_features", "nf", "embedding_dim")


def features_of(found: RuleMatch) -> int | None:
    """The number of features of a match's operands; None if it is not known.

    It comes from a weight or bias, else from the layer that computes an operand, else from a view.
    """
    if found.linear is not None:
        return _of_layer(found.attribute(found.linear))
    shapes = (getattr(found.live(name), "shape", None) for name in found.match.values)
    vectors = [int(shape[0]) for shape in shapes if shape is not None and len(shape) == 1]
    if vectors:
        return vectors[0]
    every = (last_axis(value, found) for value in found.match.values.values())
    return next((size for size in every if size is not None), None)


def last_axis(value: Value, found: RuleMatch) -> int | None:
    """The length of a value's last axis, traced back through its function; None if not known."""
    while True:
        given = [argument for _, argument in value.arguments]
        size = _of_layer(found.attribute(value.called)) if value.called is not None else None
        if size is not None:
            return size
        if value.operation in ("view", "reshape"):
            return _number(_last_of(given[-1]), found)
        if value.called is not None and value.inner is not None:
            value = value.inner
        elif _keeps_last(value, given):
            value = given[0]
        else:
            return None


def _keeps_last(value: Value, given: list[Value]) -> bool:
    """Whether a value has the last axis of its first argument."""
    match value.node:
        case ast.Subscript(slice=ast.Tuple(elts=[*_, ast.Slice(None, None, None)])):
            return value.operation == "item"
    if value.operation == "transpose":  # of heads and tokens, once the former are an axis
        axes = [axis.literal for axis in given[1:]]
        return given[0].operation in ("view", "reshape") and axes == [1, 2]
    return value.operation in KEEPING


def _of_layer(layer: Any) -> int | None:
    sizes = (getattr(layer, name, None) for name in GIVEN_BY)
    return next((size for size in sizes if isinstance(size, int)), None)


def _last_of(shape: Value) -> Value | int | None:
    """The last of some sizes."""
    if isinstance(shape.literal, tuple) and shape.literal:
        return shape.literal[-1] if isinstance(shape.literal[-1], int) else None
    if shape.operation == "tuple" and shape.arguments:
        return shape.arguments[-1][1]
    return shape


def _number(size: Value | int | None, found: RuleMatch) -> int | None:
    known: Any = size
    if isinstance(size, Value):
        is_read = size.operation == "attribute"
        known = found.attribute(str(size.literal)) if is_read else size.literal
    return known if isinstance(known, int) and known > 0 else None
