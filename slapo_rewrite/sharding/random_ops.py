"""Finds random numbers that would bring the ranks' generators out of step.

Ranks have the same seed, and dropout of a whole value needs the same numbers on all of them. If
shards have different sizes, some ranks draw more numbers for them, and all later numbers differ.
Numbers of each rank's own for a whole value would make its copies differ.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from slapo_rewrite.model.layers import scatters
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.kv_replication import width
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import Draw, ShardingRequest, ShardingResult, layer_key

# The file of the method that calls `forward`.
_CALLING = os.path.join("torch", "nn", "modules", "module.py")


def note(run: Run, name: str, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
    """Records an operation that draws random numbers, for a whole value or a shard."""
    if not draws(name, args, kwargs):
        return
    for output in outputs:
        split = run.split_axes(output)
        source = run.source_of((args, kwargs))
        callers = tuple(_callers(run))

        if source is None and split and callers:  # made from sizes alone
            near = callers[0][0].rpartition(".")[0]
            source = max(run.request.layers, key=lambda path: path.startswith(near), default=None)
        if callers and not split:
            run.followed.draws.add(Draw(callers, run.place(), source or "", ()))
        if len(split) != 1 or source is None or not _may_be_uneven(run.request, source):
            continue
        if not callers or any(path in run.request.forked for path, _ in callers):
            continue
        blocks = _blocks(run, (args, kwargs), split[0]) or (run.full_shape(output)[split[0]],)
        run.followed.draws.add(Draw(callers, run.place(), source, blocks))


def out_of_step(
    tree: Tree, request: ShardingRequest, followed: ShardingResult
) -> Iterator[tuple[Draw, int]]:
    """The draws that bring ranks out of step, each with the least world size at which it does."""
    even = set(followed.even)
    for path in request.layers:
        node = tree.nodes[path]
        unit = followed.units.get(layer_key(node))
        if (
            unit is not None
            and unit.size
            and node.owner is not None
            and layer_key(node) not in followed.replicated
        ):
            even.add(width(node.live) // unit.size)
    common = math.gcd(*even)
    uneven = (draw for draw in followed.draws if draw.blocks)
    for draw in sorted(uneven, key=lambda d: (d.callers, d.source)):
        for world in range(2, min(draw.blocks) + 1):
            if common % world == 0 and any(size % world for size in draw.blocks):
                yield draw, world
                break


def draws(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers."""
    if "dropout" in name:
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        return bool(given.get("p", 0.5)) and given.get("training", True) is not False
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))
    return name == "gumbel_softmax" or _is_seeded(name)  # a Python function, or an aten operation


@functools.cache
def _is_seeded(name: str) -> bool:
    operation: Any = getattr(torch.ops.aten, name, None)
    names: Iterable[str] = getattr(operation, "overloads", tuple)()
    made = (getattr(operation, overload) for overload in names)
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in made)


def _may_be_uneven(request: ShardingRequest, source: str) -> bool:
    """Whether a shard's size may differ between ranks: a scatter makes even shards only."""
    layer = request.layers.get(source)
    if layer is None:
        return source in request.parameters
    return not scatters(layer) and not any(
        border.operation == "scatter" for border in request.borders.get(source, ())
    )


def _blocks(run: Run, given: Any, axis: int) -> tuple[int, ...] | None:
    """The blocks that an operand packs along the split axis, if known."""
    return next((b[axis] for t in tensors(given) if axis in (b := run.blocks.get(id(t), {}))), None)


def _callers(run: Run) -> Iterator[tuple[str, int]]:
    """The modules on the call stack, the innermost first, with their methods' current lines."""
    paths = {id(node.live): path for path, node in run.tree.nodes.items()}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        inside = not frame.f_code.co_filename.endswith(_CALLING)
        if inside and isinstance(module, nn.Module) and id(module) in paths:
            yield paths[id(module)], frame.f_lineno
        frame = frame.f_back
