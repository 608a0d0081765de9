"""The data types of the sharding analysis.

`ShardingRequest` is its input and `ShardingResult` its output; the exceptions say why a request
cannot be carried out. There is no logic here.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from slapo_rewrite.code.text import Place
from slapo_rewrite.model.layers import Layer, Unit, base_of
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.sharding.tracked_sizes import Attribute

# Identifies a layer by the class of the module that constructs it and its path below that module.
LayerKey = tuple[type, str]


def layer_key(node: Node) -> LayerKey:
    """The key of the layer at a node."""
    return (node.owner or node).cls, node.relative


# In place of an argument's number: the whole call changes.
CALL = "call"
# Before an axis's number: the call takes its sizes from another tensor, except for this axis.
SIZES = "sizes"

# Names of the collectives in messages.
SPOKEN = {
    "all_reduce": "an all-reduce",
    "all_gather": "an all-gather",
    "reduce_scatter": "a reduce-scatter",
    "scatter": "a scatter",
    "all_to_all": "an all-to-all",
    "keep": "keeping it",
}


@dataclass(frozen=True)
class ShardedParameter:
    """A sharded parameter that a module owns itself: its name, split axis and packed parts."""

    name: str
    axis: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class LocalValue:
    """The value of a local variable at one statement of a method."""

    name: str  # the variable
    statement: Place  # a statement of the method
    # Whether it is the value after the statement, which assigns the variable, or the one before.
    is_bound: bool = False


@dataclass(frozen=True)
class ModuleBoundary:
    """A collective at the border of a module that no sharded layer carries out."""

    mode: str  # `fwd_pre`, `fwd_post` or `bwd_post`
    # `all_reduce`, `all_gather`, `reduce_scatter`, `scatter`, `all_to_all`, `keep`, or `function`:
    # the user's own, which is assumed to do what is needed.
    operation: str
    # The axis that is gathered or scattered; of an all-to-all, the one that is gathered.
    axis: int | None = None
    scatter_axis: int | None = None  # the axis that an all-to-all scatters
    # Whether the gradient of an all-gather's output is summed over the ranks; None where the
    # analysis decides.
    partial_gradient: bool | None = None
    number: int = 0  # its index among the module's syncs
    of: str | None = None  # the argument it applies to, if not the first
    # The local value it applies to, if it is inside the module's method.
    value: LocalValue | None = None


@dataclass(frozen=True)
class ShardingRequest:
    """What is sharded and synchronised: the input of the analysis."""

    layers: Mapping[str, Layer]  # the sharded layers, by module path
    # The sharded parameters that modules own themselves, by the module's path.
    parameters: Mapping[str, Sequence[ShardedParameter]]
    # Collectives at the borders of modules, by the module's path.
    borders: Mapping[str, Sequence[ModuleBoundary]] = field(default_factory=dict)
    # The layers among `layers` whose sharded output may go into a loss without a gather.
    heads: frozenset[str] = frozenset()
    # The integer attributes that the schedule makes this rank's share, by the module's path.
    attributes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    forked: frozenset[str] = frozenset()  # modules that draw random numbers of each rank's own
    # The embeddings whose tables may serve as output heads; their collectives are inferred.
    tied_heads: frozenset[str] = frozenset()
    # The files, by name, that have collectives at local values.
    texts: Mapping[str, ast.Module] = field(default_factory=dict)

    def owners(self, node: Node) -> list[Node]:
        """The modules whose code handles what is split at a node.

        Its owner, itself unless it is a layer, and a module that calls it without its owner.
        """
        is_layer = node.path in self.layers or base_of(node.cls) is not None
        own = (node.owner, None if is_layer else node, _calling_inside(node))
        return [each for each in own if each is not None]

    def holders(self, tree: Tree, alone: Collection[str] = ()) -> dict[str, Node]:
        """Maps each module at or below an owner of sharded parameters to the nearest such owner.

        Modules in `alone` that have no such owner map to themselves.
        """
        split = (tree.nodes[path] for path in (*self.layers, *self.parameters))
        own = {owner.path for node in split for owner in self.owners(node)}
        found: dict[str, Node] = {}
        for path, node in tree.nodes.items():
            if path in own:
                found[path] = node
            elif node.parent is not None and node.parent.path in found:
                found[path] = found[node.parent.path]
            elif path in alone:
                found[path] = node
        return found


def _calling_inside(node: Node) -> Node | None:
    """The module that calls a layer directly, without its owner's `forward`, if one does."""
    if node.owner is None or (around := node.owner.owner) is None:
        return None
    forward: Any = inspect.unwrap(getattr(around.cls, "forward", object))
    read = getattr(getattr(forward, "__code__", None), "co_names", ())
    return around if {node.name, node.owner.name}.issubset(read) else None


@dataclass(frozen=True)
class MissingCollective:
    """A collective that would fix what does not fit."""

    path: str  # the module at whose border it is missing
    mode: str  # `fwd_post` or `bwd_post`
    operation: str  # `all_reduce`, `all_gather` or `scatter`
    axis: int | None = None  # the axis that is gathered or scattered
    # The local value inside the module it applies to, if not the module's argument or result.
    value: LocalValue | None = None

    @classmethod
    def sum_of(cls, path: str | None) -> MissingCollective | None:
        """The all-reduce of a partial sum that a module returns."""
        return None if path is None else cls(path, "fwd_post", "all_reduce")

    @classmethod
    def whole_of(cls, path: str | None, axis: int = -1) -> MissingCollective | None:
        """The all-gather of a shard that a module returns."""
        return None if path is None else cls(path, "fwd_post", "all_gather", axis)

    @classmethod
    def gradient_of(cls, path: str | None) -> MissingCollective | None:
        """The all-reduce of the gradient of a module's input."""
        return None if path is None else cls(path, "bwd_post", "all_reduce")


@dataclass(frozen=True)
class ArgumentChange:
    """An argument of a call that must be written differently."""

    place: Place  # the call, or the subscript
    # Which argument: its number, then indices into a list, negative ones from the end; for a
    # subscript the axis's number and `start` or `stop`; `call` for all arguments but the first,
    # where the call becomes the call of a layer.
    index: tuple[int | str, ...]
    # The new text, with `{argument}` for the old text and `{part_size}` for that function's name;
    # for `call`, the layer's name.
    template: str
    source: str | None = field(default=None, compare=False)  # the layer whose output has the size


@dataclass(frozen=True)
class ParallelLoss:
    """A cross entropy of logits that stay sharded over the vocabulary."""

    place: Place  # the call in the model file that computes it
    # The replacement of a transformers loss function; None where the code calls `cross_entropy`
    # or a criterion itself.
    function: str | None
    owner: str  # the path of the module whose method makes the call
    head: str  # the path of the layer that computes the logits
    # Local variables that hold shards of that layer's output, with the split axis.
    names: tuple[tuple[str, int], ...]
    # Whether the call passes the layer's own size, which is a rank's, as the number of classes.
    told_of_part: bool


@dataclass(frozen=True)
class Statistic:
    """A mean or variance of sharded features, computed over all ranks."""

    place: Place  # the call that computes it, in a method
    function: str  # its replacement
    owner: str  # the path of the module whose method computes it
    parameter: str  # a parameter of that module that is split along the same features


@dataclass(frozen=True)
class TiedHead:
    """A product with the table of a sharded embedding, whose result is whole logits."""

    place: Place  # the product, in a method
    owner: str  # the path of the module whose method computes it
    embedding: str  # the path of the embedding


@dataclass(frozen=True)
class Draw:
    """An operation that draws random numbers for a shard, or for a whole value."""

    # The modules on the call stack, the innermost first, each with its current line; a module may
    # occur several times.
    callers: tuple[tuple[str, int], ...]
    place: Place | None  # the operation, or the call in an editable file that leads to it
    source: str  # the layer that the shard or the whole value comes from
    # Full sizes of the blocks that the split axis packs; empty for a whole value.
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """A read of a parameter."""

    path: str  # the module that owns the parameter
    name: str  # the parameter's name there
    reader: str | None  # the module whose method reads it; None outside of modules' methods
    place: Place | None = None  # the expression, unless `inside`
    inside: bool = True  # whether the reader is the parameter's own module


@dataclass(frozen=True)
class Way:
    """A path through `forward`: what decides it, besides the configuration."""

    training: bool = True  # whether the model is in training mode
    says: bool = False  # the truth value of tensors on the meta device, where `forward` asks
    # An argument and the value that it gets instead of its default, if any.
    flag: tuple[str, bool] | None = None

    def __str__(self) -> str:
        if self.flag is not None:
            return f"with `{self.flag[0]}={self.flag[1]}`"
        if not self.training:
            return "in eval mode"
        return "where a value says yes" if self.says else "in training"


@dataclass
class ShardingResult:
    """What has to change in the model for the sharded sizes: the output of the analysis."""

    sizes: frozenset[Attribute] = frozenset()  # integer attributes that become this rank's share
    # The attribute that holds the head size, for each layer whose output is split in heads.
    heads: dict[LayerKey, str] = field(default_factory=dict)
    # The unit that each rank's share of a layer must be a multiple of.
    units: dict[LayerKey, Unit] = field(default_factory=dict)
    # The number that each rank's share of a module's own parameter must be a multiple of.
    multiples: dict[tuple[LayerKey, str], int] = field(default_factory=dict)
    # The layers whose heads may be replicated on several ranks, with the head size's attribute.
    replicated: Mapping[LayerKey, str] = field(default_factory=dict)
    # Attributes with the number of times that replicated heads are repeated.
    repeats: frozenset[Attribute] = frozenset()
    # The same for heads that are not replicated.
    may_repeat: set[Attribute] = field(default_factory=set)
    # Those of `sizes` that are smaller than a supported world size.
    few: set[Attribute] = field(default_factory=set)
    # Arguments of calls in `forward` that must change.
    arguments: set[ArgumentChange] = field(default_factory=set)
    # Calls with sharded operands, each with the module whose method makes the call.
    sharded_calls: set[tuple[Place, str]] = field(default_factory=set)
    # Calls with whole operands, likewise.
    replicated_calls: set[tuple[Place, str]] = field(default_factory=set)
    # Whole parameters that are added to partial sums: only one rank may add them.
    once: set[tuple[LayerKey, str]] = field(default_factory=set)
    # Whole parameters used together with shards, by module path and name: their gradients need an
    # all-reduce. With the module that makes the shards, where known.
    shared: dict[tuple[str, str], str | None] = field(default_factory=dict)
    # Reads of parameters, recorded if there are any in `shared`.
    readings: set[Reading] = field(default_factory=set)
    # The modules whose methods, or those of modules between, handle values that differ between the
    # ranks, or whose gradients do. Such values cross the borders of `inner`, not of `around`.
    around: set[str] = field(default_factory=set)
    inner: set[str] = field(default_factory=set)
    # The sharded layers that each all-reduce the gradient of the same value, by the value's id.
    readers: dict[int, frozenset[str]] = field(default_factory=dict)
    # The all-gathers whose gradient is summed over the ranks, by module path and number.
    summed: frozenset[tuple[str, int]] = frozenset()
    # Modules that return their first tensor inside a tuple or mapping.
    nested: set[str] = field(default_factory=set)
    # Cross entropies of logits that stay sharded over the vocabulary, by place.
    losses: dict[Place, ParallelLoss] = field(default_factory=dict)
    # Means and variances computed over all ranks.
    statistics: set[Statistic] = field(default_factory=set)
    # Products with the tables of sharded embeddings.
    tied_heads: set[TiedHead] = field(default_factory=set)
    # Random numbers drawn for whole values, and for shards outside of `forked` modules.
    draws: set[Draw] = field(default_factory=set)
    # Where a module's packed output is taken apart by a list of sizes, or by slices: the module's
    # path, the call or subscript, and the index of the slice in it.
    cuts: set[tuple[str, Place, int]] = field(default_factory=set)
    even: set[int] = field(default_factory=set)  # sizes divisible by every supported world size
    # Where `forward` branches on the value of a tensor.
    questions: set[Place] = field(default_factory=set)
    # Paths through `forward` that were not followed to their end, in words, each with its place
    # if it has one.
    unfollowed: list[tuple[str, Place | None]] = field(default_factory=list)
    # The errors on those of them that an argument selects.
    misfits: list[CannotFollow] = field(default_factory=list)
    # Whether a small model was analysed instead, whose sizes may have other ratios.
    is_of_small: bool = False

    def take_in(self, other: ShardingResult) -> bool:
        """Merges the result of another path; False if a layer's head sizes would differ."""
        if any(self.heads.get(key, name) != name for key, name in other.heads.items()):
            return False
        for each in fields(self):
            mine, others = getattr(self, each.name), getattr(other, each.name)
            if each.name not in _TAKEN and isinstance(mine, (set, frozenset, dict)):
                setattr(self, each.name, others | mine)  # of two values for a key, mine
        self.unfollowed += other.unfollowed
        self.misfits += other.misfits
        return True


# The fields that `take_in` does not merge: assumptions of a run, and its own questions.
_TAKEN = {"sizes", "replicated", "repeats", "questions"}


class CannotRun(Exception):
    """The whole model does not run, for example on the meta device, so nothing is known."""

    def __init__(self, message: str, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised  # whether a `raise` or `assert` of the model itself is the cause


class CannotFollow(Exception):
    """An operation that cannot be made to fit the sharded sizes.

    Attributes:
        place: The operation's place in a file; by default that of the current operation.
        path: The sharded layer it concerns, where known.
        hint: What the user can do.
        attributes: Attributes that might fix it if they were this rank's share.
        changeable: Whether the number can be changed at the call, if no attribute fixes it.
        sync: The collective that it concerns, by module path and number.
        single: A layer whose output is a single head, and the attribute with the head's size.
        repeats: Attributes with the number of times that replicated heads are repeated.
        position: How many operations fitted before this one.
        remedy: The missing collective, where that is the cause.
        within: The module whose method contains the operation, or the call that leads to it.
        at_values: Collectives at local values inside modules that would fix it, the nearest first.
        twice: The modules that both sum a gradient, where that is the cause.
        to_scatter: A whole value of which a rank's slice would fit, and the slice's axis.
        to_gather: The last resort: the gather of a shard, as if its layer were not sharded.
    """

    def __init__(
        self,
        message: str,
        path: str | None = None,
        hint: str | None = None,
        *,
        place: Place | None = None,
        attributes: Sequence[Attribute] = (),
        changeable: bool = False,
        sync: tuple[str, int] | None = None,
        position: int = 0,
        remedy: MissingCollective | None = None,
    ) -> None:
        super().__init__(message)
        self.place, self.path, self.hint = place, path, hint
        self.attributes, self.changeable = attributes, changeable
        self.sync, self.position, self.remedy = sync, position, remedy
        self.single: tuple[LayerKey, str] | None = None
        self.repeats: frozenset[Attribute] = frozenset()
        self.within: str | None = None
        self.at_values: list[MissingCollective] = []
        self.twice: tuple[str, ...] = ()
        self.to_scatter: tuple[Any, int] | None = None
        self.to_gather: MissingCollective | None = None


class Diverged(CannotFollow):
    """`forward` takes another path than without sharding; the cause lies before this point."""


class NeverRuns(CannotFollow):
    """A collective belongs to a `forward` that does not run."""


class Indivisible(Exception):
    """This world size does not divide a size, such as the number of heads; another may."""

    def __init__(self, message: str, place: Place | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.place, self.hint = place, hint
