"""How many features a match works on: the length of its operands' last axis, where that is known."""

from __future__ import annotations

from typing import Any

from slapo_rewrite.fusion.rule import RuleMatch
from slapo_rewrite.patterns.value_graph import Value

# What gives as many features as its first argument has.
KEEPING = ("to", "contiguous", "dropout", "item", "layer_norm", "rms_norm", "silu", "gelu", "relu")
# What layers call the number of features that they give.
GIVEN_BY = ("out_features", "nf", "embedding_dim")


def features_of(found: RuleMatch) -> int | None:
    """The number of features of what a match works on; None where the text does not tell.

    A weight or bias says it, else the layer that gives an operand, else the shape it is viewed in.
    """
    if found.linear is not None:
        return _of_layer(found.attribute(found.linear))
    vectors = [v for name in found.match.values if (v := _vector(found.live(name))) is not None]
    if vectors:
        return vectors[0]
    every = (last_axis(value, found) for value in found.match.values.values())
    return next((size for size in every if size is not None), None)


def last_axis(value: Value, found: RuleMatch) -> int | None:
    """The length of a value's last axis, as far as it can be followed back in its function."""
    while True:
        given = [argument for _, argument in value.arguments]
        if value.called is not None:
            size = _of_layer(found.attribute(value.called))
            if size is not None or not given or value.stateful:
                return size
        elif value.operation in ("view", "reshape"):
            return _number(_last_of(given[-1]), found)
        elif value.operation == "transpose" and not _is_at_front(given[1:]):
            return None
        elif value.operation not in (*KEEPING, "transpose"):
            return None
        value = given[0]


def _vector(live: Any) -> int | None:
    """How many numbers a weight or bias holds that is one for each feature."""
    shape = getattr(live, "shape", ())
    return int(shape[0]) if len(shape) == 1 else None


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
    if isinstance(size, Value):
        read = size.operation == "attribute"
        size = found.attribute(str(size.literal)) if read else size.literal  # type: ignore[assignment]
    return size if isinstance(size, int) and size > 0 else None


def _is_at_front(axes: list[Value]) -> bool:
    """Whether axes are counted from the front, and are not the last of four."""
    return all(isinstance(a.literal, int) and 0 <= a.literal < 3 for a in axes)
