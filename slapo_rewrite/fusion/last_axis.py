"""How many features a match works on: the length of its operands' last axis, where it is known."""

from __future__ import annotations

import ast
from typing import Any

from slapo_rewrite.fusion.rule import RuleMatch
from slapo_rewrite.patterns.value_graph import Value

# What gives as many features as its first argument has.
KEEPING = ("to", "contiguous", "dropout", "layer_norm", "rms_norm", "silu", "gelu", "relu")
# What layers call the number of features that they give.
GIVEN_BY = ("out_features", "nf", "embedding_dim")


def features_of(found: RuleMatch) -> int | None:
    """The number of features of what a match works on; None where the text does not tell.

    A weight or bias says it, else the layer that gives an operand, else the shape it is viewed in.
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
    """The length of a value's last axis, as far as it can be followed back in its function."""
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
