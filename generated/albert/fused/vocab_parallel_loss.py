# Written by slapo-rewrite 0.2.0 for modeling_albert.py; rewrite.json says from what.
"""Cross entropy of logits that are split over the vocabulary: no rank holds all of them.

Shapes: B batch, T tokens, N predictions, V vocabulary, V' the part that this rank holds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .shards import Shard, rank, sum_parts
from .tensor_parallel import all_reduce, gather


class _LogSumAndTarget(torch.autograd.Function):
    """Each prediction's log-sum-exp over the vocabulary, and the logit of its target.

    The backward pass needs memory for one tensor of the size of this rank's logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, column: Tensor, elsewhere: Tensor
    ) -> tuple[Tensor, Tensor]:
        at_target = logits.gather(-1, column).squeeze(-1).masked_fill(elsewhere, 0)
        softmax = logits.exp()
        total, at_target = sum_parts(torch.stack([softmax.sum(-1), at_target]))
        ctx.save_for_backward(softmax.div_(total.unsqueeze(-1)), column, elsewhere)
        return total.log(), at_target

    @staticmethod
    def backward(
        ctx: Any, log_sum: Tensor, at_target: Tensor
    ) -> tuple[Tensor, None, None]:
        # `once_differentiable` would not refuse this for constant gradients.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "a loss of split logits has no second derivative, which create_graph=True "
                'needs: gather the logits with sync("fwd_post", "all_gather", axis=-1) in '
                "the schedule, at the layer that computes them"
            )
        softmax, column, elsewhere = ctx.saved_tensors
        at_target = at_target.masked_fill(elsewhere, 0).unsqueeze(-1)
        logits = softmax * log_sum.unsqueeze(-1)
        return logits.scatter_add_(-1, column, at_target), None, None


def whole_logits(logits: Tensor, head: nn.Module, axis: int = -1) -> Tensor:
    """Gathers the logits of all V classes on every rank.

    Args:
        logits: V' classes on `axis`; if there are V of them, they are returned as is.
        head: The layer that computed them.
        axis: The axis of the classes.
    """
    shard = Shard(axis, vocabulary_of(head))
    return logits if shard.is_full(logits) else gather(logits, shard)


def vocabulary_of(head: Any) -> int:
    """V, for an output layer that is split over the ranks, or one that is whole."""
    # PEFT's adapters wrap the layer.
    layer = getattr(head, "base_layer", head)
    return int(getattr(layer, "full_out_features", layer.out_features))


def vocab_parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    head: nn.Module,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    upcast: bool = False,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits of which each rank has a part.

    Args:
        input: This rank's part, (N, V'), (V',) or (N, V', ...); or all V classes.
        target: Classes out of V, (N,), () or (N, ...), the same on every rank.
        weight: How much each of the V classes counts, (V,), the same on every rank.
        head: The layer that gives the logits, which says what V is.
        ignore_index: The target of predictions that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: How much of a target is spread evenly over all V classes.
        upcast: Take `input` as float32 first.

    Raises:
        RuntimeError: `input` has neither this rank's classes nor all.
        TypeError: The targets are probabilities.
    """
    if upcast and input.dtype != torch.float64:
        input = input.float()
    return cross_entropy_of_parts(
        input,
        target,
        vocabulary_of(head),
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def cross_entropy_of_parts(
    input: Tensor, target: Tensor, vocab_size: int, **options: Any
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits split over the vocabulary."""
    shard = Shard(min(1, input.dim() - 1), vocab_size)
    if target.is_floating_point():
        raise TypeError("a vocabulary-parallel loss takes classes, not probabilities")
    if shard.is_full(input):
        return nn.functional.cross_entropy(input, target, **options)
    held = shard.sizes_with(input)[rank()]
    logits = input.movedim(shard.axis, -1).reshape(-1, held)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    logits = logits - sum_parts(logits.detach().amax(-1, True), dist.ReduceOp.MAX)

    ignored = (target == options["ignore_index"]).reshape(-1)
    classes = target.reshape(-1).masked_fill(ignored, 0)
    column, elsewhere = shard.looked_up(classes)
    apply: Callable[..., tuple[Tensor, Tensor]] = _LogSumAndTarget.apply
    log_sum, at_target = apply(logits, column.unsqueeze(-1), elsewhere)

    weight, smoothing = options.get("weight"), options.get("label_smoothing")
    weight = logits.new_ones(vocab_size) if weight is None else weight.to(logits.dtype)
    counts = weight[classes].masked_fill(ignored, 0)
    losses = (log_sum - at_target).masked_fill(ignored, 0) * counts
    if smoothing:
        own_weight = replace(shard, axis=0).cut(weight)
        even = weight.sum() * log_sum - all_reduce(logits @ own_weight)
        even = even.masked_fill(ignored, 0) / vocab_size
        losses = (1 - smoothing) * losses + smoothing * even
    if options["reduction"] == "none":
        return losses.view_as(target).to(input.dtype)
    loss = losses.sum()
    if options["reduction"] == "mean":
        loss = loss / counts.sum()
    return loss.to(input.dtype)
