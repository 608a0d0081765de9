"""Rules for operations that take a tensor apart (`split`, `chunk`, indexing), and for `cat`.

Each takes the run, the recorded operation and the arguments, and returns the arguments as a rank
must pass them. A split axis may only be cut at the boundaries of the blocks that it packs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from slapo_rewrite.sharding.packed_parts import Blocks, ends_of, ratio_of, reduced
from slapo_rewrite.sharding.rank_arguments import SHARE, change
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.trace import Entry, key_of
from slapo_rewrite.sharding.tracked_sizes import Shape, Size
from slapo_rewrite.sharding.types import CannotFollow
from slapo_rewrite.sharding.units import note_step

# Operations that return consecutive pieces of an axis.
IN_PIECES = {"split", "split_with_sizes", "chunk", "tensor_split"}


def split(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`split` and `split_with_sizes`: a rank has its share of every piece."""
    tensor, sizes, axis = _bound(
        args, kwargs, "split_size_or_sections", "split_size", "split_sizes"
    )
    whole, here = entry.inputs[0][axis], tensor.shape[axis]
    if whole == here:
        return args, kwargs, None
    pieces = [shape[axis] for shape in entry.outputs]
    _check_parts(run, tensor, axis, whole, pieces)
    if not isinstance(sizes, int):
        _note_cut(run, tensor, axis)
    local = [p * here // whole for p in pieces]
    if isinstance(sizes, int):
        if sizes != local[0]:
            change(run, tensor, sizes, local[0], (0,), SHARE, "this splits by")
        return (tensor, local[0], axis), {}, None
    for number, (size, want) in enumerate(zip(sizes, local, strict=True)):
        if size != want:
            change(run, tensor, size, want, (0, number), SHARE, "this splits by")
    return (tensor, local, axis), {}, None


def _note_cut(run: Run, tensor: torch.Tensor, axis: int, number: int = 0) -> None:
    """Records a call that takes apart all blocks of a split axis by explicit sizes or slices."""
    path, place = run.origins.get(id(tensor)) or run.flow.of(tensor).source, run.editable_place()
    if path is None or place is None:
        return
    request = [shard.parts for shard in run.request.parameters.get(path, ())]
    if path in run.request.layers:
        request.append(ratio_of(dict(run.request.layers[path].keywords)))
    # Only the packing as requested counts: not one block that is taken apart further.
    if reduced(run.blocks.get(id(tensor), {}).get(axis, (1,))) in map(reduced, request):
        run.followed.cuts.add((path, place, number))


def piece_of(packed: Shape, pieces: Sequence[int], number: int) -> Shape:
    """The blocks that lie in one of the pieces of an axis."""
    start = sum(pieces[:number])
    ends = itertools.accumulate(packed)
    stop = start + pieces[number]
    return tuple(p for p, end in zip(packed, ends, strict=True) if start < end <= stop)


def chunk(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`chunk` and `tensor_split`: a number of pieces, which must be the axis's packed blocks."""
    tensor, count, axis = _bound(
        args, kwargs, "chunks", "sections", "indices", "indices_or_sections"
    )
    if entry.inputs[0][axis] != tensor.shape[axis]:
        _check_parts(run, tensor, axis, entry.inputs[0][axis], [s[axis] for s in entry.outputs])
        if not isinstance(count, int):
            raise CannotFollow(
                "this cuts a split axis at given positions", run.origins.get(id(tensor))
            )
    return args, kwargs, None


def glu(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """`glu`: a rank has its share of both halves."""
    tensor = args[0]
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % tensor.dim()
    whole = entry.inputs[0][axis]
    if whole == tensor.shape[axis]:
        return args, kwargs, None
    _check_parts(run, tensor, axis, whole, [whole // 2] * 2)
    packed = run.blocks.get(id(tensor), {}).get(axis, (whole,))
    return args, kwargs, {axis: piece_of(packed, [whole // 2] * 2, 0)}


def join(run: Run, entry: Entry, args: Any, kwargs: Any) -> Blocks | None:
    """`cat` along a split axis: all operands must be parts; the result packs their blocks."""
    given = list(args[0])
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))) % given[0].dim()
    split = [t.shape[axis] != w[axis] for t, w in zip(given, entry.inputs, strict=True)]
    if not any(split):
        return None
    if not all(split):
        raise CannotFollow(
            "this concatenates a rank's part with a whole value",
            run.source_of(given),
            "gather the part first, or split the other value as well",
        )
    packed: list[int] = []
    for tensor, whole in zip(given, entry.inputs, strict=True):
        packed += run.blocks.get(id(tensor), {}).get(axis, (whole[axis],))
    return {axis: tuple(packed)}


def _check_parts(
    run: Run, tensor: torch.Tensor, axis: int, whole: int, pieces: Sequence[int]
) -> None:
    """Raises unless pieces of a split axis begin and end where its packed blocks do."""
    if len(pieces) == 1:
        return
    packed = run.blocks.get(id(tensor), {}).get(axis, (whole,))
    if ends_of(packed) >= ends_of(pieces):
        return
    path = run.origins.get(id(tensor))
    wanted = len(pieces) if len(set(pieces)) == 1 else list(pieces)
    raise CannotFollow(
        f"{f'`{path}`' if path else 'this'} is cut into pieces of {list(pieces)} here, but was "
        "not sharded with these parts",
        path,
        f"shard it with parts={wanted}, so that every rank has its share of each; if the pieces "
        "are heads, regroup with `unflatten` or `view` instead",
    )


def index(run: Run, entry: Entry, args: Any, kwargs: Any) -> Any:
    """Indexing: a split axis is taken whole, or cut at the boundaries of its blocks."""
    tensor, key = args
    keys = key_of(key)
    taken = sum(_axes_taken(k) for k in keys)
    axis, result, changed = 0, list(keys), False
    for number, item in enumerate(keys):
        if item is Ellipsis:
            axis += tensor.dim() - taken
            continue
        for inner in range(axis, axis + _axes_taken(item)):
            whole, here = entry.inputs[0][inner], tensor.shape[inner]
            if whole != here:
                meant = entry.key[number]
                result[number] = _slice(run, tensor, inner, item, meant, whole, number)
                changed = changed or result[number] is not item
            else:
                _check_same(run, item, entry.key[number], whole)
        axis += _axes_taken(item)
    blocks = _blocks_cut(run, entry, keys, tensor)
    return ((tensor, tuple(result)) if changed else args), kwargs, blocks


def _blocks_cut(run: Run, entry: Entry, keys: Sequence[Any], tensor: torch.Tensor) -> Blocks | None:
    """The packing of a split axis after slicing; None if the index adds or removes axes."""
    if not all(isinstance(key, slice) or key is Ellipsis for key in keys):
        return None
    axis = run.split_axes(tensor)[0] if run.split_axes(tensor) else None
    ahead = [key for key in keys if key is not Ellipsis]
    if Ellipsis in keys:
        before = list(keys).index(Ellipsis)
        ahead[before:before] = [slice(None)] * (tensor.dim() - len(ahead))
    if axis is None or axis >= len(ahead) or ahead[axis] == slice(None):
        return None
    meant = [key for key in entry.key if key is not Ellipsis]
    cut = meant[axis - len(ahead) if Ellipsis in keys[: axis + 1] else axis]
    whole = entry.inputs[0][axis]
    packed = run.blocks.get(id(tensor), {}).get(axis, (whole,))
    start, stop, step = cut.indices(whole)
    if step > 1:
        return {axis: (whole // step,)}
    ends = list(itertools.accumulate(packed))
    return {axis: tuple(p for p, end in zip(packed, ends, strict=True) if start < end <= stop)}


def _check_same(run: Run, item: Any, meant: Any, size: int) -> None:
    """Raises `CannotFollow` if a whole axis is indexed by a rank's size."""

    def bounds(key: Any) -> Any:
        if isinstance(key, slice):
            return key.indices(size)
        return int(key) % size if type(key) in (int, Size) else None

    if bounds(item) != bounds(meant):
        raise CannotFollow(
            f"this takes {_written(item)} of an axis that is whole, and {_written(meant)} without "
            "sharding",
            hint="take the number from an attribute set in `__init__`, or another whole value",
        )


def _written(key: Any) -> str:
    if not isinstance(key, slice):
        return f"element {key}"
    ends = ["" if end is None else str(int(end)) for end in (key.start, key.stop)]
    return f"`{':'.join(ends)}`"


def _slice(
    run: Run, tensor: torch.Tensor, axis: int, item: Any, meant: Any, whole: int, number: int
) -> Any:
    if isinstance(item, slice) and item in (slice(None), slice(None, None, 1)):
        return item
    here = tensor.shape[axis]
    if isinstance(item, slice) and _is_every_nth(run, tensor, axis, item, whole):
        note_step(run, tensor, axis, item.step)
        return item
    if not isinstance(item, slice) or item.step not in (None, 1):
        raise CannotFollow(
            f"this indexes a split axis, which has {here} of {whole} elements on a rank",
            run.origins.get(id(tensor)),
            "gather the value first, or cut it with `split` or `chunk`",
        )
    # A rank must cut at its share of the whole model's bounds.
    _note_cut(run, tensor, axis, number)
    bounds = []
    for which in ("start", "stop"):
        bound = getattr(item, which)
        if bound is None or bound == 0:
            bounds.append(bound)
            continue
        packed = run.blocks.get(id(tensor), {}).get(axis, (whole,))
        cut = getattr(meant, which)
        if (cut if cut >= 0 else whole + cut) not in ends_of(packed):
            raise CannotFollow(
                f"this cuts a split axis at {int(cut)} of {whole}, inside a part",
                run.origins.get(id(tensor)),
                "shard with the `parts` that this line expects",
            )
        want = cut * here // whole
        if bound != want:
            change(run, tensor, bound, want, (number, which), SHARE, "this cuts at")
        bounds.append(want)
    return slice(bounds[0], bounds[1], item.step)


def _is_every_nth(run: Run, tensor: torch.Tensor, axis: int, item: slice, whole: int) -> bool:
    """Whether a slice takes every n-th element of a whole block (`x[..., 1::2]`)."""
    start, step = item.start or 0, item.step or 1
    packed = run.blocks.get(id(tensor), {}).get(axis, (whole,))
    return (
        step > 1
        and 0 <= start < step
        and item.stop is None
        and len(packed) == 1
        and whole % step == 0
    )


def _bound(args: Any, kwargs: Any, *names: str) -> tuple[torch.Tensor, Any, int]:
    """The tensor, second argument and non-negative axis of `split`, `chunk` and the like."""
    rest = list(args[1:])
    value = rest.pop(0) if rest else next(kwargs[n] for n in names if n in kwargs)
    axis = rest.pop(0) if rest else kwargs.get("dim", 0)
    return args[0], value, axis % args[0].dim()


def _axes_taken(key: Any) -> int:
    """How many axes one item of an index consumes."""
    if key is None or key is Ellipsis or isinstance(key, bool):
        return 0
    if isinstance(key, torch.Tensor) and key.dtype == torch.bool:
        return key.dim()
    return 1
