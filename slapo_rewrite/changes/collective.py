"""Writes calls of collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite.code.build import Operand, call, parsed


@dataclass(frozen=True)
class Collective:
    """A call of a collective: its name, and keyword arguments after the value."""

    function: str
    keywords: tuple[tuple[str, object], ...] = ()

    def of(self, value: Operand, helper: Callable[[str, str], str]) -> cst.Call:
        """The call with a value; `helper` returns the reference to a helper module's name."""
        name = helper("tensor_parallel", self.function)
        return call(name, value, keywords=[(k, repr(v)) for k, v in self.keywords])


def through(
    collectives: Sequence[Collective], value: Operand, helper: Callable[[str, str], str]
) -> cst.BaseExpression:
    """A value with collectives applied in order."""
    node = parsed(value) if isinstance(value, str) else value
    for collective in collectives:
        node = collective.of(node, helper)
    return node


# For a subclass that differs by a collective only: the name's prefix, and the docstring's phrase.
_DOING = {
    "scatter": ("Scattering", "scattered over"),
    "all_gather": ("Gathering", "gathered from"),
    "reduce_scatter": ("Scattering", "summed and scattered over"),
    "all_reduce": ("Reducing", "summed over"),
    "all_to_all": ("Exchanging", "split along another axis by"),
}


def described(sides: Sequence[tuple[str, Sequence[Collective]]]) -> tuple[str, str]:
    """The prefix and phrase of a subclass that only adds collectives around `forward`."""
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
