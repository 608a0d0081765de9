# Written by slapo-rewrite 0.2.0 for modeling_gpt2.py; rewrite.json says from what.
"""Cross entropy of logits that are split over the vocabulary: no rank holds all of them.

Shapes: B batch, T tokens, N predictions, V vocabulary, V' the part that this rank holds.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .shards import part_sizes, rank, sum_parts
from .tensor_parallel import all_gather


class _CrossEntropy(torch.autograd.Function):
    """Each prediction's loss, and the exact gradient of this rank's part of the logits.

    With `weight`, (V,), a second result: the sum of the losses that each class would
    have as the target, so weighted.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, vocab_size: int, weight: Tensor | None
    ) -> tuple[Tensor, ...]:
        first = sum(part_sizes(vocab_size)[: rank()])
        end = first + logits.shape[-1]
        # Targets that no rank holds are not masked: they fail as in `cross_entropy`.
        elsewhere = (target >= 0) & (target < first)
        elsewhere |= (target >= end) & (target < vocab_size)
        column = (target - first).masked_fill(elsewhere, 0).unsqueeze(-1)

        logits = logits - sum_parts(logits.amax(-1), dist.ReduceOp.MAX).unsqueeze(-1)
        sums = [logits.gather(-1, column).squeeze(-1).masked_fill(elsewhere, 0)]
        if weight is not None:
            sums.append(logits @ weight[first:end])
        softmax = logits.exp()
        total, at_target, *of_all = sum_parts(torch.stack([softmax.sum(-1), *sums]))
        softmax /= total.unsqueeze(-1)

        ctx.save_for_backward(softmax, column, elsewhere, weight)
        ctx.first, ctx.end = first, end
        total = total.log()
        if weight is None:
            return (total - at_target,)
        return total - at_target, weight.sum() * total - of_all[0]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor, *of_all: Tensor
    ) -> tuple[Tensor, None, None, None]:
        softmax, column, elsewhere, weight = ctx.saved_tensors
        logits = softmax * gradient.unsqueeze(-1)
        if weight is not None:
            even = weight.sum() * softmax - weight[ctx.first : ctx.end]
            logits += even * of_all[0].unsqueeze(-1)
        wanted = -gradient.masked_fill(elsewhere, 0).unsqueeze(-1)
        return logits.scatter_add_(-1, column, wanted), None, None, None


def whole_logits(logits: Tensor, head: nn.Module, axis: int = -1) -> Tensor:
    """The logits of all V classes, on every rank, of the part that `head` gives.

    Args:
        logits: With V' classes on `axis`; with V they are whole already.
        head: The layer that they are from.
        axis: The axis of the classes.
    """
    size = vocabulary_of(head)
    return logits if logits.shape[axis] == size else all_gather(logits, axis, size)


def vocabulary_of(head: Any) -> int:
    """V, of a layer that is divided over the ranks, or of a whole one in its place."""
    layer = getattr(
        head, "base_layer", head
    )  # which an adapter of PEFT's stands around
    split = hasattr(layer, "full_out_features")
    size: int = layer.full_out_features if split else layer.out_features
    return size


def cross_entropy_of_parts(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    vocab_size: int,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """`vocab_parallel_cross_entropy` of `vocab_size` classes."""
    axis = min(1, input.dim() - 1)
    if target.is_floating_point():
        raise TypeError("a vocabulary-parallel loss takes classes, not probabilities")
    if input.shape[axis] == vocab_size:
        return nn.functional.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    held = part_sizes(vocab_size)[rank()]
    if input.shape[axis] != held:
        raise RuntimeError(
            f"the logits have {input.shape[axis]} classes, but this rank's part of "
            f"{vocab_size} is {held}"
        )
    logits = input.movedim(axis, -1).reshape(-1, held)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    ignored = (target == ignore_index).reshape(-1)
    classes = target.reshape(-1).masked_fill(ignored, 0)
    weight = logits.new_ones(vocab_size) if weight is None else weight.to(logits.dtype)
    counts = weight[classes].masked_fill(ignored, 0)
    apply: Any = _CrossEntropy.apply
    smooth = weight if label_smoothing else None
    found: tuple[Tensor, ...] = apply(logits, classes, vocab_size, smooth)
    losses = found[0].masked_fill(ignored, 0) * counts
    if label_smoothing:
        even = found[1].masked_fill(ignored, 0) / vocab_size
        losses = (1 - label_smoothing) * losses + label_smoothing * even
    if reduction == "none":
        return losses.view_as(target).to(input.dtype)
    loss = losses.sum() if reduction == "sum" else losses.sum() / counts.sum()
    return loss.to(input.dtype)


def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """The loss of transformers' `ForMaskedLMLoss`, of this rank's logits.

    Args:
        logits: (B, T, V'); they are cast to float32.
        labels: (B, T).
        vocab_size: V.
        num_items_in_batch: What the sum is divided by, where gradients are accumulated
            over several batches; without it, the number of labels that count here.
        ignore_index: The label of predictions that do not count.
    """
    loss = cross_entropy_of_parts(
        logits.float().flatten(0, -2),
        labels.flatten().to(logits.device),
        None,
        vocab_size,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        label_smoothing=0.0,
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
    """The loss of transformers' `ForCausalLMLoss`, of this rank's logits.

    Args:
        logits: (B, T, V'); they are cast to float32.
        labels: (B, T); a token's label is the next one's.
        vocab_size: V.
        num_items_in_batch: As in `masked_lm_loss`.
        ignore_index: The label of predictions that do not count.
        shift_labels: The labels as they stand beside their predictions, if that is done.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return masked_lm_loss(
        logits, shift_labels, vocab_size, num_items_in_batch, ignore_index
    )
