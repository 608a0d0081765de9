"""What is known during one run as a rank: of every tensor, and of how far the run has come.

The parts of the run (its operations, its borders, the rules for sizes) share one `Run`, and keep
here what they find out.
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

# What repeating the heads of keys and values is made of.
_REPEATING = {
    "__getitem__", "expand", "reshape", "view", "repeat", "repeat_interleave", "unsqueeze",
    "flatten", "contiguous",
}  # fmt: skip


# What asks a tensor for no numbers: of which kind it is, and of which size.
_ABOUT_KIND = {
    ".dtype", ".device", ".layout", ".is_meta", ".is_cuda", ".requires_grad", ".grad",
    "is_floating_point", "is_complex", "requires_grad_",
}  # fmt: skip
_ABOUT_SIZE = {".shape", ".ndim", "size", "dim", "numel", "nelement", "stride", "__len__"}


def memory_of(tensor: torch.Tensor) -> int | None:
    """What tells the memory of a tensor and of its views, as long as it is there.

    None for one without, as a sparse one is, or one of a number of calls that are made at once.
    """
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return key


@dataclass(frozen=True)
class Hypothesis:
    """What a run as a rank takes for granted."""

    sizes: frozenset[Attribute] = frozenset()  # attributes that are this rank's share
    fixed: frozenset[Attribute] = frozenset()  # attributes that are not
    # Whole parameters whose gradients are added up.
    shared: frozenset[tuple[str, str]] = frozenset()
    summed: frozenset[tuple[str, int]] = frozenset()  # all-gathers that sum gradients
    # Whole parameters that one rank adds to partial sums, by module path and name.
    once: frozenset[tuple[str, str]] = frozenset()
    # Layers of which several ranks hold the same heads, with the attributes that are the heads'
    # sizes.
    replicated: frozenset[tuple[LayerKey, str]] = frozenset()
    # Attributes that say how often such heads are repeated.
    repeats: frozenset[Attribute] = frozenset()


class Run:
    """A run as a rank, as far as it has come.

    Attributes:
        tree: The model.
        request: What is sharded and synchronised.
        entries: The operations of the whole model.
        followed: What has followed so far.
        wanted: What is taken for granted.
        editable: The text of a file that may be changed, as it is by now; None of another.
        has_values: Whether the model is a small one that computes with values.
        says: What questions of values that are not there are answered with.
        results: What operations gave before.
        flow: Which tensors are whole, parts or partial sums.
        position: How many operations fitted.
        depth: How many sharded layers the run is inside of; operations there are not held against
            the record.
        origins: The layer whose output a tensor, by its id, is made from alone.
        made_with: The marked sizes that a tensor was made with.
        blocks: How a tensor's split axes are packed.
        whole: The shape that a tensor, by its id, has in the whole model.
        replaced: The names of whole parameters and buffers in whose places others stand, by the
            memory that they, and views of them, have.
        summed: Those of whole parameters whose gradients are added up where they are read.
        read_as: What such a parameter, by its id, is where it is read so.
        replicas: How many ranks hold the same heads, where some do.
        repeats: Attributes that such heads are repeated by as often as in the whole model.
        fed: Values, by their ids, that a loss takes as the parts that they are.
        viewed: The tensor, by its id, that another one has the same elements as, or some of them.
        makers: What a tensor, by its id, was made from.
        zeros: Tensors, by their ids, that were made as zeros.
        once: Whole parameters found to be added to partial sums, by module path and name.
        layers: The sharded layers that stand in the model.
        linear: The linear ones among them.
        calls: Calls that are told a size, as code and instruction, each with the modules, by their
            ids, in whose methods they are made, and whether they are given parts there.
        read: Modules, by their ids, whose methods read what a rank has otherwise than one process,
            each with the module that it comes from.
        alive: Every tensor that something is known of, so that no other gets its id.
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
        """The recorded operation that the run has come to; `Diverged` where it is another one."""
        if self.position >= len(self.entries) or self.entries[self.position].function != func:
            raise Diverged(
                "with sharded sizes `forward` takes another way than without", place=self.place()
            )
        self.position += 1
        return self.entries[self.position - 1]

    def pass_over(self, func: Callable[..., Any], given: list[Shape]) -> None:
        """Leaves out recorded operations that repeat heads, where a rank repeats them once.

        `forward` may do nothing then, and so comes to an operation that the record has later.
        """
        for ahead in range(self.position, len(self.entries)):
            entry = self.entries[ahead]
            if entry.function == func and fits(entry.inputs, given):
                self.position = ahead
            elif getattr(entry.function, "__name__", "") in _REPEATING:
                continue
            return

    def same(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Remembers of a copy what is known of the original."""
        for table in (self.origins, self.made_with, self.blocks, self.whole):
            if id(old) in table:
                table[id(new)] = table[id(old)]  # type: ignore[assignment]
        self.flow.set(new, self.flow.of(old))
        self.alive.append(new)

    def aliased(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, as another tensor."""
        self.depth += 1
        try:
            new = tensor.view_as(tensor)
        finally:
            self.depth -= 1
        self.same(tensor, new)
        return new

    def made(self, like: torch.Tensor, shape: Sequence[int], has_gradient: bool) -> torch.Tensor:
        """A tensor in the place of an operation's result, which may be changed in place."""
        self.depth += 1
        try:
            new = like.new_empty(shape, requires_grad=has_gradient)
            return new.clone() if has_gradient else new  # no leaf of the graph
        finally:
            self.depth -= 1

    def check_reading(self, name: str, value: Any) -> None:
        """Refuses an operation on what is read in a way that means another tensor on a rank."""
        if name in _ABOUT_KIND:
            return
        for tensor in tensors(value):
            if (memory := memory_of(tensor)) is None or self.flow.knows(tensor):
                continue
            if (path := self.replaced.get(memory)) is not None:
                raise CannotFollow(
                    f"this reads `{path}` from where else it was put when the model was made, and "
                    "what a rank has there is not followed",
                    path.rpartition(".")[0],
                    "read it as an attribute of the module that it belongs to",
                )
            if (path := self.summed.get(memory)) is not None and name not in _ABOUT_SIZE:
                raise CannotFollow(
                    f"`{path}` is used on parts, so its gradients have to be added up where it is "
                    "read, and this reads it in a way that could not be changed",
                    path.rpartition(".")[0],
                    f"read it as `self.{path.rpartition('.')[2]}` in a method of its own module, "
                    "or as an attribute of that module in another's",
                )

    def seen_as(self, tensor: torch.Tensor) -> Iterator[int]:
        """A tensor and those that it is another shape, type or part of, by their ids."""
        at: int | None = id(tensor)
        while at is not None:
            yield at
            at = self.viewed.get(at)

    def full_shape(self, tensor: torch.Tensor) -> Shape:
        """The shape that a tensor has in the whole model."""
        return self.whole.get(id(tensor), tuple(tensor.shape))

    def split_axes(self, tensor: torch.Tensor) -> list[int]:
        """The axes of which a rank has only its part."""
        sizes = zip(self.full_shape(tensor), tensor.shape, strict=True)
        return [axis for axis, (whole, here) in enumerate(sizes) if whole != here]

    def attributes_of(self, value: Any) -> list[Attribute]:
        """The attributes that full-sized tensors among the operands were made with."""
        found: list[Attribute] = []
        for tensor in tensors(value):
            for size in self.made_with.get(id(tensor), ()):
                if int(size) in tensor.shape:
                    found += self.undecided(size)
        return list(dict.fromkeys(found))

    def undecided(self, size: int) -> list[Attribute]:
        """The attributes of a number that may yet turn out to be this rank's share."""
        known = self.wanted.sizes | self.wanted.fixed | self.wanted.repeats
        return [a for a in getattr(size, "attributes", ()) if not a.requested and a not in known]

    def source_of(self, value: Any) -> str | None:
        """The module that made one of the operands a part or a partial sum, if any is."""
        return next((s for t in tensors(value) if (s := self.flow.of(t).source)), None)

    def place(self) -> Place | None:
        """The operation's place in an editable file, or the place that leads to it."""
        frame = calling_frame()
        while frame is not None and not self.editable(frame.f_code.co_filename):
            frame = frame.f_back
        return place_of(frame) if frame else None

    def editable_place(self) -> Place | None:
        """The operation's own place, where its file may be changed."""
        frame = calling_frame()
        if frame is None or not self.editable(frame.f_code.co_filename):
            return None
        return place_of(frame)

    def note_call(self, is_part: bool) -> None:
        """Notes of a call that may have to change whether it is given a part."""
        frame = calling_frame()
        if frame is not None and (caller := _calling_module(frame)) is not None:
            made = self.calls.setdefault((frame.f_code, frame.f_lasti), set())
            made.add((id(caller), is_part))

    def note_reader(self, given: Iterable[torch.Tensor], reader: nn.Module | None = None) -> None:
        """Notes the module whose method reads what a rank has otherwise than one process."""
        states = [self.flow.of(tensor) for tensor in given if self.flow.knows(tensor)]
        sources = {s for state in states if (s := state.source or state.grad_reduced) is not None}
        if sources and (module := reader or _calling_module(calling_frame())) is not None:
            self.read.update((id(module), source) for source in sources)

    def note_inner_modules(self) -> None:
        """Notes the modules among which values go that a rank has otherwise than one process.

        They are between a module that reads such a value and the one that it comes from.
        """
        by_id = {id(node.live): node for node in self.tree.nodes.values()}
        for module, source in self.read:
            if module in by_id and source in self.tree.nodes:
                ways = [[*by_id[module].outwards()], [*self.tree.nodes[source].outwards()]]
                first = next(node for node in ways[0] if node in ways[1])
                for way in ways:
                    self.followed.inner |= {n.path for n in way[: way.index(first)]}
                self.followed.around.add(first.path)

    def note_changed_calls(self) -> None:
        """Notes which modules make the calls that change, with parts and with whole values."""
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
        """The path of the module whose method a frame is in."""
        module = first_argument(frame) if frame is not None else None
        if not isinstance(module, nn.Module):
            return None
        return next((path for path, node in self.tree.nodes.items() if node.live is module), None)

    def refused(self, error: PlacementError) -> CannotFollow:
        """A misuse, with the place in the model where it happens."""
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
