"""What goes into sharded layers and modules with collectives, and what comes out of them.

A layer takes whole values, parts or partial sums according to how it is split, and gives what its
arguments say; a collective at the border of a module makes its first tensor whole, or covers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_rewrite.model.follow.flow import PART, PARTIAL, Misuse, State
from slapo_rewrite.model.follow.packing import described, ratio_of, reduced
from slapo_rewrite.model.follow.record import layer_call
from slapo_rewrite.model.follow.run import Run
from slapo_rewrite.model.follow.sizes import tensors
from slapo_rewrite.model.follow.vocabulary import Border, Remedy
from slapo_rewrite.model.layers import split_of
from slapo_rewrite.model.tree import Node

# What a size must be a multiple of for its parts to be taken as even ones.
EVEN = 8


def enter_layer(run: Run, module: nn.Module, args: Any) -> None:
    """Checks what a sharded layer is given; operations inside it are not looked at."""
    run.depth += 1
    if run.depth == 1:
        path = str(module._followed_path)
        _check_layer_input(run, path, args[0] if args else None)


def _check_layer_input(run: Run, path: str, tensor: Any) -> None:
    """Raises `Misuse` where a layer is given what it does not take."""
    if not isinstance(tensor, torch.Tensor):
        return
    layer, state = run.asked.layers[path], run.flow.of(tensor)
    split = split_of(run.tree.nodes[path].cls, layer)
    keywords = dict(layer.keywords)
    if state.kind == PARTIAL:
        raise Misuse(
            f"`{path}` needs its input, but `{state.source}` gives a partial sum of it on each "
            "rank",
            'add it up: .sync("fwd_post", "all_reduce")',
            state.source,
            remedy=Remedy.sum_of(state.source),
        )
    if split.output == "partial sum" and tensor.is_floating_point():
        if state.kind != PART:
            raise Misuse(
                f"`{path}` is split over its inputs, but its input is whole on every rank",
                "split the layer before it over its outputs, or this one as well",
                path,
            )
        run.flow.check_own(state, path)
        _check_same_blocks(run, path, tensor, keywords)
    elif split.has_input_gradient:
        borders = run.asked.borders.get(path, ())
        if any(b.mode == "bwd_post" for b in borders):
            return
        if keywords.get("reduce_input_gradient", True):
            run.flow.cover(tensor, path)
        else:
            run.flow.meet_parts([tensor], f"`{path}`", path)


def _check_same_blocks(
    run: Run, path: str, tensor: torch.Tensor, keywords: Mapping[str, Any]
) -> None:
    packed = run.blocks.get(id(tensor), {}).get(tensor.dim() - 1, (1,))
    ratio = ratio_of(keywords.get("parts", 1))
    if reduced(packed) != reduced(ratio):
        raise Misuse(
            f"the input of `{path}` has {described(packed)} along its split axis, but the layer is "
            f"sharded for {described(ratio)}",
            "shard both with the same `parts`",
            path,
        )


def leave_layer(run: Run, module: nn.Module, args: Any, output: Any) -> None:
    """Notes what a sharded layer gives: a part, a partial sum or a whole value."""
    run.depth -= 1
    if run.depth:
        return
    run.next_entry(layer_call)
    path = str(module._followed_path)
    layer = run.asked.layers[path]
    split = split_of(run.tree.nodes[path].cls, layer)
    keywords = dict(layer.keywords)
    for tensor in tensors(output):
        if split.output == "partition":
            copies = getattr(module, "replicas", 1) > 1
            kind = State() if keywords.get("gather_output") else State(PART, path, copies)
        else:
            kind = State() if keywords.get("reduce_output", True) else State(PARTIAL, path)
        run.flow.set(tensor, kind)
        if kind.kind == PART:
            run.origins[id(tensor)] = path
            whole = run.entries[run.position - 1].outputs[0][-1]
            ratio = ratio_of(keywords.get("parts", 1))
            run.blocks[id(tensor)] = {
                tensor.dim() - 1: tuple(whole * r // sum(ratio) for r in ratio)
            }
        run.alive.append(tensor)


def enter_border(
    run: Run, node: Node, border: Border, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """The arguments of a module with the first one covered."""
    first = next((n for n, v in kwargs.items() if isinstance(v, torch.Tensor)), None)
    tensor = args[0] if args else kwargs.get(first)
    if not isinstance(tensor, torch.Tensor):
        return None
    run.depth += 1
    try:
        new = tensor.view_as(tensor)
    finally:
        run.depth -= 1
    run.same(tensor, new)
    if border.operation == "function":
        if border.mode == "bwd_post" and run.flow.of(tensor).covered is None:
            run.flow.set(new, State(run.flow.of(tensor).kind, covered=node.path))
    else:
        run.flow.set(new, run.flow.cover(tensor, node.path))
    if args:
        return (new, *args[1:]), kwargs
    return args, {**kwargs, first: new}


def leave_border(
    run: Run, node: Node, border: Border, module: nn.Module, args: Any, output: Any
) -> Any:
    """The output of a module with its first tensor made whole."""
    tensor = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(tensor, torch.Tensor):
        return None
    state = run.flow.of(tensor)
    run.depth += 1
    try:
        new = tensor.view_as(tensor)
        if border.operation == "all_gather" or (
            border.operation == "function" and state.kind == PART
        ):
            new = _gathered(run, node, tensor, border)
    finally:
        run.depth -= 1
    if border.operation == "all_reduce":
        if state.kind == PART:
            raise Misuse(
                f"the output of `{node.path}` is a part: an all-reduce would add up different "
                "features",
                'gather it: .sync("fwd_post", "all_gather", axis=-1)',
                node.path,
            )
        run.flow.set(new, run.flow.add_up(tensor, node.path))
    else:
        run.flow.set(new, State())
    run.alive.append(new)
    return (new, *output[1:]) if isinstance(output, tuple) else new


def _gathered(run: Run, node: Node, tensor: torch.Tensor, border: Border) -> torch.Tensor:
    """The tensor with the split axis whole again."""
    state = run.flow.of(tensor)
    run.flow.check_own(state, node.path)
    if state.kind != PART:
        raise Misuse(
            f"the output of `{node.path}` is "
            f"{'a partial sum' if state.kind == PARTIAL else 'whole'}: an all-gather would line up "
            "the ranks' copies",
            'add it up: .sync("fwd_post", "all_reduce")' if state.kind == PARTIAL else None,
            node.path,
        )
    shape = list(tensor.shape)
    axis = border.axis if border.axis is not None else -1
    packed = run.blocks.get(id(tensor), {}).get(axis % tensor.dim())
    shape[axis] = sum(packed) if packed else shape[axis] * dist.get_world_size()
    if border.operation == "all_gather" and shape[axis] % EVEN:
        raise Misuse(
            f"the output of `{node.path}` has {shape[axis]} features, which not every world size "
            "divides: only the layer that makes it can gather uneven parts",
            f'gather it there: .sync("fwd_post", "all_gather", axis=-1) on `{state.source}`',
            node.path,
        )
    return tensor.new_empty(shape, requires_grad=tensor.requires_grad)
