"""Rules for operations that change shapes: `view`, `flatten`, `expand` and so on.

Each takes the run, the recorded operation and the arguments. It returns the arguments as a rank
must pass them, and the packing of the result where it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slapo_rewrite.model.meta_device import unwatched
from slapo_rewrite.sharding.packed_parts import Blocks, described
from slapo_rewrite.sharding.rank_arguments import INFERRED, OWN, SHARE, change
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.trace import Entry
from slapo_rewrite.sharding.tracked_sizes import Attribute, Shape, groups, numbers, product
from slapo_rewrite.sharding.types import SIZES, CannotFollow, Indivisible
from slapo_rewrite.sharding.units import note_even, note_unit, single_head


def view(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`view` and `reshape`: one of the axes that a split axis is regrouped into is split."""
    tensor, given = args[0], list(args[1:]) or [kwargs.get("shape", kwargs.get("size"))]
    nested = len(given) == 1 and isinstance(given[0], (list, tuple))
    sizes = [_integer(size) for size in (given[0] if nested else given)]
    here = tuple(tensor.shape)
    if not sizes or not all(isinstance(s, int) for s in sizes) or entry.inputs[0] == here:
        return args, kwargs, None
    shape, blocks = _regrouped(run, tensor, entry.inputs[0], entry.outputs[0], sizes)
    fitted = _fitted(run, tensor, sizes, shape, argument=0 if nested else None)
    return (tensor, tuple(fitted)), {}, blocks


def view_as(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`view_as` and `reshape_as`: a `view` that takes its sizes from another tensor.

    If that tensor is whole on a rank, the call must infer the split axis's size.
    """
    given: list[torch.Tensor] = [*args, *kwargs.values()]
    (tensor, other), whole = given, entry.outputs[0]
    if entry.inputs[0] == tuple(tensor.shape):
        return args, kwargs, None
    shape, blocks = _regrouped(run, tensor, entry.inputs[0], whole, list(whole))
    axes = [a for a, have in enumerate(other.shape) if have != shape[a]]
    if len(axes) == 1:
        size, want = other.shape[axes[0]], shape[axes[0]]
        change(run, tensor, size, want, (SIZES, axes[0] - len(shape)), INFERRED, "this reshapes to")
        with unwatched():
            other = tensor.new_empty(shape)
    return (tensor, other), {}, blocks


def _integer(size: Any) -> Any:
    """A size as an integer, also if it was computed as a tensor (`torch.div(length, 2)`)."""
    scalar = isinstance(size, torch.Tensor) and not size.is_meta and not size.dim()
    return int(size) if scalar else size


def unflatten(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`unflatten`: a `view` of one axis."""
    tensor = args[0]
    axis = (args[1] if len(args) > 1 else kwargs["dim"]) % tensor.dim()
    sizes = list(args[2] if len(args) > 2 else kwargs["sizes"])
    if entry.inputs[0] == tuple(tensor.shape):
        return args, kwargs, None
    around = [*tensor.shape[:axis], *sizes, *tensor.shape[axis + 1 :]]
    shape, blocks = _regrouped(run, tensor, entry.inputs[0], entry.outputs[0], around)
    inner = shape[axis : axis + len(sizes)]
    _fitted(run, tensor, sizes, inner, argument=-1)
    return (tensor, axis, inner), {}, blocks


def flatten(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`flatten`: a `view` without sizes among its arguments."""
    tensor, whole = args[0], entry.outputs[0]
    if entry.inputs[0] == tuple(tensor.shape):
        return args, kwargs, None
    return args, kwargs, _regrouped(run, tensor, entry.inputs[0], whole, list(whole))[1]


def expand(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`expand`: a split axis keeps the rank's size."""
    tensor, given = args[0], list(args[1:] or kwargs.values())
    nested = len(given) == 1 and isinstance(given[0], (list, tuple))
    sizes = list(given[0]) if nested else given
    ahead = len(sizes) - tensor.dim()
    for axis, (whole, here) in enumerate(zip(entry.inputs[0], tensor.shape, strict=True)):
        size = sizes[ahead + axis] if sizes else -1
        if whole == here or size in (-1, here):
            continue
        index = (0, axis - tensor.dim()) if nested else (axis - tensor.dim(),)
        change(run, tensor, size, here, index, INFERRED, "this expands to")
        sizes[ahead + axis] = here
    return (tensor, sizes), {}, None


def repeat(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`repeat` and `tile`: a split axis cannot be repeated.

    The arguments are repeat counts for all axes of the result, or, of `tile`, for the last ones.
    """
    tensor, given = args[0], list(args[1:] or kwargs.values())
    times = list(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    for axis in run.split_axes(tensor):
        number = axis - tensor.dim() + len(times)
        if number >= 0 and times[number] != 1:
            raise CannotFollow("this repeats a rank's part instead of the whole value")
    return args, kwargs, None


def as_strided(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`as_strided`: raises unless the strides select the same elements as in the whole model.

    In contiguous memory, strides of axes inside the split axis are the same on a rank as in the
    whole model; strides of axes outside of it are larger there, in proportion to the axis's size.
    """
    tensor, axes = args[0], run.split_axes(args[0])
    if not axes:
        return args, kwargs, None
    axis = axes[0]
    whole, here, inside = entry.inputs[0][axis], tensor.shape[axis], tensor.stride(axis)
    given = dict(zip(("size", "stride", "storage_offset"), args[1:], strict=False)) | kwargs
    recorded = iter(entry.numbers)
    counted = not run.has_values
    meant = {n: [next(recorded) for _ in numbers(value, counted)] for n, value in given.items()}
    sizes = [_integer(size) for size in given["size"]]
    kept = [k for k, stride in enumerate(given["stride"]) if stride == inside]
    simple = _without_gaps(tensor) and not given.get("storage_offset")
    if len(kept) != 1 or entry.outputs[0][kept[0]] != whole or not simple:
        raise _strides(run, tensor)
    if sizes[kept[0]] != here:
        raise _strides(run, tensor, run.undecided(sizes[kept[0]]))
    reach = 1
    for times, step, wanted in zip(sizes, given["stride"], meant["stride"], strict=True):
        if step == inside:
            continue
        around, rest = divmod(step, inside * here)
        if rest >= inside or around * inside * whole + rest != wanted:
            raise _strides(run, tensor)
        reach += (times - 1) * rest
    if reach > inside:
        raise _strides(run, tensor)
    return args, kwargs, {kept[0]: run.blocks.get(id(tensor), {}).get(axis, (whole,))}


def _without_gaps(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory has no gaps, in any order of its axes."""
    axes = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    return all(stride == product(n for _, n in axes[:i]) for i, (stride, _) in enumerate(axes))


def _strides(run: Run, tensor: torch.Tensor, attributes: Sequence[Attribute] = ()) -> CannotFollow:
    axis = run.split_axes(tensor)[0]
    return CannotFollow(
        f"`as_strided` reads the memory of a value of which a rank has {tensor.shape[axis]} of "
        f"{run.full_shape(tensor)[axis]} elements along axis {axis}, not as the whole model does",
        run.origins.get(id(tensor)),
        "gather the value before",
        attributes=attributes,
    )


def _fitted(
    run: Run,
    tensor: torch.Tensor,
    sizes: list[int],
    wanted: list[int],
    argument: int | None = None,
) -> list[int]:
    """The wanted sizes; records changes of the call for those that differ.

    The sizes are a list in the given argument, or the arguments themselves if that is None.
    """
    fitted = list(sizes)
    for axis, (size, want) in enumerate(zip(sizes, wanted, strict=True)):
        if size in (-1, want):
            continue
        # Counted from the end: `view(*shape, heads, size)` may give several sizes as one argument.
        number = axis - len(sizes)
        index = (number,) if argument is None else (argument, number)
        template = INFERRED
        place = run.editable_place()
        taken = any(c.place == place and c.index != index for c in run.followed.arguments)
        if -1 in sizes or taken:
            kept = sizes.index(size) == len(sizes) - 1 and tensor.shape[-1] == want
            template = OWN % -1 if kept and not run.undecided(size) else SHARE
        try:
            change(run, tensor, size, want, index, template, "this reshapes to")
        except CannotFollow as error:
            error.single = single_head(run, tensor, size)
            raise
        fitted[axis] = want
    return fitted


def _regrouped(
    run: Run, tensor: torch.Tensor, full_in: Shape, full_out: Shape, sizes: list[int]
) -> tuple[list[int], Blocks]:
    """The shape of a reshaped tensor on a rank, and how its axes are packed."""
    here, known = tuple(tensor.shape), run.blocks.get(id(tensor), {})
    wanted: list[int] = list(full_out)
    blocks: Blocks = {}
    for ins, outs in groups(full_in, full_out):
        split = [i for i in ins if full_in[i] != here[i]]
        if not split:
            continue
        if len(split) > 1:
            if not run.flow.of(tensor).replicated_shard or len(outs) > 1:
                raise CannotFollow("this merges two split axes into one")
            # A rank repeats its key/value heads for its own query heads only.
            wanted[outs[0]] = product(here[i] for i in ins)
            continue
        axis = split[0]
        packed = known.get(axis, (full_in[axis],))
        ahead = product(full_in[i] for i in ins if i < axis)
        if len(ins) == len(outs) == 1:
            wanted[outs[0]], blocks[outs[0]] = here[axis], packed
            continue
        if len(set(packed)) > 1:
            raise _not_in_parts(run, tensor, packed)
        if product(full_in[i] for i in ins) > full_in[axis]:
            note_even(run, tensor, axis)
        chosen, outer = _factor(run, tensor, outs, full_out, ahead * len(packed))
        rest = product(full_in[i] for i in ins) // full_out[chosen]
        now = product(here[i] for i in ins)
        if now % rest:
            count = full_out[chosen]
            raise Indivisible(
                f"this regroups {full_in[axis]} features in {count} blocks of {rest}, of which "
                f"{dist.get_world_size()} ranks cannot have the same number",
                run.place(),
                f"if each block has a share for every rank, shard with parts={count}",
            )
        wanted[chosen] = now // rest
        blocks[chosen] = (full_out[chosen] // outer,) * outer
        note_unit(run, tensor, sizes, chosen, outs, full_out)
    return wanted, blocks


def _factor(
    run: Run, tensor: torch.Tensor, outs: list[int], full_out: Shape, outer: int
) -> tuple[int, int]:
    """Which factor of a regrouped axis is split, and how many blocks that axis packs.

    A rank holds a contiguous part of each of `outer` blocks: a part of the first factor after
    those that count the blocks.
    """
    before = 1
    for axis in outs:
        size = full_out[axis]
        if before * size <= outer and outer % (before * size) == 0 and outer > before:
            before *= size
            continue
        if size == 1 and len(outs) > 1 and axis != outs[-1]:
            continue
        if outer % before or (size * before) % outer:
            break
        return axis, outer // before
    raise _not_in_parts(run, tensor, (1,) * outer)


def _not_in_parts(run: Run, tensor: torch.Tensor, packed: Shape) -> CannotFollow:
    path = run.origins.get(id(tensor))
    return CannotFollow(
        f"this regroups features that are packed in {described(packed)}, as "
        f"{f'`{path}`' if path else 'they'} {'was' if path else 'were'} sharded",
        path,
        "separate the parts first, with `split` or `chunk`, or shard with the `parts` that this "
        "line expects",
    )
