"""What a schedule has asked of one module so far, as a value.

A module path points at its class *as rewritten so far*: the class, and this state. All modules
start with `EMPTY`. A primitive gives a selection a new state and leaves every other path alone
(copy on write); modules of one class whose states are equal at the end share one definition again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slapo_rewrite.directive import Directive

if TYPE_CHECKING:
    from slapo_rewrite.runtime.weights import Weight


@dataclass(frozen=True)
class Shard:
    """One parameter split along an axis.

    Attributes:
        name: The parameter.
        axis: Counted from 0.
        parts: Relative sizes of the blocks packed along the axis; `(1,)` where it is one block.
        cause: The directive that asked.
        as_sizes: Whether the blocks were given by their sizes, and not by their number.
    """

    name: str
    axis: int
    parts: tuple[int, ...]
    cause: Directive = field(compare=False)
    as_sizes: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Share:
    """An integer attribute of a module that is this rank's share.

    Attributes:
        name: The attribute.
        cause: The directive that asked.
    """

    name: str
    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class Function:
    """A function or class of the schedule file, or an importable one.

    Attributes:
        name: What the output calls it.
        module: Where it is imported from; None where the schedule file defines it.
    """

    name: str
    module: str | None


@dataclass(frozen=True)
class Sync:
    """One collective at a module's border.

    Attributes:
        mode: `fwd_pre`, `fwd_post` or `bwd_post`.
        op: `all_reduce`, `all_gather`, `reduce_scatter`, `scatter`, `all_to_all`, `keep` (which
            changes nothing), or a function of the user's own.
        axis: The axis that is gathered or scattered; of an all-to-all, the one that is gathered.
        partial_gradient: Whether the gathered value's gradient is summed over the ranks before it
            is cut; None where what the value goes into decides.
        cause: The directive that asked.
        scatter_axis: The axis that an all-to-all scatters.
        of: The argument of `forward` that it is about, where that is not the first.
    """

    mode: str
    op: str | Function
    axis: int | None
    partial_gradient: bool | None
    cause: Directive = field(compare=False)
    scatter_axis: int | None = None
    of: str | None = None


@dataclass(frozen=True)
class Replacement:
    """Another class in the place of the original's.

    Attributes:
        target: The new class.
        arguments: Its constructor's arguments as source; None keeps the original's.
        weights: What its tensors are made of, by name; those that keep their names left out.
        cause: The directive that asked.
    """

    target: Function
    arguments: str | None
    weights: tuple[tuple[str, Weight], ...]
    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class Part:
    """Part of a `forward`, by the calls that it makes.

    Attributes:
        calls: Names of what is called, or a regular expression for them.
        name: What a method of these statements is called; None leaves it to the tool.
    """

    calls: tuple[str, ...] | str
    name: str | None = None


# What recomputation keeps: results of these operations, or what a policy says.
Kept = tuple[str, ...] | Function | None


@dataclass(frozen=True)
class Checkpoint:
    """Activations computed again in the backward pass.

    Attributes:
        part: The part of `forward`; None for all of it.
        kept: What is kept all the same.
        cause: The directive that asked.
    """

    part: Part | None
    kept: Kept
    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class InferSync:
    """Collectives that are missing in a module and below are inferred."""

    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class Annotation:
    """An attribute of a parameter.

    Attributes:
        name: The parameter.
        key: The attribute.
        value: Its value as source.
        cause: The directive that asked.
    """

    name: str
    key: str
    value: str
    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class Fork:
    """Random numbers that differ between tensor-parallel ranks.

    Attributes:
        part: The part of `forward`; None for all of it.
        cause: The directive that asked.
    """

    part: Part | None
    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class Decompose:
    """A linear layer's bias added where the layer is called.

    Attributes:
        cause: The directive that asked.
        adds: Whether it is added there; what follows adds it otherwise.
    """

    cause: Directive = field(compare=False)
    adds: bool = True


@dataclass(frozen=True)
class Inlined:
    """The module's `forward` is written where it was called."""

    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class StageEnd:
    """A pipeline stage ends after the module.

    Attributes:
        target: What runs the stages, one of `TARGETS`.
        cause: The directive that asked.
    """

    target: str
    cause: Directive


# Whose pipeline stages can be cut for.
TARGETS = ("deepspeed", "torch")


@dataclass(frozen=True)
class ModuleState:
    """Everything that was asked of one module."""

    shards: tuple[Shard, ...] = ()
    shares: tuple[Share, ...] = ()
    syncs: tuple[Sync, ...] = ()
    replacement: Replacement | None = None
    checkpoint: Checkpoint | None = None
    checkpointed_parts: tuple[Checkpoint, ...] = ()
    infer_sync: InferSync | None = None
    fork: Fork | None = None
    forked_parts: tuple[Fork, ...] = ()
    annotations: tuple[Annotation, ...] = ()
    decompose: Decompose | None = None
    inlined: Inlined | None = None
    cut: StageEnd | None = field(default=None, compare=False)  # changes nothing of the module

    def causes(self) -> tuple[Directive, ...]:
        """The directives that split the module or communicate at its border."""
        splits = (*(s.cause for s in self.shards), *(s.cause for s in self.shares))
        return (*splits, *(s.cause for s in self.syncs))


EMPTY = ModuleState()


def general(path: str) -> str:
    """A module path with `*` for each number: `layer.3.mlp -> layer.*.mlp`."""
    return ".".join("*" if segment.isdigit() else segment for segment in path.split("."))
