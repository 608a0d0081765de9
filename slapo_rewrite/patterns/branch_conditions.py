"""Evaluates conditions of branches that are known before the model runs."""

from __future__ import annotations

from collections.abc import Mapping

from slapo_rewrite.code.evaluate import (
    UNKNOWN,
    Constant,
    Unknown,
    Worth,
    is_plain,
    operated,
    truth_of,
)
from slapo_rewrite.code.facts import Facts, Function, Submodule, Tensor
from slapo_rewrite.patterns.canonical_ops import COMPARE
from slapo_rewrite.patterns.value_graph import Value

_OPERATORS = {name: operator for operator, name in COMPARE.items()}


def decided(test: Value, facts: Facts, given: Mapping[str, object]) -> bool | None:
    """The truth value of a condition; None if it depends on unknown values.

    Constant attributes of the module are known, the training flag is not.
    """
    worth = _worth(test, facts, given)
    known = isinstance(worth, Constant) and is_plain(worth.value)
    return truth_of(worth) if known else None


def _worth(value: Value, facts: Facts, given: Mapping[str, object]) -> Worth:
    parts = [v for _, v in value.arguments]
    match value.operation:
        case "constant":
            return Constant(value.literal)
        case "parameter" if value.literal in given and value.inside is None:
            found = given[str(value.literal)]
            return Constant(found) if is_plain(found) else Unknown(True)
        case "attribute":
            fact = facts.look(str(value.literal))
            if isinstance(fact, Constant):
                return fact
            return Unknown(isinstance(fact, Submodule | Tensor | Function))
        case "not":
            way = decided(parts[0], facts, given)
            return UNKNOWN if way is None else Constant(not way)
        case "and" | "or" as name:
            ways = [decided(part, facts, given) for part in parts]
            ends = name == "or"  # the operand value that decides
            if ends in ways:
                return Constant(ends)
            return UNKNOWN if None in ways else Constant(not ends)
        case "choice":
            way = decided(parts[0], facts, given)
            return UNKNOWN if way is None else _worth(parts[1 if way else 2], facts, given)
        case name if name in _OPERATORS and len(parts) == 2:
            return operated(_OPERATORS[name], *(_worth(part, facts, given) for part in parts))
    return UNKNOWN
