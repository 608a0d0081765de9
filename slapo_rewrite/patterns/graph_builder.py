"""Makes values, and keeps account of what reads and overwrites them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from slapo_rewrite.code.facts import Facts, Resolver
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.patterns.value_graph import Arm, Graph, Mutation, Use, Value

# Values that are one of their arguments, or hold them.
_HOLDERS = {"choice", "merge", "loop", "tuple", "item", "member", "element"}
_SHAPES = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad"}


class Maker:
    """Makes the values of one function.

    Attributes:
        graph: What is made.
        file: The file that the function stands in.
        facts: Of the module whose method it is.
        resolve: What the names mean that the function does not bind.
        scope: What local names hold; assigned attributes stand in it as `self.path`.
        through: The call through which another function is looked at; None for the function itself.
        captured: Local names that inner functions read.
        bindings: Every binding of a name so far.
        exits: What names held where the loops around were left early.
        stores: Whether an attribute of the module is given a value.
    """

    def __init__(
        self,
        graph: Graph,
        facts: Facts,
        resolve: Resolver,
        *,
        through: Value | None = None,
        depth: int = 0,
        pattern: bool = False,
    ) -> None:
        self.graph, self.facts, self.resolve = graph, facts, resolve
        self.file: SourceFile = graph.file
        self.through, self.depth, self.pattern = through, depth, pattern
        self.scope: dict[str, Value] = {}
        self.captured: frozenset[str] = frozenset()
        self.bindings: list[tuple[str, Value]] = []
        self.exits: list[list[dict[str, Value]]] = []
        self.stores = False
        self.regions: tuple[Arm, ...] = through.regions if through else ()
        self.statement: ast.stmt | None = through.statement if through else None
        self._prefix = through.order if through else ()
        self._count = 0

    def next(self) -> tuple[int, ...]:
        """The next moment."""
        self._count += 1
        return (*self._prefix, self._count)

    def make(
        self, operation: str, arguments: Iterable[tuple[str, Value]], node: ast.AST, **more: Any
    ) -> Value:
        """A value that is computed here and now."""
        given = tuple(arguments)
        value = Value(
            operation,
            given,
            self.file,
            node,
            self.next(),
            regions=self.regions,
            statement=self.statement,
            inside=self.through.site if self.through else None,
            **more,
        )
        if not value.bases:
            value.bases = self._bases(value)
        if not value.lazy:
            for _, argument in given:
                self.use(argument, Use(node, value, "", value.order))
        self.graph.values.append(value)
        return value

    def leaf(self, operation: str, literal: object, node: ast.AST, **more: Any) -> Value:
        """A value that is there already: a constant, a parameter, an attribute, a name."""
        value = Value(
            operation,
            (),
            self.file,
            node,
            self.next(),
            literal,
            self.regions,
            self.statement,
            inside=self.through.site if self.through else None,
            **more,
        )
        if operation == "parameter":
            value.bases = frozenset([(operation, literal)])
        elif operation == "attribute":  # and what holds it
            names = str(literal).split(".")
            paths = (".".join(names[:n]) for n in range(1, len(names) + 1))
            value.bases = frozenset((operation, path) for path in paths)
        return value

    def constant(self, literal: object, node: ast.AST) -> Value:
        """A constant."""
        return self.leaf("constant", literal, node, number=True)

    def attribute(self, path: str, node: ast.AST, number: bool = False) -> Value:
        """An attribute of the module; in a pattern, whatever stands in its place."""
        if self.pattern:
            return self.wildcard(path, node)
        return self.leaf("attribute", path, node, number=number)

    def wildcard(self, name: str, node: ast.AST) -> Value:
        """What a pattern leaves open: always the same value for one name."""
        if name not in self.scope:
            self.scope[name] = self.leaf("parameter", name, node)
        return self.scope[name]

    def _bases(self, value: Value) -> frozenset[object]:
        if value.overwrites is not None:
            return value.overwrites.bases
        own = frozenset([("made", value.order)])
        shared = frozenset[object]().union(*(v.bases for _, v in value.arguments))
        return shared if value.operation in _HOLDERS else shared | own

    def use(self, value: Value, use: Use) -> None:
        """Notes that a value is read."""
        if self.through is not None:  # the call that is looked through reads it
            return
        if value.lazy:  # a merge that nobody reads uses nothing
            value.lazy = False
            for _, argument in value.arguments:
                self.use(argument, Use(value.node, value, "", value.order))
        value.uses.append(use)

    def overwrite(self, value: Value, node: ast.AST) -> None:
        """Notes that the memory of a value is written to."""
        self.graph.mutations.append(Mutation(value, node, self.next()))

    def member(self, value: Value, name: str, node: ast.AST) -> Value:
        """An attribute of a value that is not the module."""
        if name == "training" and value.operation == "parameter":
            return self.leaf("training", None, node, number=True)
        if name == "shape":
            return self.make("shape", [("input", value)], node, number=True, bases=_FREE)
        return self.make("member", [("input", value)], node, literal=name, number=name in _SHAPES)


# The bases of what shares memory with nothing.
_FREE: frozenset[object] = frozenset([("free",)])
