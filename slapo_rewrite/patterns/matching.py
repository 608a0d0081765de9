"""Matches the value graph of a pattern with that of a model's function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.patterns.code_sinking import way_hint
from slapo_rewrite.patterns.pattern import Pattern
from slapo_rewrite.patterns.value_graph import Graph, Value, described, equal, region


@dataclass(frozen=True)
class Note:
    """A node of a file with a message about it."""

    file: SourceFile
    node: ast.AST
    note: str = ""


@dataclass(frozen=True)
class Mismatch:
    """The reason why a pattern does not match at a place."""

    reason: str  # the reason, in words
    spots: tuple[Note, ...]  # the places in the model, the decisive one first
    wanted: Note | None = None  # the place in the pattern
    hint: str | None = None  # what the user can do
    matched: int = 0  # how many of the pattern's operations matched
    # Whether the whole pattern matched, but code in between prevents the replacement.
    complete: bool = False
    # Whether a branch or loop in between may contain the rest.
    between: bool = False
    hidden: bool = False  # whether it is inside the body of a called function

    @property
    def reach(self) -> tuple[int, bool, bool, bool]:
        """Sort key of progress: greater is further; mismatches inside calls count less."""
        return self.matched, self.complete, self.between, not self.hidden


@dataclass(frozen=True)
class Bindings:
    """A partial match: values of the model for values of the pattern."""

    held: dict[Value, Value]  # the model's value for each of the pattern's
    nodes: tuple[Value, ...] = ()  # the model's values that the match computes
    calls: tuple[Value, ...] = ()  # the calls whose bodies were entered
    arms: tuple[tuple[ast.AST, ast.AST], ...] = ()  # the model's branch for each of the pattern's

    def hold(self, wanted: Value, value: Value) -> Bindings:
        """The bindings with one more pair."""
        computed = () if wanted.is_leaf or value in self.nodes else (value,)
        held = self.held if wanted in self.held else {**self.held, wanted: value}
        return replace(self, held=held, nodes=(*self.nodes, *computed))

    @property
    def matched(self) -> int:
        """The number of the pattern's operations that are bound."""
        return sum(not wanted.is_leaf for wanted in self.held)


# Operations that merge values of several paths.
_SEVERAL = ("choice", "merge", "loop")


class Matcher:
    """Matches one pattern in one graph, and records the nearest miss."""

    def __init__(self, pattern: Pattern, graph: Graph) -> None:
        self.pattern, self.graph = pattern, graph
        self.nearest: Mismatch | None = None  # the mismatch of the attempt that came furthest
        self.branched = False  # whether an attempt may have ended at a branch

    def starts(self) -> list[Value]:
        """The values that may be, or contain, the pattern's first result."""
        first = self.pattern.first
        if "call_module" in first:
            found = list(self.graph.values)
        else:
            found = self.graph.where({*first, *_SEVERAL})
        found = [value for value in found if not (value.number or value.lazy)]
        if not found and self.graph.values:
            wanted = self.pattern.roots[0]
            here = Note(self.graph.file, self.graph.function or self.graph.values[0].node)
            where = Note(wanted.file, wanted.node, described(wanted))
            reason = f"the pattern has {described(wanted)}, but the model has none"
            self.stop(Mismatch(reason, (here,), where))
        return found

    def at(self, value: Value) -> Iterator[Bindings]:
        """The bindings with which the pattern's first result is this value."""
        first, *others = self.pattern.roots
        for pairing in self._pairs(first, value, Bindings({})):
            yield from self._others(others, pairing)

    def _others(self, roots: list[Value], so_far: Bindings) -> Iterator[Bindings]:
        """The bindings extended by the pattern's other results."""
        if not roots:
            yield so_far
            return
        wanted, *others = roots
        if outermost(wanted, so_far) in so_far.held:
            yield from self._others(others, so_far)
            return
        beside = False
        for value in self.graph.values:
            if not (value.number or value.lazy) and self._may_be(wanted, value, so_far):
                for pairing in self._pairs(wanted, value, so_far):
                    beside = True
                    yield from self._others(others, pairing)
        if not beside:
            spots = [Note(v.site.file, v.site.node, "beside this") for v in so_far.nodes[:1]]
            where = Note(wanted.file, wanted.node, described(wanted))
            reason = f"the rest of the pattern is found, but no {described(wanted)}"
            self.stop(Mismatch(reason, tuple(spots), where, None, so_far.matched))

    @staticmethod
    def _may_be(wanted: Value, value: Value, so_far: Bindings) -> bool:
        """A quick test whether a value may be a further result."""
        through = wanted.inner is not None or value.look_through is not None
        alike = wanted.operation in (value.operation, "call_module")
        return (through or alike) and value not in so_far.nodes

    def stop(self, stop: Mismatch) -> None:
        """Records why an attempt ended; keeps the one that came furthest."""
        self.branched |= stop.complete
        if self.nearest is None or stop.reach > self.nearest.reach:
            self.nearest = stop

    def _pairs(self, wanted: Value, value: Value, so_far: Bindings) -> Iterator[Bindings]:
        held = so_far.held.get(wanted)
        if held is not None:
            if self.graph.same(held, value):
                yield so_far if wanted.is_leaf else so_far.hold(wanted, value)
            else:
                self._differs(wanted, value, so_far, held)
        elif wanted.operation == "parameter":
            if (
                value.literal is None
                and value.operation == "constant"
                and "." in str(wanted.literal)
            ):
                self._differs(wanted, value, so_far)
            else:
                yield so_far.hold(wanted, value)
        elif wanted.is_leaf:
            if value.operation == wanted.operation and equal(value.literal, wanted.literal):
                yield so_far.hold(wanted, value)
            else:
                self._differs(wanted, value, so_far)
        else:
            yield from self._computed(wanted, value, so_far)

    def _computed(self, wanted: Value, value: Value, so_far: Bindings) -> Iterator[Bindings]:
        found = False
        if wanted.operation == "call_module":
            pairs = self._module_call(wanted, value)
        else:
            pairs = self._operands(wanted, value)
        for pairing in pairs:
            found = True
            yield from self._all(pairing, self._entered(wanted, value, so_far))
        if value.inner is not None and not value.inner.is_leaf:
            found = True
            through = replace(so_far, calls=(*so_far.calls, value))
            yield from self._pairs(wanted, value.inner, through)
        if wanted.inner is not None:
            found = True
            yield from self._pairs(wanted.inner, value, so_far)
        if not found:
            self._differs(wanted, value, so_far)

    @staticmethod
    def _entered(wanted: Value, value: Value, so_far: Bindings) -> Bindings:
        pairing = so_far.hold(wanted, value)
        if wanted.operation == "choice":
            pairing = replace(pairing, arms=(*pairing.arms, (wanted.node, value.node)))
        return pairing

    def _operands(self, wanted: Value, value: Value) -> Iterable[list[tuple[Value, Value]]]:
        """The pairs of operands, in each equivalent order."""
        if wanted.operation != value.operation or not equal(wanted.literal, value.literal):
            return
        if [name for name, _ in wanted.arguments] != [name for name, _ in value.arguments]:
            return
        ours, theirs = ([v for _, v in each.arguments] for each in (wanted, value))
        if not (wanted.commutes and value.commutes):
            yield list(zip(ours, theirs, strict=True))
            return
        # The result must not depend on which operand is written first.
        ours[:2], theirs[:2] = sorted(ours[:2], key=_rank), sorted(theirs[:2], key=_rank)
        yield list(zip(ours, theirs, strict=True))
        theirs[:2] = theirs[1::-1]
        yield list(zip(ours, theirs, strict=True))

    def _module_call(self, wanted: Value, value: Value) -> Iterable[list[tuple[Value, Value]]]:
        """The pairs for `call_module(regex, x)`, if the value calls a submodule that matches."""
        regex, *operands = wanted.arguments
        if value.called is None or not re.match(str(regex[1].literal), value.called):
            return
        if len(operands) == len(value.given):
            yield [(o, v) for (_, o), (_, v) in zip(operands, value.given, strict=True)]

    def _all(self, pairs: list[tuple[Value, Value]], so_far: Bindings) -> Iterator[Bindings]:
        if not pairs:
            yield so_far
            return
        (wanted, value), *others = pairs
        for pairing in self._pairs(wanted, value, so_far):
            yield from self._all(others, pairing)

    def _differs(
        self, wanted: Value, value: Value, so_far: Bindings, held: Value | None = None
    ) -> None:
        hidden = value.inside is not None
        between = False
        if so_far.held and value.operation in _SEVERAL:
            self.branched |= isinstance(value.node, ast.If)
        if held is None and value.operation in _SEVERAL:
            ways = [inner.operation for _, inner in value.arguments]
            between = wanted.operation in ways or value.operation == "loop"
        reach = (so_far.matched, False, between, not hidden)
        if self.nearest is not None and self.nearest.reach >= reach:
            return
        spots = [Note(value.file, value.node, f"{described(value)} here")]
        reason = f"the pattern has {described(wanted)} where the model has {described(value)}"
        hint = None
        if held is not None:
            reason = f"{described(wanted)} of the pattern would be two different values"
            spots.append(Note(held.file, held.node, "one of them"))
            spots[0] = Note(value.file, value.node, "the other")
        elif between:
            reason = f"{region(value.node)} is in between, where the value may differ"
            hint = way_hint(value.node, self.graph.function)
        elif wanted.operation == value.operation == "constant":
            hint = "values that vary have to be parameters of the pattern"
        elif wanted.operation == "constant" and value.operation == "training":
            hint = "make it a parameter of the pattern: `training=training`"
        elif {"*0", "*1", "*2", "**1", "**2"} & {name for name, _ in value.arguments}:
            hint = "a star-argument hides the operands"
        where = Note(wanted.file, wanted.node, described(wanted))
        self.stop(
            Mismatch(reason, tuple(spots), where, hint, so_far.matched, False, between, hidden)
        )


def outermost(wanted: Value, pairing: Bindings) -> Value:
    """A result of the pattern, or the inner value that was bound in place of a call."""
    while wanted not in pairing.held and wanted.inner is not None:
        wanted = wanted.inner
    return wanted


def _rank(value: Value) -> tuple[bool, tuple[int, ...]]:
    """Sort key of commutative operands: computed ones first, then in order of evaluation."""
    return value.operation in ("attribute", "constant"), value.order
