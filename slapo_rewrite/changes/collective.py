"""Calls of collectives, as they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite.code.build import Operand, call, parsed


@dataclass(frozen=True)
class Collective:
    """A call of a collective: its name, and keyword arguments beside the value."""

    function: str
    keywords: tuple[tuple[str, object], ...] = ()

    def of(self, value: Operand, helper: Callable[[str, str], str]) -> cst.Call:
        """The call with a value; a name of a helper module is referred to as `helper` says."""
        name = helper("tensor_parallel", self.function)
        return call(name, value, keywords=[(k, repr(v)) for k, v in self.keywords])


def through(
    collectives: Sequence[Collective], value: Operand, helper: Callable[[str, str], str]
) -> cst.BaseExpression:
    """A value that goes through collectives, one after the other."""
    node = parsed(value) if isinstance(value, str) else value
    for collective in collectives:
        node = collective.of(node, helper)
    return node


# What an instance is called, and said to do, that a collective is all that sets apart.
_DOING = {
    "scatter": ("Scattering", "scattered over"),
    "all_gather": ("Gathering", "gathered from"),
    "reduce_scatter": ("Scattering", "summed and scattered over"),
    "all_reduce": ("Reducing", "summed over"),
    "all_to_all": ("Exchanging", "split along another axis by"),
}


def described(sides: Sequence[tuple[str, Sequence[Collective]]]) -> tuple[str, str]:
    """The prefix of a class that only puts collectives around `forward`, and what it is."""
    prefixes, clauses = [], []
    for side, collectives in sides:
        for collective in collectives:
            name, does = _DOING.get(collective.function, ("TensorParallel", ""))
            prefixes.append(name)
            clauses.append(
                f"{side} is {does} the tensor-parallel group"
                if does
                else f"{side}'s gradient is summed over the tensor-parallel group"
            )
    return prefixes[0], "whose " + " and whose ".join(clauses)
