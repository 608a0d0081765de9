"""Which way a branch goes, as far as that is known before the model runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from slapo_rewrite.patterns.values import Value
from slapo_rewrite.source.facts import Constant, Facts, Function, Submodule, Tensor, is_plain

_UNKNOWN = object()
# Something that is there: not None, and nothing else is known of it.
_THERE = object()
_COMPARED: dict[str, Callable[[Any, Any], object]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "is": operator.is_,
    "is not": operator.is_not,
}


def decided(test: Value, facts: Facts, given: Mapping[str, object]) -> bool | None:
    """Whether a condition holds; None where that depends on what is not known.

    Attributes of the module that are constants count as known, the training flag does not.

    Args:
        test: The condition.
        facts: Of the module.
        given: Arguments of the function that are taken as constants.
    """
    value = _known(test, facts, given)
    return bool(value) if value is not _THERE and is_plain(value) else None


def _known(value: Value, facts: Facts, given: Mapping[str, object]) -> object:
    parts = [v for _, v in value.arguments]
    match value.operation:
        case "constant":
            return value.literal
        case "parameter" if value.literal in given and value.inside is None:
            found = given[str(value.literal)]
            return found if is_plain(found) else _THERE
        case "attribute":
            return _held(str(value.literal), facts)
        case "not":
            inner = decided(parts[0], facts, given)
            return _UNKNOWN if inner is None else not inner
        case "and" | "or":
            return _joined(value.operation, [decided(part, facts, given) for part in parts])
        case "choice":
            way = decided(parts[0], facts, given)
            return _UNKNOWN if way is None else _known(parts[1 if way else 2], facts, given)
        case name if name in _COMPARED and len(parts) == 2:
            return _compared(name, *(_known(part, facts, given) for part in parts))
    return _UNKNOWN


def _held(path: str, facts: Facts) -> object:
    match facts.look(path):
        case Constant(value):
            return value
        case Submodule() | Tensor() | Function():
            return _THERE
    return _UNKNOWN


def _joined(name: str, ways: list[bool | None]) -> object:
    ends = name == "or"  # the value that settles it
    if ends in ways:
        return ends
    return _UNKNOWN if None in ways else not ends


def _compared(name: str, left: object, right: object) -> object:
    if _UNKNOWN in (left, right):
        return _UNKNOWN
    if _THERE in (left, right):
        return name == "is not" if None in (left, right) and name.startswith("is") else _UNKNOWN
    try:
        return bool(_COMPARED[name](left, right))
    except TypeError:
        return _UNKNOWN
