"""Means and variances of sharded features.

If a module owns a parameter that is split along these features (such as the weight of a norm), the
statistic is computed over all ranks: the call in its method is replaced by one with an all-reduce.
The result is the same on every rank. Each rank uses it on its own part, so the replacement also
all-reduces the result's gradient.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch

from slapo_rewrite.sharding.operation_places import calling_frame, place_of
from slapo_rewrite.sharding.placements import SHARD, PlacementError, State
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.tracked_sizes import Shape
from slapo_rewrite.sharding.types import MissingCollective, Statistic

# The replacement of each operation, and the keyword arguments that it supports.
_OF_PARTS = {
    "mean": ("mean_of_parts", {"dim", "keepdim", "dtype"}),
    "var": ("var_of_parts", {"dim", "keepdim", "unbiased", "correction"}),
    "std": ("std_of_parts", {"dim", "keepdim", "unbiased", "correction"}),
}

# What a kernel's call computes, by its module: its code is not imported, for it needs triton.
_REFERENCE = "slapo_rewrite.runtime.kernels.rms_norm", "rms_norm_reference"


def over_ranks(run: Run, name: str, whole: list[Shape], args: Any, kwargs: Any) -> State | None:
    """The state of the result of a statistic over all ranks; None for any other operation.

    `whole` has the shapes of the operands in the whole model.
    """
    function, known = _OF_PARTS.get(name, ("", set()))
    tensor = args[0] if args else None
    if not function or kwargs.keys() - known or not isinstance(tensor, torch.Tensor):
        return None
    state, axis = run.flow.of(tensor), args[1] if len(args) > 1 else kwargs.get("dim")
    if state.kind != SHARD or type(axis) is not int:
        return None
    if run.split_axes(tensor) != [axis % tensor.dim()]:
        return None
    frames = [frame for frame, _ in traceback.walk_stack(calling_frame())]
    computed = frames[0].f_globals.get("__name__"), frames[0].f_code.co_name
    if computed == _REFERENCE and frames[1].f_code.co_name == "rms_norm":
        function, frames = "rms_norm_of_parts", frames[2:]  # for a call that a rule has written
    place = place_of(frames[0]) if run.editable(frames[0].f_code.co_filename) else None
    owner = run.method_owner(frames[0])
    if place is None or owner is None:
        return None
    size, live = whole[0][axis], run.tree.nodes[owner].live
    for shard in run.request.parameters.get(owner, ()):
        if run.full_shape(getattr(live, shard.name))[shard.axis] == size:
            run.flow.check_own(state, owner)
            run.followed.statistics.add(Statistic(place, function, owner, shard.name))
            return State(grad_reduced=owner)
    for parameter, tensor in live.named_parameters(recurse=False):
        if tuple(tensor.shape) == (size,):
            raise PlacementError(
                f"`{name}` needs the whole axis, but each rank has only a part of it",
                f'split `{parameter}` of `{owner}` as well, .shard("{parameter}", axis=0), so '
                f"that it runs over all ranks; or gather `{state.source}` first",
                state.source,
                remedy=MissingCollective.whole_of(state.border, state.axis),
            )
    return None
