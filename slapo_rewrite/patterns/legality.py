"""Decides whether a match can become one call at one place, and what that call replaces."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from slapo_rewrite.patterns.code_sinking import way_hint
from slapo_rewrite.patterns.graph_of_function import FREE
from slapo_rewrite.patterns.matching import Bindings, Mismatch, Note
from slapo_rewrite.patterns.pattern import Pattern
from slapo_rewrite.patterns.replacement import Place, Standing
from slapo_rewrite.patterns.value_graph import Arm, Graph, Use, Value, described, region


class Judge(Standing):
    """Checks one set of bindings at one place."""

    def __init__(
        self,
        pattern: Pattern,
        graph: Graph,
        pairing: Bindings,
        results: Sequence[Value],
        place: Place,
    ) -> None:
        names = [name or f"{pattern.name}_{number}" for number, name in enumerate(pattern.results)]
        super().__init__(graph, [*pairing.nodes, *pairing.calls], place, names)
        self.pattern, self.pairing, self.results = pattern, pairing, results
        self.tests = {id(theirs.test) for _, theirs in pairing.arms if isinstance(theirs, ast.If)}
        operands = [v for w, v in pairing.held.items() if w.operation == "parameter"]
        self.operands = self._moved(operands)
        self.moved = [*self.nodes, *self.operands]
        moments = [*(value.order for value in self.moved), place.moment]
        self.start, self.end = min(moments), max(moments)

    def stop(self) -> Mismatch | None:
        """Why the match cannot become one call at the place; None if it can."""
        checks = (
            self._hidden, self._within, self._idle, self._nameless, self._written,
            self._used_elsewhere, self._branched, self._random, self._rebound, self._repeated,
            self._bound_inside, self._changed, self._left,
        )  # fmt: skip
        return next((stop for check in checks if (stop := check()) is not None), None)

    def _stop(self, reason: str, *spots: Note, wanted: Value | None = None) -> Mismatch:
        held = self.pairing.held.items()
        here = (w for w, v in held if v.node is spots[0].node and not w.is_leaf)
        node = next(here, None) if wanted is None else wanted
        where = Note(node.file, node.node, described(node)) if node is not None else None
        return Mismatch(reason, spots, where, None, self.pattern.size, complete=True)

    def _hidden(self) -> Mismatch | None:
        for wanted, value in self.pairing.held.items():
            if wanted.operation == "parameter" and value.inside and not _is_readable(value):
                return self._stop(
                    f"`{wanted.literal}` would be computed inside a called function",
                    _spot(value.inside, "in this call"),
                    _spot(value, "here"),
                    wanted=wanted,
                )
        for result in self.results:
            if result.inside is not None and result not in given_by(result.inside):
                return self._stop(
                    f"{described(result)} is computed inside a call that returns something else",
                    _spot(result.inside, "in this call"),
                    _spot(result, "here"),
                )
        return None

    def _within(self) -> Mismatch | None:
        """Refuses a match inside the call of a module with state: it belongs to that module."""
        site = self.place.value.site
        if not site.stateful or any(v.site is not site for v in self.nodes):
            return None
        stop = self._stop(
            f"all of it is computed in the call of `{site.called}`",
            _spot(site, "this call"),
            wanted=self.pattern.roots[0],
        )
        return replace(stop, hint="select that module")

    def _idle(self) -> Mismatch | None:
        """Refuses a match with several results if one of them is not used."""
        if len(self.results) == 1:
            return None
        ours = {id(node) for node in (*self.pairing.nodes, *self.pairing.calls)}
        for result in self.results:
            if all(use.by is not None and id(use.by) in ours for use in result.site.uses):
                stop = self._stop(
                    f"the value of {described(result)} is returned, but not used",
                    _spot(result.site, "computed here"),
                )
                return replace(stop, hint="do not return it from the pattern")
        return None

    def _nameless(self) -> Mismatch | None:
        """Refuses results for which there is no single name."""
        names = [target.name for target in self.targets if target.name != "_"]
        for target in self.targets:
            if target.several or names.count(target.name) > 1:
                return self._stop(
                    f"the value of {described(target.result)} has several names",
                    _spot(target.result.site, "computed here"),
                )
        return None

    def _used_elsewhere(self) -> Mismatch | None:
        ours = {id(node) for node in self.nodes}
        for value in self.inner:
            for use in value.uses if value.inside is None else ():
                if id(use.node) in self.tests or (use.by is not None and id(use.by) in ours):
                    continue
                stop = self._stop(
                    f"the value of {described(value)} is also used elsewhere",
                    _spot(value, "computed here"),
                    self._used(use),
                )
                return replace(stop, hint=way_hint(use.node, self.graph.function))
        for result in self.place.outer if self.place.value in self.results else ():
            for use in result.site.uses:
                if use.order <= self.place.moment and (use.by is None or id(use.by) not in ours):
                    return self._stop(
                        f"the value of {described(result)} is used before all results are computed",
                        _spot(result.site, "computed here"),
                        self._used(use),
                    )
        return None

    def _used(self, use: Use) -> Note:
        return Note(self.graph.file, use.node, f"{use.why} here" if use.why else "used here")

    def _branched(self) -> Mismatch | None:
        around = self.place.value.site.regions
        for wanted, value in self.pairing.held.items():
            if wanted.is_leaf:
                continue
            expected = (*around, *self._expected(wanted))
            if value.regions != expected:
                arms = itertools.zip_longest(value.regions, expected)
                arm = next(one or other for one, other in arms if one != other)
                stop = self._stop(
                    f"{region(arm[0])} is in between",
                    _spot(value, "computed here"),
                    Note(self.graph.file, arm[0], "this is in between"),
                    wanted=wanted,
                )
                return replace(stop, hint=way_hint(arm[0], self.graph.function))
        return None

    def _expected(self, wanted: Value) -> tuple[Arm, ...]:
        """The branches of the model expected around the match of a pattern's value."""
        arms = {id(ours): theirs for ours, theirs in self.pairing.arms}
        return tuple((arms[id(node)], arm) for node, arm in wanted.regions if id(node) in arms)

    def _written(self) -> Mismatch | None:
        """Refuses writes to the match's memory between its first and last operation."""
        values = [*self.pairing.held.values(), *self.nodes]
        own = {id(node.node) for node in self.nodes}
        for mutation in self.graph.mutations:
            if not self.start < mutation.order <= self.end and id(mutation.node) not in own:
                continue
            if id(mutation.node) in own:
                target = mutation.target
                if self._last_use(target, mutation.node):
                    continue
                return self._stop(
                    "a value is overwritten that other code may read",
                    Note(self.graph.file, mutation.node, "overwritten here"),
                    _spot(target, "made here"),
                )
            touched = next((v for v in values if v.bases & mutation.target.bases), None)
            if touched is not None:
                return self._stop(
                    "a value is overwritten in between",
                    Note(self.graph.file, mutation.node, "overwritten here"),
                    _spot(touched, "the value"),
                    wanted=self.pattern.roots[0],
                )
        return None

    @staticmethod
    def _last_use(value: Value, node: ast.AST) -> bool:
        """Whether overwriting a value is invisible: it is new memory with no other use."""
        return value.bases == {("made", value.order)} and all(
            use.by is not None and use.by.node is node for use in value.uses
        )

    def _random(self) -> Mismatch | None:
        held = self.pairing.held
        wanted = sorted((w for w in held if held[w].random), key=lambda w: w.order)
        for one, other in itertools.pairwise(wanted):
            if not held[one].order < held[other].order:
                return self._stop(
                    "random numbers are drawn in another order",
                    _spot(held[other], "first here"),
                    _spot(held[one], "then here"),
                )
        drawn = [value for value in self.moved if value.random]
        if not drawn:
            return None
        moments = [*(value.order for value in drawn), self.place.moment]
        first, last = min(moments), max(moments)
        for way in self.graph.exits:
            if first < way.order < last:
                return self._stop(
                    "random numbers would be drawn in one branch only",
                    Note(self.graph.file, way.node, "a way out in between"),
                    _spot(drawn[0], "after this"),
                    wanted=self.pattern.roots[0],
                )
        for value in self.graph.values:
            if value.random and first < value.order < last and value not in self.moved:
                return self._stop(
                    "random numbers may be drawn in between",
                    _spot(value, "here"),
                    _spot(drawn[0], "after this"),
                    wanted=self.pattern.roots[0],
                )
        return None

    def _rebound(self) -> Mismatch | None:
        for wanted, value in self.pairing.held.items():
            lost = self._lost(value) if wanted.operation == "parameter" else None
            if lost is not None:
                return self._stop(
                    f"`{lost[0]}` is bound again in between",
                    Note(value.file, lost[1], "read here"),
                    _spot(self.place.value.site, "something else here"),
                    wanted=wanted,
                )
        return None

    def _repeated(self) -> Mismatch | None:
        """Refuses operands whose old text stays, so that the place would evaluate them again."""
        for value in self.operands:
            if id(value.site.node) not in self.covered:
                names = [b.name for b in self.graph.bound if b.value is value]
                said = f"`{names[0]}` is bound again in between" if names else "is used elsewhere"
                return self._stop(
                    said if names else f"the value of {described(value)} {said}",
                    _spot(value, "computed here"),
                    _spot(self.place.value.site, "something else here"),
                )
        return None

    def _changed(self) -> Mismatch | None:
        """Refuses operands that would be read later than before, and may have changed by then."""
        held = self.pairing.held.items()
        read = [v for w, v in held if w.operation == "parameter" and v.operation == "attribute"]
        for value in (*self.operands, *(v for v in read if "." in str(v.literal))):
            change = next(self._changes(value), None)
            if change is not None:
                return self._stop(
                    f"{described(value)} may be changed in between",
                    _spot(value, "read here"),
                    Note(self.graph.file, change, "changed here"),
                    wanted=self.pattern.roots[0],
                )
        return None

    def _changes(self, value: Value) -> Iterator[ast.AST]:
        """The nodes that may change an operand between its current read and the place."""
        computed = value.operation == "property"
        for other in self.graph.values:
            between = value.order < other.order <= self.end and other not in self.moved
            touched = computed or bool(other.bases & value.bases - FREE)
            if between and touched and not other.pure:
                yield other.site.node
        for bound in self.graph.bound if computed else ():
            if value.order < bound.order <= self.end and bound.name.startswith("self."):
                yield bound.statement

    def _left(self) -> Mismatch | None:
        """Refuses exits in between, and statements that affect everything after them."""
        for way in self.graph.exits:
            early = self.place.moment < way.order < self.end
            if early or (way.total and self.start < way.order < self.end):
                return self._stop(
                    "a statement in between may skip or change later statements",
                    Note(self.graph.file, way.node, "this statement"),
                    _spot(self.place.value.site, "the result"),
                    wanted=self.pattern.roots[0],
                )
        return None

    def _bound_inside(self) -> Mismatch | None:
        """Refuses `:=` in removed text if other code reads its name."""
        for bound in self.graph.bound:
            if bound.walrus is None or id(bound.walrus) not in self.covered:
                continue
            if any(t.name == bound.name and t.result.site is bound.value for t in self.targets):
                continue
            for node, value in self.graph.loads.items():
                outside = id(node) not in self.covered
                if outside and node.id == bound.name and self.may_be(value, bound.value):
                    return self._stop(
                        f"`{bound.name}` is bound inside, but read elsewhere",
                        Note(self.graph.file, bound.walrus, "bound here"),
                        Note(self.graph.file, node, "read here"),
                    )
        return None

    def _moved(self, operands: Iterable[Value]) -> list[Value]:
        """The values computed in the texts of operands that move to the place."""
        found: list[Value] = []
        pending = [value for value in operands if self.moves(value)]
        while pending:
            value = pending.pop()
            found.append(value)
            pending += [v for _, v in value.arguments if self.moves(v)]
        return found

    def _lost(self, value: Value) -> tuple[str, ast.AST] | None:
        """A name that an operand reads and that has another value at the place of the result."""
        if value.inside is not None or self.name_of(value) is not None:
            return None
        now = self.held
        if value.operation == "parameter":
            lost = isinstance(value.node, ast.arg)
            return (str(value.literal), value.node) if lost else None
        then = self.graph.names.get(value.statement, {}) if value.statement else {}
        if value.operation == "attribute":
            names = str(value.literal).split(".")
            keys = [f"self.{'.'.join(names[:n])}" for n in range(1, len(names) + 1)]
            again = (key for key in keys if then.get(key) is not now.get(key))
            return next(((key, value.node) for key in again), None)
        for node in ast.walk(value.node) if self.moves(value) else ():
            if isinstance(node, ast.Name) and then.get(node.id) is not now.get(node.id):
                return node.id, node
        return None


def _is_readable(value: Value) -> bool:
    """Whether a value read inside a call's body can be written outside of it."""
    of_file = value.operation == "name" and not str(value.literal).startswith("torch.")
    return value.is_leaf and not of_file


def _spot(value: Value, note: str) -> Note:
    return Note(value.file, value.node, note)


def given_by(call: Value) -> list[Value]:
    """A call, followed by the results of the nested calls whose bodies can be entered."""
    found = [call]
    while found[-1].inner is not None:
        found.append(found[-1].inner)
    return found
