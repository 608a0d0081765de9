"""Checks the inputs of sharded layers and of collectives, and records their outputs' placements.

How a layer is split says which placements it takes and returns. A collective at the border of a
module changes the placement of its first tensor, or covers its gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_rewrite.model.layers import Split, scatters, split_of
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.tree import Node
from slapo_rewrite.runtime.tensor_parallel import ReduceScatter, sum_later, sum_now
from slapo_rewrite.sharding.packed_parts import described, ratio_of, reduced
from slapo_rewrite.sharding.placements import (
    PARTIAL,
    REPLICATE,
    SHARD,
    PlacementError,
    State,
    gather_line,
)
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.trace import layer_call
from slapo_rewrite.sharding.tracked_sizes import Shape
from slapo_rewrite.sharding.types import SPOKEN, Indivisible, MissingCollective, ModuleBoundary
from slapo_rewrite.sharding.units import note_even

# Parts of a size that is a multiple of this count as even.
EVEN = 8


def enter_layer(run: Run, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Checks the inputs of a sharded layer; operations inside it are not checked."""
    run.depth += 1
    if run.depth == 1:
        for tensor in {id(t): t for t in tensors((args, kwargs))}.values():
            _check_layer_input(run, str(module._followed_path), tensor)


def _check_layer_input(run: Run, path: str, tensor: torch.Tensor) -> None:
    """Raises `PlacementError` if an input does not have the placement that the layer takes."""
    layer, node, state = run.request.layers[path], run.tree.nodes[path], run.flow.of(tensor)
    split = split_of(node.live, layer)
    if node.owner is not None:
        run.note_reader([tensor], node.owner.live)
    keywords = dict(layer.keywords)
    if state.kind == PARTIAL:
        raise PlacementError(
            f"`{path}` needs its input, but `{state.source}` gives a partial sum of it on each "
            "rank",
            'add it up: .sync("fwd_post", "all_reduce")',
            state.source,
            remedy=MissingCollective.sum_of(state.border),
            tensor=tensor,
        )
    axes, taken = run.split_axes(tensor), split.axes[0] % max(1, tensor.dim())
    if axes and (axes != [taken] or not split.takes_part):
        raise PlacementError(
            f"`{path}` is split over its {_taken(split)}, but its input is split along axis "
            f"{axes[0]}",
            f"gather it before: {gather_line(axes[0], tensor.dim(), 'fwd_pre')} on `{path}` or the "
            "module around it",
            path,
        )
    if split.takes_part:
        if state.kind != SHARD:
            raise PlacementError(
                f"`{path}` is split over its {_taken(split)}, but its input is whole on every rank",
                "split the layer before it over its outputs, or this one as well",
                path,
            )
        run.flow.check_own(state, path)
        _check_same_blocks(run, path, tensor, split.axes[0] % tensor.dim(), keywords)
    elif split.output == "whole":
        run.flow.cover(tensor, path)
    elif split.has_input_gradient:
        borders = run.request.borders.get(path, ())
        if any(b.mode == "bwd_post" for b in borders):
            return
        if keywords.get("reduce_input_gradient", True):
            run.flow.cover(tensor, path)
            readers = run.followed.readers
            readers[id(tensor)] = readers.get(id(tensor), frozenset()) | {path}
        else:
            run.flow.meet_shards([tensor], f"`{path}`", path)


def _taken(split: Split) -> str:
    """What a layer is split over, for messages."""
    if split.output == "partial sum":
        return "inputs"
    return "channels" if split.takes_part else "outputs"


def _check_same_blocks(
    run: Run, path: str, tensor: torch.Tensor, axis: int, keywords: Mapping[str, Any]
) -> None:
    packed = run.blocks.get(id(tensor), {}).get(axis, (1,))
    ratio = ratio_of(keywords)
    if reduced(packed) != reduced(ratio):
        raise PlacementError(
            f"the input of `{path or 's'}` has {described(packed)} along its split axis, but it is "
            f"sharded for {described(ratio)}",
            "shard both with the same `parts`",
            path,
        )


def leave_layer(run: Run, module: nn.Module, args: Any, output: Any) -> None:
    """Records the placement of a sharded layer's output: part, partial sum or whole."""
    run.depth -= 1
    if run.depth:
        return
    run.next_entry(layer_call)
    path = str(module._followed_path)
    layer = run.request.layers[path]
    split = split_of(run.tree.nodes[path].live, layer)
    keywords = dict(layer.keywords)
    reduction = keywords.get("reduce", sum_now)
    axis = reduction.axis if isinstance(reduction, ReduceScatter) else None
    for tensor in tensors(output):
        if split.output == "partition":
            replicated_shard = getattr(module, "replicas", 1) > 1
            part = State(SHARD, path, replicated_shard, split.axes[0])
            kind = State() if keywords.get("gather_output") else part
        elif axis is not None:
            kind = State(SHARD, path, axis=axis)
        else:
            kind = State(PARTIAL, path) if reduction is sum_later else State()
        run.flow.set(tensor, kind)
        run.alive.append(tensor)
        if kind.kind != SHARD:
            continue
        shape = run.whole[id(tensor)] = run.entries[run.position - 1].outputs[0]
        if axis is not None:
            run.blocks[id(tensor)] = {axis % tensor.dim(): (shape[axis],)}
            continue
        run.origins[id(tensor)] = path
        ratio = ratio_of(keywords)
        own = split.axes[0] % tensor.dim()
        run.blocks[id(tensor)] = {own: tuple(shape[own] * r // sum(ratio) for r in ratio)}


def enter_border(
    run: Run, node: Node, border: ModuleBoundary, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Applies a collective to an argument of a module: the first, or `border.of`."""
    names = [*inspect.signature(module.forward).parameters]
    place = names.index(border.of) if border.of is not None else 0
    name = border.of or next(iter(names), None)
    tensor = args[place] if place < len(args) else kwargs.get(name)
    if tensor is None and border.of is not None:
        return None  # the argument is optional
    if not isinstance(tensor, torch.Tensor):
        what = f"`{border.of}`" if border.of is not None else "its first argument"
        return _no_tensor(node, border, f"{node.shown} gets no tensor as {what}")
    side = f"argument `{border.of}`" if border.of is not None else "input"
    new = _Crossing(run, node, border, tensor, side).made()
    if place < len(args):
        return (*args[:place], new, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: new}


def leave_border(
    run: Run, node: Node, border: ModuleBoundary, module: nn.Module, args: Any, output: Any
) -> Any:
    """Applies a collective to the first tensor of a module's output."""
    tensor = _first_of(output)
    if not isinstance(tensor, torch.Tensor):
        return _no_tensor(node, border, f"the first value that {node.shown} returns is no tensor")
    if tensor is not output:
        run.followed.nested.add(node.path)
    new = _Crossing(run, node, border, tensor, "output").made()
    if isinstance(output, tuple):
        return (new, *output[1:])
    if isinstance(output, Mapping):
        output[next(iter(output))] = new  # type: ignore[index]
        return output
    return new


def cross_value(run: Run, node: Node, border: ModuleBoundary, tensor: torch.Tensor) -> torch.Tensor:
    """Applies a collective to a local value inside a module."""
    assert border.value is not None
    if not isinstance(tensor, torch.Tensor):
        hint = f"it is a {type(tensor).__name__}"
        raise PlacementError(
            f"`{border.value.name}` of {node.shown} is no tensor",
            hint,
            node.path,
            (node.path, border.number),
        )
    return _Crossing(run, node, border, tensor, f"value `{border.value.name}`").made()


def _no_tensor(node: Node, border: ModuleBoundary, message: str) -> None:
    """Raises `PlacementError`, except for the user's own function, which may handle such values."""
    if border.operation != "function":
        hint = "put the sync on a module inside or around it"
        raise PlacementError(message, hint, node.path, (node.path, border.number))


def _first_of(output: Any) -> Any:
    """The first item of a module's output: of a tuple, of a mapping, or the output itself."""
    if isinstance(output, tuple):
        return output[0] if output else None
    return next(iter(output.values()), None) if isinstance(output, Mapping) else output


class _Crossing:
    """A tensor on which a collective at the border of a module is simulated."""

    def __init__(
        self, run: Run, node: Node, border: ModuleBoundary, tensor: torch.Tensor, side: str
    ) -> None:
        self.run, self.node, self.border, self.tensor = run, node, border, tensor
        self.state = run.flow.of(tensor)
        self.value = f"the {side} of {node.shown}" if node.path else f"the model's {side}"
        self.split = run.split_axes(tensor)
        self.key = (node.path, border.number)
        run.note_reader([tensor], node.live)

    def made(self) -> torch.Tensor:
        """The result of the collective; raises `PlacementError` if it does not fit the value."""
        new, state = getattr(self, f"_{self.border.operation}")()
        self.run.flow.set(new, state)
        self.run.alive.append(new)
        return new  # type: ignore[no-any-return]

    def _function(self) -> tuple[torch.Tensor, State]:
        state = self.state
        if self.border.mode == "bwd_post" and state.grad_reduced is None:
            return self._same(), State(state.kind, grad_reduced=self.node.path)
        if self.border.mode != "fwd_post":
            return self._same(), state
        if state.kind == SHARD:
            return self._resized(self.run.full_shape(self.tensor)), State()
        return self._same(), State()

    def _keep(self) -> tuple[torch.Tensor, State]:
        if self.border.axis is None and self.state.kind != REPLICATE:
            raise self._misuse(f"{self.value} is {self._described()}, not whole")
        if self.border.axis is not None:
            self._check_part(self.border.axis)
        return self._same(), self.state

    def _all_reduce(self) -> tuple[torch.Tensor, State]:
        if self.border.mode == "bwd_post":
            state, new = self.run.flow.cover(self.tensor, self.node.path, True), self._same()
            # An input without gradient is treated as if it had one: a caller may require it.
            with torch._C.DisableTorchFunction():
                new.requires_grad_(new.is_floating_point())
            return new, state
        self._check_sum("all_reduce")
        return self._same(), State()

    def _reduce_scatter(self) -> tuple[torch.Tensor, State]:
        self._check_sum("reduce_scatter")
        return self._slice(), self._part(self.border.axis)

    def _scatter(self) -> tuple[torch.Tensor, State]:
        if self.state.kind == PARTIAL:
            raise self._misuse(
                f"{self.value} is a partial sum: each rank would keep a slice of its summand",
                f"add up and scatter: {self._line('reduce_scatter')}",
                MissingCollective.sum_of(self.state.border),
            )
        if self.state.kind == SHARD:
            raise self._misuse(f"{self.value} is {self._described()}: it is already scattered")
        if self.state.grad_reduced is not None:
            raise self._misuse(
                f"{self.value} is inside `{self.state.grad_reduced}`, whose gradients are summed "
                "over the ranks, but a scatter's gradient is already complete on each rank",
                "scatter the value before that module",
            )
        return self._slice(), self._part(self.border.axis)

    def _all_gather(self) -> tuple[torch.Tensor, State]:
        self._check_part(self.border.axis)
        self._check_slices()
        given = self.border.partial_gradient
        summed = self.key in self.run.wanted.summed if given is None else given
        grad_reduced = self.node.path if summed and self.tensor.requires_grad else None
        shape = self.run.full_shape(self.tensor)
        return self._resized(shape), State(grad_reduced=grad_reduced, gathers=frozenset({self.key}))

    def _all_to_all(self) -> tuple[torch.Tensor, State]:
        self._check_part(self.border.axis)
        self._check_slices()
        shape = self._sliced(self.run.full_shape(self.tensor), self.border.scatter_axis)
        return self._resized(shape), self._part(self.border.scatter_axis)

    def _check_slices(self) -> None:
        """Raises unless the value lies in slices of one size, in the ranks' order."""
        axis, source = self._axis(), self.state.source
        size = self.run.full_shape(self.tensor)[axis]
        packed = self.run.blocks.get(id(self.tensor), {}).get(axis)
        hint = f'gather it there: .sync("fwd_post", "all_gather", axis=-1) on `{source}`'
        if packed and len(packed) > 1:
            raise self._misuse(
                f"{self.value} has {described(packed)} side by side: only the layer that computes "
                "them can gather each separately",
                hint,
            )
        if self._was_scattered():
            return
        note_even(self.run, self.tensor, axis)  # for a world of 3, say
        if size % EVEN:
            raise self._misuse(
                f"{self.value} has {size} features, which not every world size divides: only the "
                "layer that computes it can gather uneven parts",
                hint,
            )

    def _was_scattered(self) -> bool:
        """Whether a scatter made the part: a scatter refuses sizes that it cannot divide."""
        source, request = self.state.source or "", self.run.request
        layer = request.layers.get(source)
        return (layer is not None and scatters(layer)) or any(
            border.operation in ("scatter", "reduce_scatter", "all_to_all")
            for border in request.borders.get(source, ())
        )

    def _part(self, axis: int | None) -> State:
        assert axis is not None
        return State(SHARD, self.node.path, axis=axis)

    def _same(self) -> torch.Tensor:
        return self.run.aliased(self.tensor)

    def _slice(self) -> torch.Tensor:
        """This rank's slice along the collective's axis."""
        return self._resized(self._sliced(tuple(self.tensor.shape), self.border.axis))

    def _sliced(self, shape: Shape, axis: int | None) -> Shape:
        assert axis is not None
        if not -len(shape) <= axis < len(shape):
            raise self._misuse(f"{self.value} has {len(shape)} axes: there is no axis {axis}")
        axis %= len(shape)
        world = dist.get_world_size()
        if shape[axis] % world:
            raise Indivisible(f"{self.value} has {shape[axis]} elements along axis {axis}")
        return (*shape[:axis], shape[axis] // world, *shape[axis + 1 :])

    def _resized(self, shape: Shape) -> torch.Tensor:
        """A tensor of another shape for the same value of the whole model."""
        whole = self.run.full_shape(self.tensor)
        new = self.run.made(self.tensor, shape, self.tensor.requires_grad)
        self.run.whole[id(new)] = whole
        # A slice is one block; it must not be combined with a part of several packed blocks.
        self.run.blocks[id(new)] = {a: (whole[a],) for a in self.run.split_axes(new)}
        return new

    def _axis(self) -> int:
        """The collective's axis, counted from 0."""
        axis = self.border.axis
        assert axis is not None
        return axis % self.tensor.dim() if -self.tensor.dim() <= axis < self.tensor.dim() else axis

    def _check_sum(self, operation: str) -> None:
        """Raises unless the value is a partial sum, for a collective that sums."""
        self.run.flow.check_own(self.state, self.node.path)
        does = f"{SPOKEN[operation]} would add up"
        if self.state.kind == SHARD:
            raise self._misuse(
                f"{self.value} is {self._described()}: {does} different elements",
                f"gather it: {self._gathering()}",
            )
        if self.state.kind == REPLICATE:
            hint = "remove this line, or the earlier sync that made the value whole"
            if operation == "reduce_scatter":
                hint = f"keep a slice: {self._line('scatter')}"
            raise self._misuse(f"{self.value} is whole: {does} equal values of the ranks", hint)

    def _check_part(self, axis: int | None) -> None:
        """Raises unless the value is a part along that axis, for a collective that gathers."""
        self.run.flow.check_own(self.state, self.node.path)
        if self.state.kind == PARTIAL:
            raise self._misuse(
                f"{self.value} is a partial sum: {SPOKEN[self.border.operation]} would "
                "concatenate the ranks' summands",
                f'add it up: .sync("{self.border.mode}", "all_reduce")',
                MissingCollective.sum_of(self.state.border),
            )
        if self.state.kind == REPLICATE:
            raise self._misuse(
                f"{self.value} is whole on every rank: there is nothing to gather",
                "remove this line, or split the value before it",
            )
        if self.split and self.split != [self._axis()]:
            raise self._misuse(
                f"{self.value} is {self._described()}, but is gathered along axis {axis}",
                f"gather it along the axis that is split: {self._gathering()}",
            )

    def _line(self, operation: str) -> str:
        return f'.sync("{self.border.mode}", "{operation}", axis={self.border.axis})'

    def _gathering(self) -> str:
        axis = self.split[0] if self.split else -1
        return gather_line(axis, self.tensor.dim(), self.border.mode)

    def _described(self) -> str:
        if self.state.kind == SHARD and self.split:
            return f"a part along axis {self.split[0]}"
        return {SHARD: "a part", PARTIAL: "a partial sum"}.get(self.state.kind, "whole")

    def _misuse(
        self, message: str, hint: str | None = None, remedy: MissingCollective | None = None
    ) -> PlacementError:
        return PlacementError(message, hint, self.state.source or self.node.path, self.key, remedy)
