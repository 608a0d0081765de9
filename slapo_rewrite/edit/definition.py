"""A class as rewritten: what changes in it, and which of its instances agree on that."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slapo_rewrite.edit.state import Directive, Function, Kept, Part
from slapo_rewrite.model.layers import Layer, Written
from slapo_rewrite.model.tree import Node

if TYPE_CHECKING:
    from slapo_rewrite.runtime.tensor_parallel import Blocks
    from slapo_rewrite.runtime.weights import Weight


@dataclass(frozen=True)
class MakeLayer:
    """At a construction site: a tensor-parallel layer, or a subclass of it that is defined here."""

    layer: Layer
    subclass: str | None = None


@dataclass(frozen=True)
class MakeOther:
    """At a construction site: a class that the schedule names, or a subclass defined here.

    Attributes:
        arguments: Its constructor's arguments as source; None keeps the original's.
        weights: What its tensors are made of, by name.
        layer: The tensor-parallel layer that is made instead, where it is sharded.
    """

    target: Function
    arguments: str | None
    weights: tuple[tuple[str, Weight], ...] = ()
    layer: Layer | None = None
    subclass: str | None = None


@dataclass(frozen=True)
class MakeClass:
    """At a construction site: a specialised class in the place of the `original` one.

    Attributes:
        name: The class.
        original: The one that it is derived from.
        module: Where the output has it, beside the file with the construction site; None for in it.
    """

    name: str
    original: str
    module: str | None = None


@dataclass(frozen=True)
class DeriveFrom:
    """In a class that extends a torch layer: the tensor-parallel layer as its base."""

    layer: Layer
    original: str


@dataclass(frozen=True)
class MixIn:
    """In a class: another base, before its own."""

    module: str
    name: str


@dataclass(frozen=True)
class Attach:
    """After a construction site: a hook on the module that was made."""

    mode: str
    function: Function


@dataclass(frozen=True)
class SplitParameter:
    """After a parameter's assignment: cut it down to this rank's part.

    Attributes:
        axis: The axis that is cut.
        parts: What the blocks packed along it are, as it is given to the function that cuts.
    """

    axis: int
    parts: int | Written | Blocks


@dataclass(frozen=True)
class Annotate:
    """After a module's or a parameter's construction: an attribute of the parameter."""

    name: str
    key: str
    value: str


@dataclass(frozen=True)
class OwnShare:
    """At the end of the constructor: an integer attribute becomes this rank's share.

    Attributes:
        layer: The layer whose heads it counts, where several ranks may hold the same ones.
    """

    layer: str | None = None


@dataclass(frozen=True)
class DivideByReplicas:
    """At the end of the constructor: an integer attribute is divided among those who share heads.

    Attributes:
        layer: The layer whose heads they are.
    """

    layer: str


@dataclass(frozen=True)
class ReadWhole:
    """Where a layer's size is read from outside: the attribute that has the whole size."""

    attribute: str


@dataclass(frozen=True)
class Collective:
    """A call of a collective: its name, and keyword arguments beside the value."""

    function: str
    keywords: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class WrapInput:
    """At the start of `forward`: its first argument goes through collectives, one by one.

    Attributes:
        collectives: One by one.
        of: Another argument that goes through them instead.
    """

    collectives: tuple[Collective, ...]
    of: str | None = None


@dataclass(frozen=True)
class WrapOutput:
    """Where `forward` returns: the value, or what stands first in it, goes through collectives.

    Attributes:
        collectives: One by one.
        nested: Whether what is returned has the tensor inside of it.
        first: The first field of each class that holds what is returned.
    """

    collectives: tuple[Collective, ...]
    nested: bool = False
    first: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class WrapCall:
    """Where a method calls a submodule: collectives around its first argument or its result.

    Attributes:
        collectives: One by one.
        around: `argument` or `result`.
        name: The first argument's name, where it is given by keyword.
    """

    collectives: tuple[Collective, ...]
    around: str
    name: str | None = None


@dataclass(frozen=True)
class AddBias:
    """Where a method calls a linear layer: the product, with the bias added to it.

    Attributes:
        product: `linear`, or `matmul` where the weight is not transposed.
        before: The collective that the layer's input goes through, if any.
        after: The one that the product goes through.
        adds: Whether the bias is added there, and not by what follows.
        shared: The parameters that meet parts: their gradients are added up.
    """

    product: str
    before: Collective | None
    after: Collective | None
    adds: bool = True
    shared: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ChangeArgument:
    """An argument of a call in `forward`, written differently.

    Attributes:
        template: How, with `{argument}` for what stands there and `{part_size}` for that function.
    """

    template: str


@dataclass(frozen=True)
class LossOfParts:
    """Where a method computes a loss of logits of which a rank has a part.

    Attributes:
        function: What is called in the place of a function of transformers; None where
            `cross_entropy` or a criterion stands there itself.
        head: The path of the layer that gives the logits, below the method's module.
        names: Local variables that hold such parts, with the axis that is split.
    """

    function: str | None
    head: str
    names: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class StatisticOfParts:
    """Where a method takes a mean or variance of features of which a rank has a part.

    Attributes:
        function: What is called in its place.
        parameter: The parameter that is split along these features.
    """

    function: str
    parameter: str


@dataclass(frozen=True)
class ShareParameter:
    """Where methods read a parameter that every rank has whole: its gradients are added up.

    Attributes:
        name: The parameter's.
        end: Where the one place ends that reads it of another module, by line and column; None for
            every place that reads it of the module itself.
    """

    name: str
    end: tuple[int, int] | None = None


@dataclass(frozen=True)
class ForkRandom:
    """The module's random numbers differ between tensor-parallel ranks."""


@dataclass(frozen=True)
class Recompute:
    """The module's activations are computed again in the backward pass, what is kept apart."""

    kept: Kept = None
    updates_buffers: bool = False


@dataclass(frozen=True)
class ForkPart:
    """In a method: statements whose random numbers differ between ranks."""

    part: Part


@dataclass(frozen=True)
class RecomputePart:
    """In a method: statements whose activations are computed again in the backward pass."""

    part: Part
    kept: Kept
    updates_buffers: bool = False


@dataclass(frozen=True)
class Write:
    """In a method: a statement, or what is around it, written otherwise.

    Attributes:
        statement: The statement.
        edits: From where to where in the file, and what stands there then.
        what: What the new text is, in a word.
        after: A statement to stand behind it.
    """

    statement: ast.stmt
    edits: tuple[tuple[int, int, str], ...]
    what: str
    after: str = ""


Key = tuple[Any, ...]
What = (
    MakeLayer
    | MakeOther
    | MakeClass
    | Attach
    | DeriveFrom
    | MixIn
    | SplitParameter
    | Annotate
    | OwnShare
    | DivideByReplicas
    | WrapInput
    | WrapOutput
    | WrapCall
    | AddBias
    | ChangeArgument
    | LossOfParts
    | StatisticOfParts
    | ShareParameter
    | ReadWhole
    | ForkRandom
    | ForkPart
    | RecomputePart
    | Recompute
    | Write
)

# Changes of the class as a whole, to be had by wrapping its `forward` in a subclass.
FORK: Key = ("fork",)
RECOMPUTE: Key = ("recompute",)
# Each of them inside those that follow.
WRAPPERS = (FORK, RECOMPUTE)


@dataclass
class Definition:
    """What changes in a class for some of its instances.

    Attributes:
        changes: By the place in the class.
        causes: The directives behind each change.
        present: The places that these instances have; a change elsewhere would not touch them.
        nodes: The instances.
    """

    changes: dict[Key, What] = field(default_factory=dict)
    causes: dict[Key, tuple[Directive, ...]] = field(default_factory=dict)
    present: set[Key] = field(default_factory=set)
    nodes: list[Node] = field(default_factory=list)

    def agrees_with(self, other: Definition) -> bool:
        """Whether one text serves both: where both have a place, they want the same."""
        for key in self.changes.keys() | other.changes.keys():
            mine, theirs = self.changes.get(key), other.changes.get(key)
            if mine == theirs:
                continue
            if (mine is None and not self.has(key)) or (theirs is None and not other.has(key)):
                continue
            return False
        return True

    def has(self, key: Key) -> bool:
        """Whether these instances have the place at all; other places than sites everyone has."""
        return key[0] not in ("site", "parameter", "hook") or place_of(key) in self.present

    def absorb(self, other: Definition) -> None:
        """Takes in a definition that agrees."""
        self.changes.update(other.changes)
        for key, causes in other.causes.items():
            self.causes[key] = united(self.causes.get(key, ()), causes)
        self.present |= other.present
        self.nodes += other.nodes


def place_of(key: Key) -> Key:
    """The construction site that a change stands at, without what it does there."""
    return ("site", *key[1:3]) if key[0] == "hook" else key[:3]


def united(*causes: Iterable[Directive]) -> tuple[Directive, ...]:
    """Directives without repetition, in the schedule's order."""
    found = {d.number: d for group in causes for d in group}
    return tuple(found[n] for n in sorted(found))


def merged(definitions: Iterable[Definition]) -> list[Definition]:
    """As few definitions as the given ones need, in their order."""
    result: list[Definition] = []
    for definition in definitions:
        for known in result:
            if known.agrees_with(definition):
                known.absorb(definition)
                break
        else:
            result.append(definition)
    return result


def common(definitions: list[Definition]) -> set[Key]:
    """The places where every definition that has them wants the same."""
    keys = {key for d in definitions for key in d.changes}
    shared = set()
    for key in keys:
        wanted = {d.changes.get(key) for d in definitions if d.has(key)}
        if len(wanted) == 1:
            shared.add(key)
    return shared
