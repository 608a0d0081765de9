"""The requests of a schedule for one module so far, as a value.

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
    """The request to split one parameter along an axis."""

    name: str  # the parameter
    axis: int  # counted from 0
    # Relative sizes of the blocks packed along the axis; `(1,)` for one block.
    parts: tuple[int, ...]
    cause: Directive = field(compare=False)  # the directive that asked
    # Whether the schedule gave the blocks' sizes, rather than their number.
    as_sizes: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class ShardedAttribute:
    """The request to make an integer attribute of a module this rank's share."""

    name: str  # the attribute
    cause: Directive = field(compare=False)  # the directive that asked


@dataclass(frozen=True)
class Sync:
    """The request for one collective at a module's border, or at a local value inside."""

    mode: str  # `fwd_pre`, `fwd_post` or `bwd_post`
    # `all_reduce`, `all_gather`, `reduce_scatter`, `scatter`, `all_to_all`, `keep` (which changes
    # nothing), or a function of the user's own.
    op: str | Function
    # The axis that is gathered or scattered; of an all-to-all, the one that is gathered.
    axis: int | None
    # Whether the gathered value's gradient is summed over the ranks before it is cut; None lets the
    # analysis decide.
    partial_gradient: bool | None
    cause: Directive = field(compare=False)  # the directive that asked
    scatter_axis: int | None = None  # the axis that an all-to-all scatters
    of: str | None = None  # the argument of `forward` that it applies to, if not the first
    # The local value that it applies to, if any; a plain name is a variable of `forward`.
    value: LocalValue | str | None = None


@dataclass(frozen=True)
class Replacement:
    """The request to replace a module's class."""

    target: Function  # the new class
    arguments: str | None  # its constructor's arguments as source; None keeps the original's
    # How its tensors are made from the original's, by name; those that keep their names left out.
    weights: tuple[tuple[str, Weight], ...]
    cause: Directive = field(compare=False)  # the directive that asked


@dataclass(frozen=True)
class Wish:
    """A request without arguments."""

    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class StageCut:
    """The request to end a pipeline stage after the module."""

    target: str  # the library that runs the stages, one of `TARGETS`
    cause: Directive  # the directive that asked
    may_move: bool = False  # whether the stage may end elsewhere if it cannot end there
    # In that case, the modules that all stages end after instead.
    instead: tuple[str, ...] = ()


# The libraries whose pipeline stages can be cut.
TARGETS = ("deepspeed", "torch")


@dataclass(frozen=True)
class Request:
    """A change that a directive requests directly."""

    change: Change
    cause: Directive = field(compare=False)


@dataclass(frozen=True)
class ModuleRequests:
    """All requests for one module."""

    shards: tuple[Shard, ...] = ()
    shares: tuple[ShardedAttribute, ...] = ()
    syncs: tuple[Sync, ...] = ()
    replacement: Replacement | None = None
    infer_sync: Wish | None = None  # infer missing collectives in it and below
    decompose: Wish | None = None  # for a linear layer: add its bias at the call site
    inlined: Wish | None = None  # its `forward` was inlined at its call site
    changes: tuple[Request, ...] = ()
    cut: StageCut | None = field(default=None, compare=False)  # does not change the module

    def causes(self) -> Causes:
        """The directives that shard the module or add collectives at its border."""
        splits = (*(s.cause for s in self.shards), *(s.cause for s in self.shares))
        return (*splits, *(s.cause for s in self.syncs))

    def every_cause(self) -> Causes:
        """The directive behind each request; equal requests have the same order."""
        single = (self.replacement, self.infer_sync, self.decompose, self.inlined)
        found = (*self.causes(), *(request.cause for request in self.changes))
        return (*found, *(each.cause for each in single if each is not None))

    def asking(self, change: Change, cause: Directive) -> ModuleRequests:
        """The same, with one more change."""
        return replace(self, changes=(*self.changes, Request(change, cause)))

    def asks(self, kind: type[Kind]) -> list[tuple[Kind, Directive]]:
        """The changes of one kind, each with its directive."""
        return [(r.change, r.cause) for r in self.changes if isinstance(r.change, kind)]

    def is_plain(self) -> bool:
        """Whether all requests remain valid whatever replaces the module."""
        lasting = tuple(r for r in self.changes if r.change.is_lasting)
        return self == ModuleRequests(changes=lasting)


EMPTY = ModuleRequests()
