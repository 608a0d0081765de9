"""What a schedule has asked of one module so far, as a value.

A module path points at its class *as rewritten so far*: the class, and this state. All modules
start with `EMPTY`. A primitive gives a selection a new state and leaves every other path alone
(copy on write); modules of one class whose states are equal at the end share one definition again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.imports import Function
from slapo_rewrite.directive import Causes, Directive
from slapo_rewrite.sharding.types import LocalValue

if TYPE_CHECKING:
    from slapo_rewrite.runtime.weights import Weight

Kind = TypeVar("Kind", bound=Change)


@dataclass(frozen=True)
class Shard:
    """One parameter split along an axis."""

    name: str  # the parameter
    axis: int  # counted from 0
    # Relative sizes of the blocks packed along the axis; `(1,)` where it is one block.
    parts: tuple[int, ...]
    cause: Directive = field(compare=False)  # the directive that asked
    # Whether the blocks were given by their sizes, and not by their number.
    as_sizes: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class ShardedAttribute:
    """An integer attribute of a module that is this rank's share."""

    name: str  # the attribute
    cause: Directive = field(compare=False)  # the directive that asked


@dataclass(frozen=True)
class Sync:
    """One collective at a module's border."""

    mode: str  # `fwd_pre`, `fwd_post` or `bwd_post`
    # `all_reduce`, `all_gather`, `reduce_scatter`, `scatter`, `all_to_all`, `keep` (which changes
    # nothing), or a function of the user's own.
    op: str | Function
    # The axis that is gathered or scattered; of an all-to-all, the one that is gathered.
    axis: int | None
    # Whether the gathered value's gradient is summed over the ranks before it is cut; None where
    # what the value goes into decides.
    partial_gradient: bool | None
    cause: Directive = field(compare=False)  # the directive that asked
    scatter_axis: int | None = None  # the axis that an all-to-all scatters
    of: str | None = None  # the argument of `forward` that it is about, where that is not the first
    # The value inside that it is about, if any; by its name alone, that of `forward`.
    value: LocalValue | str | None = None


@dataclass(frozen=True)
class Replacement:
    """Another class in the place of the original's."""

    target: Function  # the new class
    arguments: str | None  # its constructor's arguments as source; None keeps the original's
    # What its tensors are made of, by name; those that keep their names left out.
    weights: tuple[tuple[str, Weight], ...]
    cause: Directive = field(compare=False)  # the directive that asked


@dataclass(frozen=True)
class Wish:
    """What is said by its name alone, whoever asks for it."""

    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class StageCut:
    """A pipeline stage ends after the module."""

    target: str  # what runs the stages, one of `TARGETS`
    cause: Directive  # the directive that asked
    may_move: bool = False  # whether it may end elsewhere, where it cannot end there
    # The modules that all stages end after instead, where they cannot.
    instead: tuple[str, ...] = ()


# Whose pipeline stages can be cut for.
TARGETS = ("deepspeed", "torch")


@dataclass(frozen=True)
class Request:
    """A change that a directive asks for as such."""

    change: Change
    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class ModuleRequests:
    """Everything that was asked of one module."""

    shards: tuple[Shard, ...] = ()
    shares: tuple[ShardedAttribute, ...] = ()
    syncs: tuple[Sync, ...] = ()
    replacement: Replacement | None = None
    infer_sync: Wish | None = None  # collectives that are missing in it and below are inferred
    decompose: Wish | None = None  # of a linear layer: its bias is added where it is called
    inlined: Wish | None = None  # its `forward` is written where it was called
    changes: tuple[Request, ...] = ()
    cut: StageCut | None = field(default=None, compare=False)  # changes nothing of the module

    def causes(self) -> Causes:
        """The directives that split the module or communicate at its border."""
        splits = (*(s.cause for s in self.shards), *(s.cause for s in self.shares))
        return (*splits, *(s.cause for s in self.syncs))

    def every_cause(self) -> Causes:
        """The directive behind each thing that was asked, in one order for equal requests."""
        single = (self.replacement, self.infer_sync, self.decompose, self.inlined)
        found = (*self.causes(), *(request.cause for request in self.changes))
        return (*found, *(each.cause for each in single if each is not None))

    def asking(self, change: Change, cause: Directive) -> ModuleRequests:
        """The same, with one more change."""
        return replace(self, changes=(*self.changes, Request(change, cause)))

    def asks(self, kind: type[Kind]) -> list[tuple[Kind, Directive]]:
        """The changes of one kind, each with who asked for it."""
        return [(r.change, r.cause) for r in self.changes if isinstance(r.change, kind)]

    def is_plain(self) -> bool:
        """Whether nothing was asked but what stays with the module whatever takes its place."""
        lasting = tuple(r for r in self.changes if r.change.is_lasting)
        return self == ModuleRequests(changes=lasting)


EMPTY = ModuleRequests()
