"""The state of one run as a rank: metadata of every tensor, and the position in the record.

The modules that implement the run (operations, borders of modules, rules for sizes) share one
`Run` and record their findings in it.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_rewrite.code.text import Place
from slapo_rewrite.model.meta_device import KnownResults
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.operation_places import (
    calling_frame,
    first_argument,
    place_at,
    place_in_traceback,
    place_of,
)
from slapo_rewrite.sharding.packed_parts import Blocks
from slapo_rewrite.sharding.placements import Flow, PlacementError
from slapo_rewrite.sharding.trace import Entry, device_of
from slapo_rewrite.sharding.tracked_sizes import Attribute, Shape, Size, fits
from slapo_rewrite.sharding.types import (
    CannotFollow,
    Diverged,
    LayerKey,
    ShardingRequest,
    ShardingResult,
)

# Operations that code for repeating key/value heads uses.
_REPEATING = {
    "__getitem__", "expand", "reshape", "view", "repeat", "repeat_interleave", "unsqueeze",
    "flatten", "contiguous",
}  # fmt: skip


# Queries that read no elements of a tensor: about its kind, and about its size.
_ABOUT_KIND = {
    ".dtype", ".device", ".layout", ".is_meta", ".is_cuda", ".requires_grad", ".grad",
    "is_floating_point", "is_complex", "requires_grad_",
}  # fmt: skip
_ABOUT_SIZE = {".shape", ".ndim", "size", "dim", "numel", "nelement", "stride", "__len__"}


def memory_of(tensor: torch.Tensor) -> int | None:
    """A key of the storage that a tensor and its views share, valid while the storage exists.

    None for tensors without a storage: sparse ones, and those inside `torch.vmap`.
    """
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return key


@dataclass(frozen=True)
class Hypothesis:
    """The assumptions of a run as a rank."""

    sizes: frozenset[Attribute] = frozenset()  # attributes that are this rank's share
    fixed: frozenset[Attribute] = frozenset()  # attributes that are not
    # Whole parameters whose gradients are all-reduced.
    shared: frozenset[tuple[str, str]] = frozenset()
    summed: frozenset[tuple[str, int]] = frozenset()  # all-gathers that sum gradients
    # Whole parameters that one rank adds to partial sums, by module path and name.
    once: frozenset[tuple[str, str]] = frozenset()
    # Layers whose heads are replicated on several ranks, with the attributes that are the heads'
    # sizes.
    replicated: frozenset[tuple[LayerKey, str]] = frozenset()
    # Attributes with the number of times that such heads are repeated.
    repeats: frozenset[Attribute] = frozenset()


class Run:
    """A run as a rank in progress. Tables of tensors have the tensors' ids as keys.

    Attributes:
        tree: The model.
        request: What is sharded and synchronised.
        entries: The record of the whole model's operations.
        followed: The result so far.
        wanted: The assumptions of this run.
        editable: Returns the current text of a file that may be changed; None for other files.
        has_values: Whether the model is a small one that computes with values.
        says: The truth value of tensors on the meta device, where `forward` asks.
        results: Cached results of operations.
        flow: The placements of tensors.
        position: How many operations fitted.
        depth: How many sharded layers the run is inside of; operations there are not compared with
            the record.
        origins: The layer whose output alone a tensor is computed from.
        made_with: The tracked sizes that a tensor was made with.
        blocks: How a tensor's split axes are packed.
        whole: The shape that a tensor has in the whole model.
        replaced: The names of original parameters and buffers that were replaced for this run, by
            the storage that they and their views have.
        summed: The same for whole parameters whose gradients are all-reduced where they are read.
        read_as: The tensor that a read of such a parameter returns.
        replicas: How many ranks hold the same heads; 1 without replication.
        repeats: Attributes with the number of times that a rank's replicated heads are repeated.
        fed: Values that a loss takes as parts, without a gather.
        viewed: The tensor that another one has the elements of, or some of them.
        makers: The operands that a tensor was computed from.
        zeros: Tensors that were made as zeros.
        once: Whole parameters found to be added to partial sums, by module path and name.
        layers: The sharded layers that are installed in the model.
        linear: The linear ones among them.
        calls: Calls that take a size, by code and instruction: the ids of the modules whose methods
            make them, each with whether it passes parts.
        read: The ids of modules whose methods read a value that differs between the ranks, or
            whose gradient does, each with the path of the module that the value comes from.
        alive: Every tensor with recorded metadata, so that its id is not reused.
    """

    def __init__(
        self,
        tree: Tree,
        request: ShardingRequest,
        entries: list[Entry],
        followed: ShardingResult,
        wanted: Hypothesis,
        editable: Callable[[str], str | None],
        results: KnownResults,
        says: bool = False,
    ) -> None:
        self.tree, self.request, self.wanted, self.says = tree, request, wanted, says
        self.results = results
        self.entries, self.followed, self.editable = entries, followed, editable
        self.flow = Flow(
            (path, border.number)
            for path, borders in request.borders.items()
            for border in borders
            if border.partial_gradient is None and (path, border.number) not in wanted.summed
        )
        self.has_values = device_of(tree.root.live).type != "meta"
        self.position = 0
        self.depth = 0
        self.origins: dict[int, str] = {}
        self.made_with: dict[int, tuple[Size, ...]] = {}
        self.blocks: dict[int, Blocks] = {}
        self.whole: dict[int, Shape] = {}
        self.replaced: dict[int | None, str] = {}
        self.summed: dict[int | None, str] = {}
        self.read_as: dict[int, nn.Parameter] = {}
        self.replicas = 1
        self.repeats: set[Attribute] = set()
        self.fed: set[int] = set()
        self.viewed: dict[int, int] = {}
        self.makers: dict[int, list[torch.Tensor]] = {}
        self.zeros: set[int] = set()
        self.once: set[tuple[str, str]] = set()
        self.layers: list[nn.Module] = []
        self.linear: list[nn.Module] = []
        self.calls: dict[tuple[types.CodeType, int], set[tuple[int, bool]]] = {}
        self.read: set[tuple[int, str]] = set()
        self.alive: list[Any] = []

    def next_entry(self, func: Callable[..., Any]) -> Entry:
        """The next recorded operation; raises `Diverged` if it is another one."""
        if self.position >= len(self.entries) or self.entries[self.position].function != func:
            raise Diverged(
                "with sharded sizes `forward` takes another branch than without", place=self.place()
            )
        self.position += 1
        return self.entries[self.position - 1]

    def pass_over(self, func: Callable[..., Any], given: list[Shape]) -> None:
        """Skips recorded operations that repeat heads, where a rank repeats them once.

        `forward` may skip the repetition then, and call an operation that the record has later.
        """
        for ahead in range(self.position, len(self.entries)):
            entry = self.entries[ahead]
            if entry.function == func and fits(entry.inputs, given):
                self.position = ahead
            elif getattr(entry.function, "__name__", "") in _REPEATING:
                continue
            return

    def same(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Copies the metadata of a tensor to a copy of it."""
        for table in (self.origins, self.made_with, self.blocks, self.whole):
            if id(old) in table:
                table[id(new)] = table[id(old)]  # type: ignore[assignment]
        self.flow.set(new, self.flow.of(old))
        self.alive.append(new)

    def aliased(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another tensor object with the same values and metadata."""
        self.depth += 1
        try:
            new = tensor.view_as(tensor)
        finally:
            self.depth -= 1
        self.same(tensor, new)
        return new

    def made(self, like: torch.Tensor, shape: Sequence[int], has_gradient: bool) -> torch.Tensor:
        """A placeholder for an operation's result, which may be modified in place."""
        self.depth += 1
        try:
            new = like.new_empty(shape, requires_grad=has_gradient)
            return new.clone() if has_gradient else new  # no leaf of the graph
        finally:
            self.depth -= 1

    def check_reading(self, name: str, value: Any) -> None:
        """Raises if an operand is an original parameter, reached past the replaced attribute."""
        if name in _ABOUT_KIND:
            return
        for tensor in tensors(value):
            if (memory := memory_of(tensor)) is None or self.flow.knows(tensor):
                continue
            if (path := self.replaced.get(memory)) is not None:
                raise CannotFollow(
                    f"this reads `{path}` through another reference, stored when the model was "
                    "built, which is not followed",
                    path.rpartition(".")[0],
                    "read it as an attribute of the module that it belongs to",
                )
            if (path := self.summed.get(memory)) is not None and name not in _ABOUT_SIZE:
                raise CannotFollow(
                    f"`{path}` is used on parts, so its gradients have to be added up where it is "
                    "read, but this read cannot be changed",
                    path.rpartition(".")[0],
                    f"read it as `self.{path.rpartition('.')[2]}` in a method of its own module, "
                    "or as an attribute of that module in another's",
                )

    def seen_as(self, tensor: torch.Tensor) -> Iterator[int]:
        """The ids of a tensor and of those that it is a view, cast or slice of."""
        at: int | None = id(tensor)
        while at is not None:
            yield at
            at = self.viewed.get(at)

    def full_shape(self, tensor: torch.Tensor) -> Shape:
        """The shape that a tensor has in the whole model."""
        return self.whole.get(id(tensor), tuple(tensor.shape))

    def split_axes(self, tensor: torch.Tensor) -> list[int]:
        """The axes along which a rank has only a part."""
        sizes = zip(self.full_shape(tensor), tensor.shape, strict=True)
        return [axis for axis, (whole, here) in enumerate(sizes) if whole != here]

    def attributes_of(self, value: Any) -> list[Attribute]:
        """The undecided attributes that gave operands one of their sizes."""
        found: list[Attribute] = []
        for tensor in tensors(value):
            for size in self.made_with.get(id(tensor), ()):
                if int(size) in tensor.shape:
                    found += self.undecided(size)
        return list(dict.fromkeys(found))

    def undecided(self, size: int) -> list[Attribute]:
        """The attributes of a number for which this run assumes nothing."""
        known = self.wanted.sizes | self.wanted.fixed | self.wanted.repeats
        return [a for a in getattr(size, "attributes", ()) if not a.requested and a not in known]

    def source_of(self, value: Any) -> str | None:
        """The module that made an operand a part or a partial sum, if any."""
        return next((s for t in tensors(value) if (s := self.flow.of(t).source)), None)

    def place(self) -> Place | None:
        """The place of the operation, or of the call in an editable file that leads to it."""
        frame = calling_frame()
        while frame is not None and not self.editable(frame.f_code.co_filename):
            frame = frame.f_back
        return place_of(frame) if frame else None

    def editable_place(self) -> Place | None:
        """The operation's own place, if its file is editable."""
        frame = calling_frame()
        return place_of(frame) if frame and self.editable(frame.f_code.co_filename) else None

    def note_call(self, is_part: bool) -> None:
        """Records whether the current call, which may have to change, passes a part."""
        frame = calling_frame()
        if frame is not None and (caller := _calling_module(frame)) is not None:
            made = self.calls.setdefault((frame.f_code, frame.f_lasti), set())
            made.add((id(caller), is_part))

    def note_reader(self, given: Iterable[torch.Tensor], reader: nn.Module | None = None) -> None:
        """Records which module reads a value that differs between ranks, or whose gradient does."""
        states = [self.flow.of(tensor) for tensor in given if self.flow.knows(tensor)]
        sources = {s for state in states if (s := state.source or state.grad_reduced) is not None}
        if sources and (module := reader or _calling_module(calling_frame())) is not None:
            self.read.update((id(module), source) for source in sources)

    def note_inner_modules(self) -> None:
        """Records the modules that such values go through, from their source to their reader."""
        by_id = {id(node.live): node for node in self.tree.nodes.values()}
        for module, source in self.read:
            if module in by_id and source in self.tree.nodes:
                ways = [[*by_id[module].outwards()], [*self.tree.nodes[source].outwards()]]
                first = next(node for node in ways[0] if node in ways[1])
                for way in ways:
                    self.followed.inner |= {n.path for n in way[: way.index(first)]}
                self.followed.around.add(first.path)

    def note_changed_calls(self) -> None:
        """Records which modules make the calls that change, with parts and with whole values."""
        changed = {change.place for change in self.followed.arguments}
        paths = {id(node.live): path for path, node in self.tree.nodes.items()}
        for (code, instruction), made in self.calls.items() if changed else ():
            place = place_at(code, instruction)
            if place not in changed:
                continue
            for module, is_part in made:
                if module in paths:
                    given = (
                        self.followed.sharded_calls if is_part else self.followed.replicated_calls
                    )
                    given.add((place, paths[module]))

    def method_owner(self, frame: types.FrameType | None) -> str | None:
        """The path of the module whose method a frame runs."""
        module = first_argument(frame) if frame is not None else None
        return next((path for path, node in self.tree.nodes.items() if node.live is module), None)

    def refused(self, error: PlacementError) -> CannotFollow:
        """The error as a `CannotFollow` with its place in the model."""
        refused = CannotFollow(
            str(error),
            error.path,
            error.hint,
            sync=error.sync,
            position=self.position,
            remedy=error.remedy,
            place=place_in_traceback(error, self.editable) or self.place(),
        )
        refused.twice = error.twice
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if self.editable(frame.f_code.co_filename):
                refused.within = self.method_owner(frame) or refused.within
        return refused


def _calling_module(frame: types.FrameType | None) -> nn.Module | None:
    """The module in whose method a call is, be it in a function that this calls."""
    while frame is not None:
        if isinstance(module := first_argument(frame), nn.Module):
            return module
        frame = frame.f_back
    return None
