# Written by slapo-rewrite 0.2.0 for modeling_roberta.py; rewrite.json says from what.
"""Checks, during training, that parameters which every rank holds stay the same."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .shards import named_world, world_size

ALIKE = 1e-4  # relative; sums in another order on a GPU differ by less
SMALL = 1e-4  # of the largest gradient; smaller ones may be rounding errors
# By process group: how often layers have run, which is the same on all ranks (a rank
# may skip optimizer steps); and norms, from the first optimizer step since the ranks
# last compared them, of gradients, of values when training begins, and of the states
# that an optimizer has loaded for parts.
runs: dict[Any, int] = {}
norms: dict[Any, tuple[list[tuple[float, float]], float]] = {}


def note_copies(parameters: Iterable[Any], states: Any, is_new: bool) -> None:
    """Before an optimizer's step: records norms of unsplit parameters and of states."""
    group, loaded = named_world().group or dist.group.WORLD, 0.0
    copies = [p for p in parameters if not hasattr(p, "model_parallel")]
    trained = [p for p in copies if p.grad is not None]
    if not trained or (group in norms and not (is_new and states)):
        return
    for p in parameters if is_new else ():
        state = states.get(p, {})
        if hasattr(p, "model_parallel") and state.get("step", 1):
            moments = [t for t in state.values() if getattr(t, "shape", 0) == p.shape]
            loaded += sum(map(_norm, moments))
    begins = is_new and not states
    norms[group] = [(_norm(p.grad), _norm(p) * begins) for p in trained], loaded


def _norm(x: Any) -> float:
    x = x.to_local() if hasattr(x, "to_local") else x  # FSDP2's local slice
    if x.layout is not torch.strided:
        return 0.0
    precise = torch.promote_types(x.dtype, torch.float32)
    return float(torch.linalg.vector_norm(x.detach(), dtype=precise))


def compare_gradients() -> None:
    """When a layer runs: compares the recorded norms over the ranks, now and then.

    Raises:
        RuntimeError: Values differ when training begins, or all gradients differ, or
            the optimizer has loaded the same state for all parts.
    """
    # Recomputation runs layers again in a backward pass; extra operations disturb it.
    if torch._C._current_graph_task_id() != -1:
        return
    group = named_world().group or dist.group.WORLD
    runs[group] = count = runs.get(group, 0) + 1
    if count & (count - 1):  # at the 2nd run, the 4th, the 8th ...
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # CUDA graphs cannot hold this
    everyones: list[Any] = [None] * world_size()
    dist.all_gather_object(everyones, norms.pop(group, ([], 0.0)), group)
    records, loaded = zip(*everyones, strict=True)
    if loaded[0] and len({*loaded}) == 1:
        raise RuntimeError(
            "all ranks have loaded one rank's optimizer state: save a file for each rank, "
            "or `sharded_state(model, optimizer)` of a model rewritten `--with sharded_state`"
        )
    pairs = [zip(*each, strict=True) for each in zip(*records, strict=False)]
    gradients, values = zip(*pairs, strict=True) if pairs else ((), ())
    if any(max(n) - min(n) > ALIKE * max(n) for n in values):
        raise RuntimeError(
            "replicated parameters had different values on the ranks when training began: "
            "begin with `loading.build`, or load the same weights"
        )
    large = [n for n in gradients if max(n) > SMALL * max(map(max, gradients))]
    differ = [max(n) - min(n) > ALIKE * max(n) for n in large]
    if len({*map(len, records)}) > 1 or (differ and all(differ)):
        raise RuntimeError(
            "the ranks have trained replicated parameters differently: they skipped "
            "different steps, or clipped by the norm of their own gradients, as torch.nn."
            "utils.clip_grad_norm_ does. Clip with `tensor_parallel.clip_grad_norm_(model, "
            "max_norm)`, and scale with torch's ShardedGradScaler"
        )
    if any(differ):
        warnings.warn(
            f"the gradients of {sum(differ)} replicated parameters differ between the "
            "ranks: ranks that share layers have to get the same batches",
            stacklevel=3,
        )
