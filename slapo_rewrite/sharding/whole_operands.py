"""What to shard as well, where a whole value meets a part: the parameters that it is made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.sharding.placements import REPLICATE, SHARD
from slapo_rewrite.sharding.rank_state import Run

_GENERAL = "split what the whole value is made from as well"
# A value made from more parameters is an activation, of which other layers are to be split.
_MOST_PARAMETERS = 2


class _Held(NamedTuple):
    """A parameter, by the module that holds it and its name there."""

    path: str
    name: str
    module: nn.Module


def advice(run: Run, operands: Iterable[torch.Tensor]) -> str:
    """What the user can do where whole values meet a part: with the lines to add, where known."""
    operands = list(operands)
    parts = [t for t in operands if run.flow.of(t).kind == SHARD]
    sizes = {run.full_shape(t)[axis] for t in parts for axis in run.split_axes(t)}
    held = {
        id(parameter): _Held(path, name, node.live)
        for path, node in run.tree.nodes.items()
        for name, parameter in node.live.named_parameters(recurse=False)
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


def _made_from(run: Run, whole: torch.Tensor, held: dict[int, _Held]) -> Iterator[_Held]:
    """The parameters that a value is made from, but for those before a linear layer."""
    waiting, seen = [whole], {id(whole)}
    for each in waiting:
        known = [held[key] for key in run.seen_as(each) if key in held]
        yield from known
        makers = [m for m in run.makers.get(id(each), ()) if m.requires_grad]
        weights = [m for m in makers if id(m) in held and _is_weight(held[id(m)])]
        for maker in weights or makers:
            if id(maker) not in seen:
                seen.add(id(maker))
                waiting.append(maker)


def _is_weight(held: _Held) -> bool:
    return isinstance(held.module, nn.Linear) and held.name == "weight"


def _lines(found: list[_Held], sizes: set[int]) -> list[str]:
    """What shards parameters along the axes of a part's full size.

    Nothing where they are many, or one of them has no such axis, or several.
    """
    lines: dict[str, None] = {}
    for held in found:
        names, axes = f'"{held.name}"', [0]
        if _is_weight(held):
            names = names if held.module.bias is None else '["weight", "bias"]'
        else:
            shape = getattr(held.module, held.name).shape
            axes = [axis for axis, size in enumerate(shape) if size in sizes]
        if len(axes) != 1:
            return []
        lines[f's["{with_wildcards(held.path)}"].shard({names}, axis={axes[0]})'] = None
    return list(lines) if len(lines) <= _MOST_PARAMETERS else []
