# Written by slapo-rewrite 0.2.0 for modeling_bert.py; rewrite.json says from what.
"""Looks, as training goes on, whether ranks train alike what each has a copy of."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .shards import named_world, world_size

ALIKE = 1e-4  # what a GPU adds up in another order differs by less, in proportion
SMALL = 1e-4  # of the largest: a smaller gradient may be one of rounding alone
# By process group, how often layers have run: ranks run them alike, but steps of an
# optimizer they may skip. And norms of the gradients of copies, and of those that
# training begins with, at an optimizer's step since the ranks compared them last.
runs: dict[Any, int] = {}
norms: dict[Any, list[tuple[float, float]]] = {}


def note_copies(parameters: Iterable[Any], begins: bool) -> None:
    """Before an optimizer's step: notes what each rank has a copy of, and its gradient."""
    group = named_world().group or dist.group.WORLD
    copies = [p for p in parameters if not hasattr(p, "model_parallel")]
    trained = [p for p in copies if p.grad is not None]
    if group not in norms and trained:
        norms[group] = [(_norm(p.grad), _norm(p) * begins) for p in trained]


def _norm(x: Any) -> float:
    x = x.to_local() if hasattr(x, "to_local") else x  # FSDP2's slice, alike on ranks
    if x.layout is not torch.strided:
        return 0.0
    precise = torch.promote_types(x.dtype, torch.float32)
    return float(torch.linalg.vector_norm(x.detach(), dtype=precise))


def compare_gradients() -> None:
    """When a layer runs: at times, the ranks compare what their optimizers have found.

    Raises:
        RuntimeError: Training began with other copies, or no gradient of one is alike.
    """
    group = named_world().group or dist.group.WORLD
    runs[group] = count = runs.get(group, 0) + 1
    if count & (count - 1):  # at the 2nd run, the 4th, the 8th ...
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # a graph holds no such comparison
    everyones: list[Any] = [None] * world_size()
    dist.all_gather_object(everyones, norms.pop(group, []), group)
    pairs = [zip(*each, strict=True) for each in zip(*everyones, strict=False)]
    gradients, values = zip(*pairs, strict=True) if pairs else ((), ())
    if any(max(n) - min(n) > ALIKE * max(n) for n in values):
        raise RuntimeError(
            "the ranks began with other values of what each has a copy of: begin with "
            "`loading.build`, or load the same weights"
        )
    large = [n for n in gradients if max(n) > SMALL * max(map(max, gradients))]
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
