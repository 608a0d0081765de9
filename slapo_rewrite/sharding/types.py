"""The words that sharding is asked for and answered in.

`ShardingRequest` says what is sharded, `ShardingResult` what follows from it; the errors say what
stands against it. Nothing here runs anything.
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

# A layer by the class of the module that makes it, and by its path from there.
LayerKey = tuple[type, str]


def layer_key(node: Node) -> LayerKey:
    """The key of the layer at a node."""
    return (node.owner or node).cls, node.relative


# What stands in the place of an argument's number where a whole call changes.
CALL = "call"
# And where it takes its sizes of another tensor, before the number of the one that is not of it.
SIZES = "sizes"

# The collectives in words.
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
    """A parameter of a module's own that is split: its name, axis and packed parts."""

    name: str
    axis: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class LocalValue:
    """A value by the local name that it has in a method."""

    name: str  # the name
    statement: Place  # a statement of the method
    # Whether it is what the statement binds the name to, not what it finds there.
    is_bound: bool = False


@dataclass(frozen=True)
class ModuleBoundary:
    """A collective at the border of a module, where no sharded layer carries it out."""

    mode: str  # `fwd_pre`, `fwd_post` or `bwd_post`
    # `all_reduce`, `all_gather`, `reduce_scatter`, `scatter`, `all_to_all`, `keep`, or `function`
    # for one that is taken to do what is needed.
    operation: str
    # The axis that is gathered or scattered; of an all-to-all, the one that is gathered.
    axis: int | None = None
    scatter_axis: int | None = None  # the axis that an all-to-all scatters
    # Whether the gradient of what an all-gather gives is summed over the ranks; None where that is
    # to be found out.
    partial_gradient: bool | None = None
    number: int = 0  # which of the module's syncs it is
    of: str | None = None  # the argument that it is about, where that is not the first
    # The value inside that it is about, where it does not stand at the border.
    value: LocalValue | None = None


@dataclass(frozen=True)
class ShardingRequest:
    """What is sharded and synchronised."""

    layers: Mapping[str, Layer]  # the sharded layer at each path
    # The split parameters of a module's own, by the module's path.
    parameters: Mapping[str, Sequence[ShardedParameter]]
    # Further collectives, by the module's path.
    borders: Mapping[str, Sequence[ModuleBoundary]] = field(default_factory=dict)
    # The layers among `layers` whose parts may go into a loss as they are.
    heads: frozenset[str] = frozenset()
    # The integer attributes that are this rank's share, by the module's path.
    attributes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    forked: frozenset[str] = frozenset()  # the modules all of whose random numbers are a rank's own
    # The embeddings whose tables may be heads, with the collectives inferred.
    tied_heads: frozenset[str] = frozenset()
    # The files, by name, in which collectives stand at values.
    texts: Mapping[str, ast.Module] = field(default_factory=dict)

    def owners(self, node: Node) -> list[Node]:
        """The modules that have what is split at a node.

        That around it, itself if no layer, and what calls it past the `forward` of that around it.
        """
        is_layer = node.path in self.layers or base_of(node.cls) is not None
        own = (node.owner, None if is_layer else node, _calling_inside(node))
        return [each for each in own if each is not None]

    def holders(self, tree: Tree, alone: Collection[str] = ()) -> dict[str, Node]:
        """For every module below sharded parameters or with some: the nearest that has them.

        Those `alone` stand for themselves where there is none.
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
    """The module that calls a layer past the `forward` of the one that holds it, if one does."""
    if node.owner is None or (around := node.owner.owner) is None:
        return None
    forward: Any = inspect.unwrap(getattr(around.cls, "forward", object))
    read = getattr(getattr(forward, "__code__", None), "co_names", ())
    return around if {node.name, node.owner.name}.issubset(read) else None


@dataclass(frozen=True)
class MissingCollective:
    """A collective that would mend what does not fit."""

    path: str  # the module at whose border it is missing
    mode: str  # `fwd_post` or `bwd_post`
    operation: str  # `all_reduce`, `all_gather` or `scatter`
    axis: int | None = None  # the axis that is gathered or scattered
    # The value inside the module that it is about, if it is not its argument or result.
    value: LocalValue | None = None

    @classmethod
    def sum_of(cls, path: str | None) -> MissingCollective | None:
        """The partial sums that a module gives, added up."""
        return None if path is None else cls(path, "fwd_post", "all_reduce")

    @classmethod
    def whole_of(cls, path: str | None, axis: int = -1) -> MissingCollective | None:
        """The parts that a module gives, put together."""
        return None if path is None else cls(path, "fwd_post", "all_gather", axis)

    @classmethod
    def gradient_of(cls, path: str | None) -> MissingCollective | None:
        """The gradients of what a module is given, added up."""
        return None if path is None else cls(path, "bwd_post", "all_reduce")


@dataclass(frozen=True)
class ArgumentChange:
    """An argument of a call that must be written differently."""

    place: Place  # the call, or the subscript
    # Which argument: its number, and further ones into a list, from the end where they are
    # negative; for a subscript the axis's number and `start` or `stop`; `call` for all but the
    # first, where a layer is called.
    index: tuple[int | str, ...]
    # How it is written, with `{argument}` for what stands there and `{part_size}` for that
    # function; the layer that is called.
    template: str
    source: str | None = field(default=None, compare=False)  # the layer whose output has the size


@dataclass(frozen=True)
class ParallelLoss:
    """A cross entropy of logits of which a rank has a part."""

    place: Place  # the call in the model file that computes it
    # What it becomes, where a function of transformers computes it; None where it is
    # `cross_entropy` or a criterion that stands there itself.
    function: str | None
    owner: str  # the path of the module whose method that is
    head: str  # the path of the layer that gives the logits
    # Local variables that hold parts from that layer, with the axis that is split.
    names: tuple[tuple[str, int], ...]
    # Whether it is told a rank's number of classes for the model's: the layer's own size.
    told_of_part: bool


@dataclass(frozen=True)
class Statistic:
    """A mean or variance of features of which a rank has a part, taken over all ranks."""

    place: Place  # the call that computes it, in a method
    function: str  # what takes its place
    owner: str  # the path of the module whose method that is
    parameter: str  # the parameter of that module that is split along these features


@dataclass(frozen=True)
class TiedHead:
    """A product with the table of an embedding that is split, whose result is whole logits."""

    place: Place  # the product, in a method
    owner: str  # the path of the module whose method that is
    embedding: str  # the path of the embedding


@dataclass(frozen=True)
class Draw:
    """Random numbers that are drawn for a part by all ranks alike, or for a whole value."""

    # The modules that are being called, the innermost first, each with the line that it has come
    # to; one may be there several times.
    callers: tuple[tuple[str, int], ...]
    place: Place | None  # where they are drawn, or what leads to it
    source: str  # the layer whose part it is, or from which a whole value comes
    # Full sizes of the blocks that the split axis packs; none of a whole value.
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """Where a parameter is read."""

    path: str  # the module that it belongs to
    name: str  # its name there
    reader: str | None  # the module whose method reads it; None where no module's does
    place: Place | None = None  # where, if not inside
    inside: bool = True  # whether it is a method of the module that the parameter belongs to


@dataclass(frozen=True)
class Way:
    """A way through `forward`: what decides it, besides the configuration."""

    training: bool = True  # whether the model is in training mode
    says: bool = False  # what questions of values that are not there are answered with
    # An argument that is given the other value than its default, if any.
    flag: tuple[str, bool] | None = None

    def __str__(self) -> str:
        if self.flag is not None:
            return f"with `{self.flag[0]}={self.flag[1]}`"
        if not self.training:
            return "in eval mode"
        return "where a value says yes" if self.says else "in training"


@dataclass
class ShardingResult:
    """What follows from the sharded sizes."""

    sizes: frozenset[Attribute] = frozenset()  # integer attributes that become this rank's share
    # The attribute that is a head's size, for each layer that gives heads.
    heads: dict[LayerKey, str] = field(default_factory=dict)
    # What the split of a layer must be a multiple of.
    units: dict[LayerKey, Unit] = field(default_factory=dict)
    # What the split of a module's own parameter must be a multiple of.
    multiples: dict[tuple[LayerKey, str], int] = field(default_factory=dict)
    # The layers of which several ranks may hold the same heads.
    replicated: Mapping[LayerKey, str] = field(default_factory=dict)
    # Attributes that say how often such heads are repeated.
    repeats: frozenset[Attribute] = frozenset()
    # Attributes that heads are repeated by which no rank shares with another.
    may_repeat: set[Attribute] = field(default_factory=set)
    # Those of `sizes` that are smaller than a world size that fits.
    few: set[Attribute] = field(default_factory=set)
    # Arguments of calls in `forward` that have to change.
    arguments: set[ArgumentChange] = field(default_factory=set)
    # The calls that are given parts, each with the module in whose method it stands.
    sharded_calls: set[tuple[Place, str]] = field(default_factory=set)
    # Those that are given whole values, likewise.
    replicated_calls: set[tuple[Place, str]] = field(default_factory=set)
    # Whole parameters that are added to partial sums, by one rank then.
    once: set[tuple[LayerKey, str]] = field(default_factory=set)
    # Whole parameters that meet parts, by module path and name: their gradients have to be added
    # up. With the module that makes what they meet, where known.
    shared: dict[tuple[str, str], str | None] = field(default_factory=dict)
    # Where parameters are read, if there are any among `shared`.
    readings: set[Reading] = field(default_factory=set)
    # The modules inside of which parts or partial sums are, and what come or go from module to
    # module there; those whose own border such values pass.
    around: set[str] = field(default_factory=set)
    inner: set[str] = field(default_factory=set)
    # The split layers that each add up the gradient of the same value, by that value's identity.
    readers: dict[int, frozenset[str]] = field(default_factory=dict)
    # The all-gathers whose gradient has to be summed over the ranks, by module path and number.
    summed: frozenset[tuple[str, int]] = frozenset()
    # Modules whose output has its first tensor inside of something else.
    nested: set[str] = field(default_factory=set)
    # Cross entropies of what stays split over the vocabulary, by place.
    losses: dict[Place, ParallelLoss] = field(default_factory=dict)
    # Means and variances that are taken over all ranks.
    statistics: set[Statistic] = field(default_factory=set)
    # Products with the tables of split embeddings.
    tied_heads: set[TiedHead] = field(default_factory=set)
    # Random numbers for whole values, and for parts outside of what is forked.
    draws: set[Draw] = field(default_factory=set)
    # Where the parts that a module makes are taken apart by a list of sizes, or by slices: the
    # module's path, the call or subscript, and the number of the slice in that.
    cuts: set[tuple[str, Place, int]] = field(default_factory=set)
    even: set[int] = field(default_factory=set)  # sizes that every world size that fits divides
    # Where `forward` asks for values that decide which way it goes.
    questions: set[Place] = field(default_factory=set)
    # Ways through `forward` that were not followed to their end, in words, each with its place if
    # it has one.
    unfollowed: list[tuple[str, Place | None]] = field(default_factory=list)
    # What does not fit on those of them that arguments choose.
    misfits: list[CannotFollow] = field(default_factory=list)
    # Whether a small model was followed instead, whose sizes may be in other ratios.
    is_of_small: bool = False

    def take_in(self, other: ShardingResult) -> bool:
        """Adds what follows on another way; False where a layer's heads would be of two sizes."""
        if any(self.heads.get(key, name) != name for key, name in other.heads.items()):
            return False
        for each in fields(self):
            mine, others = getattr(self, each.name), getattr(other, each.name)
            if each.name not in _TAKEN and isinstance(mine, (set, frozenset, dict)):
                setattr(self, each.name, others | mine)  # of two that differ, what is known
        self.unfollowed += other.unfollowed
        self.misfits += other.misfits
        return True


# What a run takes for granted, and asks of its own.
_TAKEN = {"sizes", "replicated", "repeats", "questions"}


class CannotRun(Exception):
    """The whole model does not run, on the meta device say, so nothing can be said."""

    def __init__(self, message: str, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised  # whether the model itself raises the error, by a statement of its own


class CannotFollow(Exception):
    """An operation that cannot be made to fit the sharded sizes.

    Attributes:
        place: The operation, where it stands in a file; by default the one that is carried out.
        path: The sharded layer it concerns, where known.
        hint: What the user can do.
        attributes: Attributes that might mend it if they were this rank's share.
        changeable: Whether the number can be changed where it stands, if no attribute mends it.
        sync: The collective that it concerns, by module path and number.
        single: A layer that gives a single head, and the attribute that is the head's size.
        repeats: Attributes that say how often heads are repeated that several ranks hold.
        position: How many operations fitted before.
        remedy: The collective that is missing, where that is what is wrong.
        within: The module in whose method the operation stands, or what leads to it.
        at_values: The collectives that would mend it at values inside modules, the nearest first.
        twice: The modules that both add up a gradient, where that is what is wrong.
        to_scatter: A whole value that would fit by a rank's slice of it, and the slice's axis.
        to_gather: What would mend it if nothing else does: the gather of a part, as a layer that is
            not split has it.
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
    """`forward` goes another way than without sharding; what was wrong came before."""


class NeverRuns(CannotFollow):
    """A collective stands in a `forward` that does not run."""


class Indivisible(Exception):
    """This world size does not divide a head count; another may."""

    def __init__(self, message: str, place: Place | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.place, self.hint = place, hint
