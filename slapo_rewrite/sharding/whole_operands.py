"""Remedies where an operation joins a whole value with a part: what to split, slice or gather."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.sharding.placements import REPLICATE, SHARD
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import MissingCollective

_GENERAL = "also split the layers that compute the whole value"
# A value made from more parameters, or in more steps, is an activation: its layers must be split.
_MOST_PARAMETERS, _MOST_STEPS = 2, 50


class _Held(NamedTuple):
    """A parameter or buffer, by the module that holds it and its name there."""

    path: str  # the module's path
    name: str
    module: nn.Module
    is_run: bool = False  # whether the value is the output of this linear layer's weight


def advice(run: Run, operands: Iterable[torch.Tensor]) -> str:
    """The hint where whole values are joined with a part, with lines to add where known."""
    operands = list(operands)
    parts = [t for t in operands if run.flow.of(t).kind == SHARD]
    sizes = {run.full_shape(t)[axis] for t in parts for axis in run.split_axes(t)}
    held = {
        id(tensor): _Held(path, name, node.live)
        for path, node in run.tree.nodes.items()
        for name, tensor in (
            *node.live.named_parameters(recurse=False),
            *node.live.named_buffers(recurse=False),
        )
    }
    lines = {
        line: None
        for tensor in operands
        if tensor.dim() and run.flow.of(tensor).kind == REPLICATE
        for line in _lines([*_made_from(run, tensor, held)], sizes)
    }
    return (
        f"{', '.join([_GENERAL, ' and '.join(lines)]) if lines else _GENERAL}, or gather the part"
    )


def to_scatter(run: Run, operands: Iterable[torch.Tensor]) -> tuple[torch.Tensor, int] | None:
    """A whole value of which a rank's slice would fit the part, and the slice's axis.

    Only a value without gradient, so that slicing it needs no communication: a mask or a bias for
    each head. None if there is no such value, or if the part is not one contiguous slice.
    """
    operands = list(operands)
    part = next((t for t in operands if run.flow.of(t).kind == SHARD), None)
    axes = run.split_axes(part) if part is not None else []
    if part is None or len(axes) != 1 or run.flow.of(part).replicated_shard:
        return None
    size, axis = run.full_shape(part)[axes[0]], axes[0] - part.dim()
    if len(run.blocks.get(id(part), {}).get(axes[0], (size,))) > 1:
        return None
    for whole in operands:
        fits = whole.dim() >= -axis and whole.shape[axis] == size
        if fits and run.flow.of(whole).kind == REPLICATE and not whole.requires_grad:
            return whole, axis if axis == -1 else axis + whole.dim()
    return None


def to_gather(run: Run, operands: Iterable[torch.Tensor]) -> MissingCollective | None:
    """The gather of a part joined with a whole value of its full shape, or with rows of such."""
    operands = list(operands)
    part = next((t for t in operands if run.flow.of(t).kind == SHARD), None)
    wholes = [tuple(t.shape) for t in operands if run.flow.of(t).kind == REPLICATE]
    if part is None or tuple(run.full_shape(part)) not in [w[-part.dim() :] for w in wholes]:
        return None
    return MissingCollective.whole_of(run.flow.of(part).border, run.flow.of(part).axis)


def _made_from(run: Run, whole: torch.Tensor, held: dict[int, _Held]) -> Iterator[_Held]:
    """The parameters and buffers that a value is computed from, back to the last linear layer."""
    waiting, seen = [whole], {id(whole)}
    for each in itertools.islice(waiting, _MOST_STEPS):
        for found in (held[key] for key in run.seen_as(each) if key in held):
            yield found._replace(is_run=each is not whole and _is_weight(found))
        makers = run.makers.get(id(each), ())
        weights = [m for m in makers if id(m) in held and _is_weight(held[id(m)])]
        for maker in weights or makers:
            if id(maker) not in seen:
                seen.add(id(maker))
                waiting.append(maker)


def _is_weight(held: _Held) -> bool:
    return isinstance(held.module, nn.Linear) and held.name == "weight"


def _lines(found: list[_Held], sizes: set[int]) -> list[str]:
    """The schedule lines that shard parameters and buffers along the axis of a part's full size.

    Empty if they are too many, or if one of them has no such axis, or several.
    """
    lines: dict[str, None] = {}
    for held in found:
        names, axes = f'"{held.name}"', [0]
        if held.is_run:
            names = names if held.module.bias is None else '["weight", "bias"]'
        else:
            shape = getattr(held.module, held.name).shape
            axes = [axis for axis, size in enumerate(shape) if size in sizes]
            if isinstance(held.module, nn.Linear):  # its input is the part
                axes = axes[-1:] if held.name == "weight" else []
        if len(axes) != 1:
            return []
        lines[f's["{with_wildcards(held.path)}"].shard({names}, axis={axes[0]})'] = None
    return list(lines) if len(lines) <= _MOST_PARAMETERS else []
