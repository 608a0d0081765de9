"""The output layer and its cross entropy, a few thousand rows of logits at a time.

Shapes: M rows, D features, V classes.
Source: Wijmans et al. 2024, arXiv:2411.09009; Hsu et al. 2024, arXiv:2410.10989.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .cross_entropy import (
    Options,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_reference,
    flat_labels,
    loss_dtype,
    loss_scale,
    shifted,
)
from .launch import differentiable_once, runs_triton
from .plain import is_plain


def chunk_rows(m: int, v: int) -> int:
    """How many rows of logits are in memory at a time: 2 GiB in bfloat16.

    Every further part is another pass over the weight's gradient in float32; with these
    it moves less than the logits do. Chosen for an H100 or H200.
    """
    rows = 2**30 // v
    return max(min(m, rows // 256 * 256 or rows), 1)


def add_part(total: Tensor | None, part: Tensor, last: bool) -> Tensor:
    """The sum so far and another part, in float32 if there are several."""
    if total is None:
        return part if last else part.float()
    return total.add_(part)


def linear_cross_entropy_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    options: Options,
    gradients: tuple[bool, bool, bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum of losses, and those of its gradients that are wanted.

    The gradients of weight and bias are added up in float32.
    """
    m, v = len(hidden), len(weight)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    dhidden = torch.empty_like(hidden) if gradients[0] else None
    dweight = dbias = None
    rows = chunk_rows(m, v)
    for start in range(0, max(m, 1), rows):
        last = start + rows >= m
        part, targets = hidden[start : start + rows], labels[start : start + rows]
        logits = nn.functional.linear(part, weight, bias)
        losses, statistics = cross_entropy_forward(logits, targets, options)
        loss += losses.sum()
        if not any(gradients):
            continue
        dlogits = cross_entropy_backward(
            logits, targets, statistics, None, options, in_place=True
        )
        if dhidden is not None:
            torch.mm(dlogits, weight, out=dhidden[start : start + rows])
        if gradients[1]:
            dweight = add_part(dweight, dlogits.t() @ part, last)
        if gradients[2]:
            dbias = add_part(dbias, dlogits.sum(0, dtype=torch.float32), last)
    return loss, [dhidden, dweight, dbias]


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss, with its gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: Options,
        num_items: Tensor | float | None,
        dtype: torch.dtype,
        differentiate: bool,
    ) -> Tensor:
        """Keeps the gradients of the sum of losses, and no logits."""
        labels = flat_labels(labels, hidden, len(weight), options[0])
        scale = loss_scale(labels, options[0], num_items)
        wanted = [differentiate and need for need in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, gradients = linear_cross_entropy_chunks(
                hidden.reshape(-1, hidden.shape[-1]).to(dtype),
                weight.to(dtype),
                None if bias is None else bias.to(dtype),
                labels,
                options,
                (wanted[0], wanted[1], wanted[2]),
            )
        total = loss * scale
        if num_items is None:  # where no label counts, the gradients are zeros
            scale = torch.where(scale.isinf(), 0.0, scale)
        ctx.save_for_backward(scale, *gradients)
        ctx.shape = hidden.shape
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        return total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dloss: Tensor) -> Any:
        """Scales the gradients. The division comes last: half precision keeps more."""
        scale, *gradients = ctx.saved_tensors
        # One axis, or half precision would round it.
        factor = (dloss * scale).reshape(1)
        found = [
            (
                None
                if g is None
                else torch.mul(g, factor, out=torch.empty_like(g, dtype=dtype))
            )
            for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        if found[0] is not None:
            found[0] = found[0].view(ctx.shape)
        return *found, *(None,) * 5


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    layer: nn.Module | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    num_items: Tensor | float | None = None,
    upcast: bool = False,
) -> Tensor:
    """Cross entropy of `linear(hidden, weight, bias)`, without keeping the logits.

    Shapes: hidden (..., D), weight (V, D), bias (V,) or None, labels (...) -> ().
    Numerics: reassociated. Logits have the dtype of hidden, as the layer's would; what
        follows is in float32, and so are the sums that make the weight's gradient.
    Source: Wijmans et al. 2024, arXiv:2411.09009; Hsu et al. 2024, arXiv:2410.10989.

    Args:
        hidden: The output layer's input.
        weight: The output layer's weight.
        labels: Class indices, already shifted.
        bias: The output layer's bias.
        layer: The output layer, which is called if it has hooks or an adapter.
        ignore_index: A label that does not count.
        label_smoothing: The share of a target that is spread over all classes.
        softcap: If given, logits become softcap * tanh(logits / softcap).
        num_items: The divisor of the sum of losses; by default the number of labels
            that count.
        upcast: Return a loss in float32, as in `cross_entropy`.
    """
    options = (ignore_index, label_smoothing, softcap)
    dtype = None
    if layer is not None and is_plain(layer):
        layer = None
    kernel = layer is None and labels.dtype == torch.int64
    kernel = kernel and not isinstance(softcap, Tensor)
    if kernel and runs_triton(hidden, weight, bias):
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        elif len({t.dtype for t in (hidden, weight, bias) if t is not None}) == 1:
            dtype = hidden.dtype
    if dtype is None:
        logits = (
            nn.functional.linear(hidden, weight, bias)
            if layer is None
            else layer(hidden)
        )
        return cross_entropy_reference(logits, labels, options, num_items, upcast)
    differentiate = torch.is_grad_enabled()
    loss: Tensor = LinearCrossEntropyFunction.apply(
        hidden, weight, bias, labels, options, num_items, dtype, differentiate
    )
    return loss.to(loss_dtype(hidden, upcast))


def masked_lm_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    *,
    bias: Tensor | None = None,
    layer: nn.Module | None = None,
    softcap: float | None = None,
    **_: Any,
) -> Tensor:
    """The loss of transformers' `ForMaskedLMLoss`, without keeping the logits.

    Args:
        hidden: The output layer's input, (B, T, D).
        weight: The output layer's weight, (V, D).
        labels: (B, T).
        num_items_in_batch: The divisor of the sum, if gradients are accumulated over
            several batches; by default the number of labels that count here.
        ignore_index: The label of predictions that do not count.
        bias: The output layer's bias, (V,).
        layer: As in `linear_cross_entropy`.
        softcap: As in `linear_cross_entropy`.
    """
    return linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        layer=layer,
        ignore_index=ignore_index,
        softcap=softcap,
        num_items=num_items_in_batch,
        upcast=True,
    )


def causal_lm_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    layer: nn.Module | None = None,
    softcap: float | None = None,
    **_: Any,
) -> Tensor:
    """The loss of transformers' `ForCausalLMLoss`, without keeping the logits.

    Args:
        hidden: The output layer's input, (B, T, D).
        weight: The output layer's weight, (V, D).
        labels: (B, T), not shifted: each token predicts the next one.
        num_items_in_batch: As in `masked_lm_linear_cross_entropy`.
        ignore_index: The label of predictions that do not count.
        shift_labels: The labels, already shifted to their predictions, if given.
        bias: The output layer's bias, (V,).
        layer: As in `linear_cross_entropy`.
        softcap: As in `linear_cross_entropy`.
    """
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    return masked_lm_linear_cross_entropy(
        hidden,
        weight,
        shift_labels,
        num_items_in_batch,
        ignore_index,
        bias=bias,
        layer=layer,
        softcap=softcap,
    )
