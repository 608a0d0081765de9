# Written by slapo-rewrite 0.2.0 for modeling_t5.py; rewrite.json says from what.
"""Looks, as training goes on, whether ranks train alike what each has a copy of."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .shards import named_world, world_size

ALIKE = 1e-4  # what a GPU adds up in another order differs by less, in proportion
SMALL = 1e-4  # of the largest: a smaller gradient may be one of rounding alone
# By process group, how often layers have run: ranks run them alike, but steps of an
# optimizer they may skip. And the norms of the gradients of copies, at an optimizer's
# step since the ranks compared them last.
runs: dict[Any, int] = {}
norms: dict[Any, list[float]] = {}


def note_gradients(parameters: Iterable[Any]) -> None:
    """Before an optimizer's step: notes the gradients of what each rank has a copy of."""
    group = named_world().group or dist.group.WORLD
    if group in norms:
        return
    given = [p.grad for p in parameters if not hasattr(p, "model_parallel")]
    dense = [g for g in given if g is not None and g.layout is torch.strided]
    # FSDP2's are of a slice, which is the same one on all of these ranks.
    if copies := [g.to_local() if hasattr(g, "to_local") else g for g in dense]:
        norms[group] = torch.stack([_norm(g) for g in copies]).tolist()


def _norm(x: Tensor) -> Tensor:
    precise = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dtype=precise)
    return norm.float()


def compare_gradients() -> None:
    """When a layer runs: at times, the ranks compare what their optimizers have found.

    Raises:
        RuntimeError: None of these gradients is alike on the ranks.
    """
    group = named_world().group or dist.group.WORLD
    runs[group] = count = runs.get(group, 0) + 1
    if count & (count - 1):  # at the 2nd run, the 4th, the 8th ...
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # a graph holds no such comparison
    everyones: list[Any] = [None] * world_size()
    dist.all_gather_object(everyones, norms.pop(group, []), group)
    largest = max(map(max, filter(None, everyones)), default=0.0)
    large = [n for n in zip(*everyones, strict=False) if max(n) > SMALL * largest]
    differ = [max(n) - min(n) > ALIKE * max(n) for n in large]
    if len({*map(len, everyones)}) > 1 or (differ and all(differ)):
        raise RuntimeError(
            "the ranks have trained otherwise what each has a copy of: they have left out "
            "other steps, or scaled by a norm of their own, as torch.nn.utils."
            "clip_grad_norm_ does. Clip by `tensor_parallel.clip_grad_norm_(model, "
            "max_norm)`, and scale by torch's ShardedGradScaler"
        )
    if any(differ):
        warnings.warn(
            f"{sum(differ)} gradients of what each rank has a copy of differ between the "
            "ranks: those that share layers have to take the same batches",
            stacklevel=3,
        )
