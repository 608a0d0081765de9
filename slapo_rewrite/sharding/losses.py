"""Losses of logits that stay sharded over the vocabulary.

A cross entropy over classes that are sharded needs no gather of the logits: it is replaced by one
that sums over the ranks itself. Its value is the same on every rank, and its gradient is exact on
each rank's part.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from slapo_rewrite.sharding.operation_places import calling_frame, place_of
from slapo_rewrite.sharding.placements import REPLICATE, SHARD, PlacementError
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import ParallelLoss

# The module with the losses that the rule `cross_entropy` inserts.
KERNELS = "slapo_rewrite.runtime.kernels.cross_entropy"
# Known loss functions, by module and name, and their replacements in `forward`.
KNOWN = {
    ("transformers.loss.loss_utils", "ForCausalLMLoss"): "causal_lm_loss",
    ("transformers.loss.loss_utils", "ForMaskedLMLoss"): "masked_lm_loss",
    (KERNELS, "causal_lm_cross_entropy"): "causal_lm_loss",
    (KERNELS, "masked_lm_cross_entropy"): "masked_lm_loss",
    (KERNELS, "cross_entropy"): "vocab_parallel_cross_entropy",
}
# The sharded layers that know the full number of classes.
HEADS = ("ColumnParallelLinear",)


def of_parts(run: Run, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The result of a cross entropy of sharded logits that can be replaced; None if it is none."""
    if name != "cross_entropy":
        return None
    logits = args[0] if args else kwargs.get("input")
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    head = _head(run, logits)
    if head is None:
        return None
    frame, function, told = _place(run)
    place = place_of(frame) if frame else None
    if frame is None or place is None:
        return None
    owner = run.method_owner(frame)
    if owner is None or (function is None and not _below(owner, head)):
        return None
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    classes: Any = run.tree.nodes[head].live.out_features
    whole = weight is None or (
        run.flow.of(weight).kind == REPLICATE and tuple(weight.shape) == (classes,)
    )
    if not whole or target.is_floating_point():
        does = "takes probabilities" if whole else "takes split weights"
        raise PlacementError(
            f"this loss {does} of its classes, but each rank has only a part of them",
            f'gather the logits: .sync("fwd_post", "all_gather", axis=-1) on `{head}`',
            head,
        )
    known = run.followed.losses.get(place)
    if known is not None and known.head != head:
        raise PlacementError(
            f"this line computes the losses of both `{known.head}` and `{head}`", path=head
        )
    entry = run.next_entry(torch.nn.functional.cross_entropy)
    # The number of classes in the original call is the full one, or it would not run.
    names, told_of_part = tuple(_names(run, frame, head)), told not in (None, classes)
    run.followed.losses[place] = ParallelLoss(place, function, owner, head, names, told_of_part)
    run.fed |= set(run.seen_as(logits))
    loss = run.made(logits, entry.outputs[0], logits.requires_grad)
    run.alive.append(loss)
    return loss


def _head(run: Run, logits: torch.Tensor) -> str | None:
    """The head that computed the logits, if they are sharded over its classes in one block."""
    state = run.flow.of(logits)
    layer = run.request.layers.get(state.source or "")
    axis = min(1, logits.dim() - 1)
    if state.kind != SHARD or state.source not in run.request.heads:
        return None
    if layer is None or layer.name not in HEADS:
        return None
    whole: Any = run.tree.nodes[state.source].live.out_features
    return state.source if run.blocks.get(id(logits)) == {axis: (whole,)} else None


def _place(run: Run) -> tuple[types.FrameType | None, str | None, int | None]:
    """The frame of the model file that computes the loss, and the replacement of what it calls.

    The third item is the `vocab_size` that the call passes, if any.
    """
    frame, function = calling_frame(), None
    while frame is not None and not run.editable(frame.f_code.co_filename):
        key = (str(frame.f_globals.get("__name__")), frame.f_code.co_name)
        told = frame.f_locals.get("vocab_size")
        function, frame = KNOWN.get(key), frame.f_back
        if function and frame is not None and run.editable(frame.f_code.co_filename):
            return frame, function, told
    direct = frame is not None and frame is calling_frame()
    return (frame if direct else None), None, None


def replaced(run: Run, tensor: torch.Tensor) -> bool:
    """Whether an operation is inside a loss function that will be replaced as a whole."""
    return run.flow.of(tensor).source in run.request.heads and _place(run)[1] is not None


def _below(path: str, inner: str) -> bool:
    return not path or inner.startswith(f"{path}.")


def _names(run: Run, frame: types.FrameType, head: str) -> list[tuple[str, int]]:
    """The local variables that hold sharded output of a head, with the negative split axis."""
    found = []
    for name, value in frame.f_locals.items():
        if isinstance(value, torch.Tensor):
            state, packed = run.flow.of(value), run.blocks.get(id(value), {})
            if state.kind == SHARD and state.source == head and len(packed) == 1:
                found.append((name, next(iter(packed)) - value.dim()))
    return found
