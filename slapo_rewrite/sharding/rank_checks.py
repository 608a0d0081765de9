"""Checks that an operation on a rank's values computes its part of the whole model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from slapo_rewrite.operations import treatment
from slapo_rewrite.sharding import reshapes, split_ops
from slapo_rewrite.sharding.packed_parts import described, reduced
from slapo_rewrite.sharding.placements import PARTIAL, REDUCE, REPLICATE, SHARD, State, gather_line
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.trace import Entry
from slapo_rewrite.sharding.tracked_sizes import Size, numbers
from slapo_rewrite.sharding.types import CannotFollow, Diverged, MissingCollective

# Operations that take sizes, which may be this rank's, and how many of their first arguments may be
# sizes. In any other operation, all numbers are values.
_SIZED = {
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn"), 99),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty"), 99),
    **{"full": 1, "new_full": 2, "arange": 99, "broadcast_to": 99},
}
# Names of placements in messages.
KIND = {REPLICATE: "whole", SHARD: "a part", PARTIAL: "a partial sum"}
# Functions that make constant or random tensors: a part may be made by a smaller size.
CONSTANT = {
    "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full", "rand",
    "randn", "zeros_like", "ones_like", "empty_like", "full_like",
}  # fmt: skip
# Operations that repeat their operand.
REPEATING = {"expand", "broadcast_to", "repeat", "tile", "repeat_interleave"}
# Operations that take a size, and the rules that adapt it.
RULES: dict[str, Callable[..., Any]] = {
    "view": reshapes.view,
    "reshape": reshapes.view,
    "view_as": reshapes.view_as,
    "reshape_as": reshapes.view_as,
    "flatten": reshapes.flatten,
    "ravel": reshapes.flatten,
    "unflatten": reshapes.unflatten,
    "split": split_ops.split,
    "split_with_sizes": split_ops.split,
    "chunk": split_ops.chunk,
    "tensor_split": split_ops.chunk,
    "expand": reshapes.expand,
    "broadcast_to": reshapes.expand,
    "repeat": reshapes.repeat,
    "tile": reshapes.repeat,
    "as_strided": reshapes.as_strided,
    "__getitem__": split_ops.index,
    "glu": split_ops.glu,
}


def check_packing(
    run: Run, name: str, entry: Entry, inputs: list[torch.Tensor], given: Any
) -> None:
    """Raises unless both factors of a product pack the axis that it sums over in the same way."""
    if len(inputs) < 2 or all(run.flow.of(t).kind != SHARD for t in inputs):
        return
    args, kwargs = given
    how = treatment(name, args, kwargs, entry.inputs)
    packed = {
        reduced(run.blocks.get(id(tensor), {}).get(axis, (1,)))
        for tensor, axes in zip(inputs, how.summed if how else (), strict=False)
        for axis in axes & set(run.split_axes(tensor))
    }
    if len(packed) > 1:
        one, other = sorted(packed)[:2]
        raise CannotFollow(
            f"`{name}` sums over an axis that has {described(one)} in one factor, and "
            f"{described(other)} in the other",
            run.source_of(inputs),
            "shard both with the same `parts`",
        )


def check_operation(
    run: Run, entry: Entry, outputs: list[torch.Tensor], args: Any, kwargs: Any
) -> None:
    """Raises unless a result has the whole model's shape, or less along one axis."""
    if len(outputs) != len(entry.outputs):
        raise Diverged(
            f"this gives {len(outputs)} tensors on a rank, and {len(entry.outputs)} without "
            "sharding"
        )
    for want, have in zip(entry.outputs, outputs, strict=True):
        if len(want) != have.dim() or any(h > w for h, w in zip(have.shape, want, strict=True)):
            raise CannotFollow(
                f"the result has shape {list(have.shape)} on a rank, and {list(want)} without "
                "sharding",
                attributes=run.attributes_of((args, kwargs)),
            )
        split = [a for a, (h, w) in enumerate(zip(have.shape, want, strict=True)) if h != w]
        # With replicated heads, both the heads' axis and that of their repeats are split.
        if len(split) > 1 and run.replicas == 1:
            raise CannotFollow(
                f"the result is split along axes {split[0]} and {split[1]} at once: the ranks "
                "would only have the blocks on the diagonal",
                run.source_of((args, kwargs)),
                f"gather one of them first: {gather_line(split[0], have.dim())}",
            )
        run.whole[id(have)] = want


def check_in_place(run: Run, name: str, tensor: torch.Tensor, before: State) -> None:
    """Raises if an in-place operation on a view changes the placement, and so that of its base."""
    run.zeros.discard(id(tensor))
    after = run.flow.of(tensor)
    if after.kind == before.kind or name in ("requires_grad_", "detach_"):
        return
    if tensor._is_view():
        raise CannotFollow(
            f"`{name}` writes a {after.kind} into a view of a value that is {KIND[before.kind]}",
            after.source,
            "write into the value itself, or create a new one with `torch.cat` or `torch.stack`",
        )


def check_numbers(run: Run, name: str, entry: Entry, args: Any, kwargs: Any) -> None:
    """Raises if a number that is a value, such as a scale, differs from the whole model's."""
    here = list(numbers((args, kwargs), not run.has_values))
    sizes = len(list(numbers(args[: _SIZED.get(name, 0)], not run.has_values)))
    if (name in _SIZED and "size" in kwargs) or (run.replicas > 1 and name in REPEATING):
        return
    sized = len(here) - 1 if [*kwargs][-1:] == ["output_size"] else len(here)
    for number, (want, have) in enumerate(zip(entry.numbers, here, strict=False)):
        if want == have or number < sizes or number >= sized or name in RULES:
            continue
        # A rank has its share of the channels and groups of a depthwise convolution.
        if not (name.startswith("conv") and tuple(entry.inputs[1][:2]) == (want, 1)):
            raise CannotFollow(
                f"this computes with {have:g} on a rank, and with {want:g} without sharding",
                hint="take it from an attribute set in `__init__`, or another whole value",
            )


def check_made(
    run: Run,
    name: str,
    entry: Entry,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> None:
    """Raises if a tensor made by a rank's size is not the rank's part: `arange`, for example."""
    if name in CONSTANT or any(
        tuple(t.shape) != w for t, w in zip(inputs, entry.inputs, strict=False)
    ):
        return
    if name in ("expand", "repeat", "tile", "broadcast_to") or any(
        run.flow.of(t).replicated_shard for t in inputs
    ):
        return
    for want, have in zip(entry.outputs, outputs, strict=True):
        if want != tuple(have.shape):
            raise CannotFollow(
                f"`{name}` gives every rank the same elements here: the first {list(have.shape)} "
                f"of {list(want)}"
            )


def check_assigned(run: Run, entry: Entry, args: Any) -> None:
    """`x[...] = y`: raises unless `x` is split along the axis of `y`, and written to all of it."""
    target, key, value = args
    state = run.flow.of(target)
    given = run.flow.of(value) if isinstance(value, torch.Tensor) else State()
    if not _is_mask_of(run, key, target):
        # The index must be one that could read the target as well.
        (_, taken), *_ = split_ops.index(run, entry, (target, key), {})
        if taken is not key:
            raise CannotFollow(
                "this writes into some of the blocks that are packed along a split axis",
                state.source,
                "split them, and join them again with `torch.cat`",
            )
    fresh = id(target) in run.zeros and not target._is_view()
    if given.kind != PARTIAL:
        run.zeros.discard(id(target))
    zero = not isinstance(value, torch.Tensor) and value == 0
    if PARTIAL in (state.kind, given.kind):
        fresh = fresh and given.kind == PARTIAL
        if not (state.kind == given.kind or (state.kind == PARTIAL and zero) or fresh):
            raise CannotFollow(
                f"this writes {KIND[given.kind]} into {KIND[state.kind]}",
                state.source or given.source,
                REDUCE,
                remedy=MissingCollective.sum_of(state.border or given.source),
            )
        run.flow.set(target, State(PARTIAL, state.source or given.source, given.replicated_shard))
        return
    if given.kind == SHARD and state.kind != SHARD:
        raise CannotFollow(
            f"this writes a part into a value that is {KIND[state.kind]}",
            given.source,
            "gather the part before",
        )
    if state.kind == SHARD and isinstance(value, torch.Tensor) and value.requires_grad:
        run.flow.meet_shards([value], "`__setitem__`", state.source)
    if given.kind == SHARD and run.split_axes(target):
        _check_same_axis(run, target, key, value)
    for axis, packed in run.blocks.get(id(value), {}).items():
        to = axis + target.dim() - value.dim()
        if to >= 0 and sum(packed) == run.full_shape(target)[to]:
            run.blocks.setdefault(id(target), {}).setdefault(to, packed)


def _is_mask_of(run: Run, key: Any, target: torch.Tensor) -> bool:
    """Whether an index is a mask with the shape and the split of its target."""
    return (
        isinstance(key, torch.Tensor)
        and key.dtype == torch.bool
        and run.full_shape(key) == run.full_shape(target)
        and run.split_axes(key) == run.split_axes(target)
    )


def _check_same_axis(run: Run, target: torch.Tensor, key: Any, value: torch.Tensor) -> None:
    """Raises `CannotFollow` if a part is written along another axis than the target's."""
    run.depth += 1
    try:
        view = target[key]
    finally:
        run.depth -= 1
    at = view.dim() - value.dim()
    axes = [axis + at for axis in run.split_axes(value)]
    whole = run.full_shape(target)
    want = [a - target.dim() + view.dim() for a in run.split_axes(target)]
    if axes != want and len(whole) == view.dim():
        raise CannotFollow(
            f"this writes a part along axis {axes[0]} into one along axis {want[0]}",
            run.flow.of(value).source,
            "split both along one axis",
        )


def sizes_in(value: Any) -> Iterator[Size]:
    """The tracked sizes in nested lists, tuples and mappings."""
    if isinstance(value, Size):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from sizes_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from sizes_in(item)
