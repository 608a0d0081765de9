# Written by slapo-rewrite 0.2.0 for modeling_opt.py; rewrite.json says from what.
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


def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """`ForMaskedLMLoss` of transformers, from this rank's part of the logits.

    Args:
        logits: (B, T, V'); they are cast to float32.
        labels: (B, T).
        vocab_size: V.
        num_items_in_batch: What the sum of losses is divided by, for gradients that are
            accumulated over several batches; None: the number of labels that count.
        ignore_index: The label of predictions that do not count.
    """
    loss = cross_entropy_of_parts(
        logits.float().flatten(0, -2),
        labels.flatten().to(logits.device),
        vocab_size,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`ForCausalLMLoss` of transformers, from this rank's part of the logits.

    Args:
        logits: (B, T, V'); they are cast to float32.
        labels: (B, T), not shifted: a token's label is its own id.
        vocab_size: V.
        num_items_in_batch: As in `masked_lm_loss`.
        ignore_index: The label of predictions that do not count.
        shift_labels: The labels already shifted to their predictions, if they are.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return masked_lm_loss(
        logits, shift_labels, vocab_size, num_items_in_batch, ignore_index
    )
