"""Whether a match may stand at one place, as one call, and what that takes the place of."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slapo_rewrite.patterns.matching import Pairing, Spot, Stop, described, region
from slapo_rewrite.patterns.pattern import Pattern
from slapo_rewrite.patterns.values import Arm, Graph, Value


@dataclass(frozen=True)
class Replaced:
    """What a call takes the place of.

    Attributes:
        node: The expression that gives the match's result, or the statement of an assignment in
            place.
        target: The text before the call where `node` is a statement, `scores = ` say.
        removed: The statements that compute nothing else: they go.
        kept: Statements that compute parts of the match among other things: they stay as they are,
            and a call alone cannot take the match's place.
    """

    node: ast.AST
    target: str = ""
    removed: tuple[ast.stmt, ...] = ()
    kept: tuple[ast.stmt, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether one call at the place of `node` does it."""
        return not self.kept


class Judge:
    """Judges one pairing."""

    def __init__(self, pattern: Pattern, graph: Graph, pairing: Pairing, root: Value) -> None:
        self.pattern, self.graph, self.pairing, self.root = pattern, graph, pairing, root
        self.nodes = [*pairing.nodes, *pairing.calls]
        self.inner = [node for node in self.nodes if node not in (root, root.site)]
        self.tests = {id(theirs.test) for _, theirs in pairing.arms if isinstance(theirs, ast.If)}
        self.moved = [*self.nodes, *self._moved_operands()]
        self.start = min(value.order for value in self.moved)

    def stop(self) -> Stop | None:
        """Why the match cannot be one call at the place of its result; None where it can."""
        checks = (
            self._hidden,
            self._written,
            self._used_elsewhere,
            self._branched,
            self._random,
            self._rebound,
        )
        return next((stop for check in checks if (stop := check()) is not None), None)

    def _stop(self, reason: str, *spots: Spot, wanted: Value | None = None) -> Stop:
        node = self._wanted_of(spots[0].node) if wanted is None else wanted
        where = Spot(node.file, node.node, described(node)) if node is not None else None
        return Stop(reason, spots, where, None, self.pattern.size)

    def _wanted_of(self, node: ast.AST) -> Value | None:
        held = self.pairing.held.items()
        return next((w for w, v in held if v.node is node and not w.is_leaf), None)

    def _hidden(self) -> Stop | None:
        for wanted, value in self.pairing.held.items():
            if wanted.operation == "parameter" and value.inside and not value.is_leaf:
                return self._stop(
                    f"`{wanted.literal}` would be computed inside a call that is looked through",
                    _spot(value.inside, "in this call"),
                    _spot(value, "here"),
                    wanted=wanted,
                )
        return None

    def _used_elsewhere(self) -> Stop | None:
        ours = {id(node) for node in self.nodes}
        for value in self.inner:
            for use in value.uses if value.inside is None else ():
                if id(use.node) in self.tests or (use.by is not None and id(use.by) in ours):
                    continue
                return self._stop(
                    f"the value of {described(value)} is used elsewhere as well",
                    _spot(value, "computed here"),
                    Spot(self.graph.file, use.node, f"{use.why} here" if use.why else "used here"),
                )
        return None

    def _branched(self) -> Stop | None:
        base = len(self.root.regions) - len(self._expected(self.pattern.root))
        for wanted, value in self.pairing.held.items():
            if wanted.is_leaf:
                continue
            expected = (*self.root.regions[:base], *self._expected(wanted))
            if not _same_arms(value.regions, expected):
                arm = next((a for a, b in _zipped(value.regions, expected) if a != b), None)
                arm = arm or next(b for a, b in _zipped(value.regions, expected) if a != b)
                assert arm is not None
                return self._stop(
                    f"{region(arm[0])} lies between",
                    _spot(value, "computed here"),
                    Spot(self.graph.file, arm[0], "this lies between"),
                    wanted=wanted,
                )
        return None

    def _expected(self, wanted: Value) -> tuple[Arm, ...]:
        """The branches of the model around what stands for a value of the pattern."""
        arms = {id(ours): theirs for ours, theirs in self.pairing.arms}
        return tuple((arms[id(node)], arm) for node, arm in wanted.regions if id(node) in arms)

    def _written(self) -> Stop | None:
        """Memory written between the first operation and the last."""
        values = [*self.pairing.held.values(), *self.nodes]
        own = {id(node.node) for node in self.nodes}
        for mutation in self.graph.mutations:
            if not self.start < mutation.order <= self.root.order and id(mutation.node) not in own:
                continue
            if id(mutation.node) in own:
                target = mutation.target
                if self._last_use(target, mutation.node):
                    continue
                return self._stop(
                    "a value is overwritten that may be read by others",
                    Spot(self.graph.file, mutation.node, "overwritten here"),
                    _spot(target, "made here"),
                )
            touched = next((v for v in values if v.bases & mutation.target.bases), None)
            if touched is not None:
                return self._stop(
                    "a value is overwritten in between",
                    Spot(self.graph.file, mutation.node, "overwritten here"),
                    _spot(touched, "the value"),
                    wanted=self.pattern.root,
                )
        return None

    @staticmethod
    def _last_use(value: Value, node: ast.AST) -> bool:
        """Whether nobody sees that a value is overwritten: it is fresh, and read by nobody else."""
        return value.bases == {("made", value.order)} and all(
            use.by is not None and use.by.node is node for use in value.uses
        )

    def _random(self) -> Stop | None:
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
        first = min((value.order for value in drawn), default=self.root.order)
        for value in self.graph.values:
            if value.random and first < value.order < self.root.order and value not in self.moved:
                return self._stop(
                    "random numbers may be drawn in between",
                    _spot(value, "here"),
                    _spot(drawn[0], "after this"),
                    wanted=self.pattern.root,
                )
        return None

    def _rebound(self) -> Stop | None:
        for wanted, value in self.pairing.held.items():
            lost = self._lost(value) if wanted.operation == "parameter" else None
            if lost is not None:
                return self._stop(
                    f"`{lost[0]}` is bound again in between",
                    Spot(value.file, lost[1], "read here"),
                    _spot(self.root.site, "something else here"),
                    wanted=wanted,
                )
        return None

    @functools.cached_property
    def _names(self) -> dict[str, Value]:
        """What names hold where the result is computed, once what is removed is gone."""
        last = self.root.site.statement
        names = dict(self.graph.names.get(last, {})) if last is not None else {}
        for statement in reversed(self.replaced.removed):
            before = self.graph.names[statement]
            for name in _bound_by(statement):
                if any(names.get(name) is value for value in self.nodes):
                    names.pop(name)
                    names |= {name: before[name]} if name in before else {}
        return names

    def name_of(self, value: Value) -> str | None:
        """The local name, or attribute, that holds a value at the place of the result."""
        read = value.node.id if isinstance(value.node, ast.Name) else None
        holding = [name for name, held in self._names.items() if held is value]
        plain = [name for name in holding if not name.startswith("self.")]
        return read if read in plain else next(iter([*plain, *holding]), None)

    def _moves(self, value: Value) -> bool:
        """Whether an operand's text has to go where the result is, since no name holds it there."""
        statement = value.site.statement
        stays = value.is_leaf or statement is None or statement is self.root.site.statement
        return not stays and value.inside is None and self.name_of(value) is None

    def _moved_operands(self) -> list[Value]:
        """What is computed in the texts that move with the match."""
        operands = [v for w, v in self.pairing.held.items() if w.operation == "parameter"]
        found: list[Value] = []
        pending = [value for value in operands if self._moves(value)]
        while pending:
            value = pending.pop()
            found.append(value)
            pending += [v for _, v in value.arguments if self._moves(v)]
        return found

    def _lost(self, value: Value) -> tuple[str, ast.AST] | None:
        """A name that an operand needs and that holds something else at the place of the result."""
        if value.inside is not None or self.name_of(value) is not None:
            return None
        now = self._names
        if value.operation == "parameter":
            lost = isinstance(value.node, ast.arg)
            return (str(value.literal), value.node) if lost else None
        then = self.graph.names.get(value.statement, {}) if value.statement else {}
        if value.operation == "attribute":
            key = f"self.{value.literal}"
            return (key, value.node) if then.get(key) is not now.get(key) else None
        for node in ast.walk(value.node) if self._moves(value) else ():
            if isinstance(node, ast.Name) and then.get(node.id) is not now.get(node.id):
                return node.id, node
        return None

    def text(self, value: Value) -> str:
        """An operand as it may be written at the place of the result."""
        return self.name_of(value) or text_of(value)

    @functools.cached_property
    def replaced(self) -> Replaced:
        """What one call would take the place of."""
        site = self.root.site
        statements = dict.fromkeys(
            node.site.statement
            for node in self.inner
            if node.site.statement is not None and node.site.statement is not site.statement
        )
        removed = [statement for statement in statements if self._wholly(statement)]
        for branch in [s for s in statements if isinstance(s, ast.If)]:
            if self._chooses(branch, removed):
                removed = [s for s in removed if s not in (*branch.body, *branch.orelse)]
                removed.append(branch)
        target, node = "", site.node
        if isinstance(node, ast.AugAssign):
            target = f"{ast.unparse(node.target)} = "
        inside = list[ast.stmt]()
        if isinstance(node, ast.If):
            inside = [*node.body, *node.orelse]
            target = next((f"{name} = " for s in inside for name in _bound_by(s)), "")
            inside = inside if self._chooses(node, removed) else []
            removed = [s for s in removed if s not in inside]
        gone = {id(inner) for s in (*removed, *inside) for inner in ast.walk(s)}
        kept = [s for s in statements if id(s) not in gone]
        kept += [node] if isinstance(node, ast.If) and not inside else []
        removed.sort(key=lambda s: s.lineno)
        return Replaced(node, target, tuple(removed), tuple(kept))

    @staticmethod
    def _chooses(branch: ast.If, removed: list[ast.stmt]) -> bool:
        """Whether a branch does nothing but choose a value of the match."""
        inside = [*branch.body, *branch.orelse]
        names = {name for statement in inside for name in _bound_by(statement)}
        return len(names) == 1 and all(s in removed or _is_alias(s) for s in inside)

    def _wholly(self, statement: ast.stmt) -> bool:
        """Whether a statement only gives a name to a value of the match."""
        given: ast.AST
        match statement:
            case ast.Assign(targets=[ast.Name()], value=value):
                given = value
            case ast.AnnAssign(target=ast.Name(), value=ast.expr() as value):
                given = value
            case ast.AugAssign(target=ast.Name()):
                given = statement
            case _:
                return False
        return any(node.site.node is given for node in self.inner)


def _is_alias(statement: ast.stmt) -> bool:
    """Whether a statement only gives a value another name."""
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name)


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _spot(value: Value, note: str) -> Spot:
    return Spot(value.file, value.node, note)


def _same_arms(ones: tuple[Arm, ...], others: tuple[Arm, ...]) -> bool:
    return len(ones) == len(others) and all(
        a is b and x == y for (a, x), (b, y) in zip(ones, others, strict=True)
    )


def _zipped(
    ones: tuple[Arm, ...], others: tuple[Arm, ...]
) -> Iterable[tuple[Arm | None, Arm | None]]:
    for number in range(max(len(ones), len(others))):
        yield (
            ones[number] if number < len(ones) else None,
            others[number] if number < len(others) else None,
        )


def text_of(value: Value) -> str:
    """A value as it is written where it is computed."""
    written = value.inside is None and isinstance(value.node, ast.expr)
    match value.operation:
        case "constant":
            return f"self.{value.path}" if value.path else repr(value.literal)
        case "attribute":
            return f"self.{value.literal}"
        case "parameter" | "name":
            return str(value.literal)
        case "training" if not (written and isinstance(value.node, ast.Attribute)):
            return "self.training"
    return value.file.segment(value.node) if written else described(value)
