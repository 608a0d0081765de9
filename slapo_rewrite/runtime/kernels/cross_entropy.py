"""Cross entropy of a large vocabulary, without a copy of the logits in float32.

Shapes: M rows, V classes.
Source: Milakov & Gimelshein 2018, arXiv:1805.02867 (maximum and sum in one pass).
"""

from typing import Any

import torch
from torch import Tensor, nn

from .activations import exponential, tanh_tile
from .launch import (
    block_size,
    ceil_div,
    device_of,
    differentiable_once,
    float32,
    jit,
    rows_of,
    runs_triton,
    tl,
)

# ignore_index, label_smoothing, softcap
Options = tuple[int, float, float | None]


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    options: Options,
    num_items: Tensor | float | None,
    upcast: bool,
) -> Tensor:
    """`cross_entropy` in PyTorch's operations."""
    ignore_index, label_smoothing, softcap = options
    dtype = loss_dtype(logits, upcast)
    logits = logits.reshape(-1, logits.shape[-1])
    if logits.dtype != torch.float64:
        logits = logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = nn.functional.cross_entropy(
        logits,
        labels.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="mean" if num_items is None else "sum",
    )
    if isinstance(num_items, Tensor):
        num_items = num_items.to(loss.device)
    return (loss if num_items is None else loss / num_items).to(dtype)


def loss_dtype(logits: Tensor, upcast: bool) -> torch.dtype:
    """The loss's dtype in PyTorch: float32 if cast or under autocast, else the logits'."""
    if logits.dtype == torch.float64:
        return torch.float64
    mixed = not logits.is_meta and torch.is_autocast_enabled(logits.device.type)
    return torch.float32 if upcast or mixed else logits.dtype


@jit
def logits_of(row, columns, inside, softcap, has_softcap: tl.constexpr):
    """Some logits of a row, capped; -inf where there are none."""
    x = tl.load(row + columns, mask=inside, other=float("-inf")).to(tl.float32)
    if has_softcap:
        x = tl.where(inside, softcap * tanh_tile(x * (1.0 / softcap)), float("-inf"))
    return x


@jit
def whole_vectors(row, stride, v):
    """Where a row's first 16 bytes that are aligned begin, and how many elements follow.

    Those that are loaded and stored 16 bytes at a time: eight elements in half precision.
    Rows of an odd vocabulary begin anywhere; up to seven elements are left at each end.
    """
    first = ((8 - row * stride % 8) % 8).to(tl.int32)
    return first, tl.maximum(v - first, 0) // 8 * 8


@jit
def ends(first, many, v, block: tl.constexpr):
    """The columns before and after a row's whole vectors, and which of them there are."""
    i = tl.arange(0, block)
    return tl.where(i < first, i, i + many), i < v - many


@jit
def cross_entropy_forward_kernel(
    logits,
    labels,
    losses,
    tops,
    logs,
    v,
    stride,
    ignore_index,
    label_smoothing,
    softcap,
    has_softcap: tl.constexpr,
    has_smoothing: tl.constexpr,
    block_v: tl.constexpr,
):
    """Writes a row's loss, and the logarithm of its sum of exponentials: (M,) each.

    The latter as the largest logit and the rest: their sum would lose digits.
    """
    label_smoothing, softcap = float32(label_smoothing), float32(softcap)
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        tl.store(tops + row, 0.0)
        tl.store(logs + row, 0.0)
        return
    here = logits + row * stride
    first, many = whole_vectors(row, stride, v)
    aligned = logits + tl.multiple_of(row * stride + first, 8)
    columns, real = ends(first, many, v, block_v)
    # Each lane keeps its own maximum, and the lanes meet after the loop. Four logits a
    # turn, since the sum so far has to be scaled once a turn: exponentials, not memory,
    # would be the limit.
    largest = logits_of(here, columns, real, softcap, has_softcap)
    total = tl.where(largest == float("-inf"), 0.0, 1.0)
    plain = tl.where(real, largest, 0.0)
    for start in range(0, many, 4 * block_v):
        i = start + tl.arange(0, block_v)
        j, k, n = i + block_v, i + 2 * block_v, i + 3 * block_v
        a = logits_of(aligned, i, i < many, softcap, has_softcap)
        b = logits_of(aligned, j, j < many, softcap, has_softcap)
        c = logits_of(aligned, k, k < many, softcap, has_softcap)
        d = logits_of(aligned, n, n < many, softcap, has_softcap)
        if has_smoothing:
            plain += tl.where(i < many, a, 0.0) + tl.where(j < many, b, 0.0)
            plain += tl.where(k < many, c, 0.0) + tl.where(n < many, d, 0.0)
        above = tl.maximum(largest, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        against = tl.where(above == float("-inf"), 0.0, above)
        total = total * exponential(largest - against)
        total += exponential(a - against) + exponential(b - against)
        total += exponential(c - against) + exponential(d - against)
        largest = above
    top = tl.max(largest, 0)
    against = tl.where(top == float("-inf"), 0.0, top)
    log = tl.log(tl.sum(total * exponential(largest - against), 0))
    # No memory is read for a label that is no class: `flat_labels` has told of it.
    known = (label >= 0) & (label < v)
    x = tl.load(here + label, mask=known, other=float("nan")).to(tl.float32)
    if has_softcap:
        x = softcap * tanh_tile(x * (1.0 / softcap))
    loss = log + (top - x)
    if has_smoothing:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (
            log + (top - tl.sum(plain, 0) / v)
        )
    tl.store(losses + row, loss)
    tl.store(tops + row, top)
    tl.store(logs + row, log)


@jit
def store_gradient(
    logits,
    dlogits,
    known,
    inside,
    is_label,
    top,
    log,
    scale,
    label_smoothing,
    v,
    softcap,
    has_softcap: tl.constexpr,
):
    """Writes the gradient of some logits of a row, times the scale, knowing some of them."""
    x = tl.load(logits, mask=known, other=0.0).to(tl.float32)
    slope = 1.0
    if has_softcap:
        bent = tanh_tile(x * (1.0 / softcap))
        x, slope = softcap * bent, 1.0 - bent * bent
    gradient = exponential((x - top) - log) - label_smoothing / v
    gradient -= tl.where(is_label, 1.0 - label_smoothing, 0.0)
    gradient *= slope * scale
    tl.store(dlogits, gradient.to(dlogits.dtype.element_ty), mask=inside)


@jit
def cross_entropy_backward_kernel(
    logits,
    labels,
    tops,
    logs,
    scale,
    dlogits,
    v,
    column_blocks,
    stride,
    ignore_index,
    label_smoothing,
    softcap,
    has_scale: tl.constexpr,
    has_softcap: tl.constexpr,
    block_v: tl.constexpr,
):
    """Writes dlogits (M, V), times the number at `scale`; it may be logits itself."""
    label_smoothing, softcap = float32(label_smoothing), float32(softcap)
    row = (tl.program_id(0) // column_blocks).to(tl.int64)
    across = tl.program_id(0) % column_blocks
    label, top, log = tl.load(labels + row), tl.load(tops + row), tl.load(logs + row)
    # Zeros in rows that do not count, whatever their logits are: those are not loaded.
    counts = label != ignore_index
    factor = tl.where(counts, tl.load(scale).to(tl.float32) if has_scale else 1.0, 0.0)
    first, many = whole_vectors(row, stride, v)
    place = label.to(tl.int32) - first
    i = across * block_v + tl.arange(0, block_v)
    at = tl.multiple_of(row * stride + first, 8) + i
    store_gradient(
        logits + at,
        dlogits + at,
        i < tl.where(counts, many, 0),
        i < many,
        i == place,
        top,
        log,
        factor,
        label_smoothing,
        v,
        softcap,
        has_softcap,
    )
    if across == 0:
        columns, real = ends(first, many, v, 16)
        store_gradient(
            logits + row * stride + columns,
            dlogits + row * stride + columns,
            real & (columns < tl.where(counts, v, 0)),
            real,
            columns == label,
            top,
            log,
            factor,
            label_smoothing,
            v,
            softcap,
            has_softcap,
        )


def cross_entropy_forward(
    logits: Tensor, labels: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Losses (M,) and statistics (2, M), from logits (M, V) and labels (M,).

    2,048 elements of eight warps are a load of 16 bytes a thread in half precision, and
    four of them are under way at a time. Measured on an H200: 81% of what its memory
    allows at 30,522 classes, all of it at 128,256.
    """
    (m, v), (ignore_index, label_smoothing, softcap) = logits.shape, options
    losses = torch.empty((m,), dtype=torch.float32, device=logits.device)
    statistics = torch.empty((2, m), dtype=torch.float32, device=logits.device)
    with device_of(logits):
        cross_entropy_forward_kernel[(m,)](
            logits,
            labels,
            losses,
            *statistics.unbind(),
            v,
            logits.stride(0),
            ignore_index,
            label_smoothing,
            softcap or 0.0,
            has_softcap=softcap is not None,
            has_smoothing=label_smoothing > 0,
            block_v=min(block_size(ceil_div(v, 4)), 2048),
            num_warps=8,
        )
    return losses, statistics


def cross_entropy_backward(
    logits: Tensor,
    labels: Tensor,
    statistics: Tensor,
    scale: Tensor | None,
    options: Options,
    in_place: bool,
) -> Tensor:
    """The gradient of the logits, (M, V), in the memory of the logits if `in_place`.

    Args:
        logits: (M, V), contiguous within a row.
        labels: (M,).
        statistics: (2, M), as the forward pass found them.
        scale: One number on the device, the gradient of the sum of losses.
        options: As in `cross_entropy`.
        in_place: Whether the logits may be overwritten.
    """
    (m, v), (ignore_index, label_smoothing, softcap) = logits.shape, options
    block_v = min(block_size(v), 4096)
    column_blocks = ceil_div(v, block_v)
    if logits.stride(0) < v:  # rows that are the same memory
        logits = logits.contiguous()
    dlogits = (
        logits
        if in_place
        else torch.empty_strided(
            logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device
        )
    )
    with device_of(logits):
        cross_entropy_backward_kernel[(m * column_blocks,)](
            logits,
            labels,
            *statistics.unbind(),
            statistics if scale is None else scale,
            dlogits,
            v,
            column_blocks,
            logits.stride(0),
            ignore_index,
            label_smoothing,
            softcap or 0.0,
            has_scale=scale is not None,
            has_softcap=softcap is not None,
            block_v=block_v,
            num_warps=8,
        )
    return dlogits


def loss_scale(
    labels: Tensor, ignore_index: int, num_items: Tensor | float | None
) -> Tensor:
    """The factor of the sum of losses, left on the device of the labels."""
    if num_items is None:
        return (labels != ignore_index).sum().to(torch.float32).reciprocal()
    if isinstance(num_items, Tensor):
        return num_items.to(labels.device, torch.float32).reciprocal()
    items = torch.full((), num_items, dtype=torch.float32, device=labels.device)
    return items.reciprocal()


def flat_labels(
    labels: Tensor, logits: Tensor, classes: int, ignore_index: int
) -> Tensor:
    """The labels, one per row of logits (or of hidden states), on the logits' device.

    Raises:
        ValueError: There are more or fewer.
        RuntimeError: A label is not a class; on a GPU the device stops, as in PyTorch.
    """
    labels, rows = labels.reshape(-1), logits.shape[:-1].numel()
    if len(labels) != rows:
        raise ValueError(f"there are {len(labels)} labels for {rows} predictions")
    labels = labels.to(logits.device).contiguous()
    known = ((labels >= 0) & (labels < classes)) | (labels == ignore_index)
    torch._assert_async(known.all(), "a label is no class")
    return labels


class CrossEntropyFunction(torch.autograd.Function):
    """The loss, differentiable in the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        options: Options,
        num_items: Tensor | float | None,
        in_place: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        """Saves the logits and a few numbers per row."""
        labels = flat_labels(labels, logits, logits.shape[-1], options[0])
        losses, statistics = cross_entropy_forward(rows_of(logits), labels, options)
        scale = loss_scale(labels, options[0], num_items)
        ctx.save_for_backward(logits, labels, statistics, scale)
        ctx.options, ctx.in_place = options, in_place
        return (losses.sum() * scale).to(dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dloss: Tensor) -> Any:
        """The gradient of the logits."""
        logits, labels, statistics, scale = ctx.saved_tensors
        dlogits = cross_entropy_backward(
            rows_of(logits.detach()),
            labels,
            statistics,
            dloss * scale,
            ctx.options,
            ctx.in_place,
        )
        return dlogits.view(logits.shape), *(None,) * 5


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    num_items: Tensor | float | None = None,
    in_place: bool = False,
    upcast: bool = False,
) -> Tensor:
    """Cross entropy, computed in float32, of logits of any dtype.

    Shapes: logits (..., V), labels (...) of as many rows -> ().
    Numerics: reassociated.
    Source: Milakov & Gimelshein 2018, arXiv:1805.02867; label smoothing: Szegedy et al.
        2015, arXiv:1512.00567; soft cap: Gemma Team 2024, arXiv:2408.00118.

    Args:
        logits: Before any softmax.
        labels: Class indices.
        ignore_index: A label that does not count.
        label_smoothing: The share of a target that is spread over all classes.
        softcap: If given, logits become softcap * tanh(logits / softcap).
        num_items: The divisor of the sum of losses; by default the number of labels
            that count.
        in_place: Let the backward pass write the gradient over the logits, which
            nothing else may then use; it can run only once.
        upcast: Return a loss in float32, as for logits that are cast first; else it has
            the logits' dtype, or float32 under autocast.
    """
    options = (ignore_index, label_smoothing, softcap)
    kernel = labels.dtype == torch.int64 and not isinstance(softcap, Tensor)
    if not (kernel and runs_triton(logits)):
        return cross_entropy_reference(logits, labels, options, num_items, upcast)
    dtype = loss_dtype(logits, upcast)
    loss: Tensor = CrossEntropyFunction.apply(
        logits, labels, options, num_items, in_place, dtype
    )
    return loss


def shifted(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels (..., T) shifted to their predictions: each token predicts the next one."""
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def masked_lm_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """The loss of transformers' `ForMaskedLMLoss`.

    Args:
        logits: (B, T, V).
        labels: (B, T).
        vocab_size: V.
        num_items_in_batch: The divisor of the sum, if gradients are accumulated over
            several batches; by default the number of labels that count here.
        ignore_index: The label of predictions that do not count.
    """
    return cross_entropy(
        logits.reshape(-1, vocab_size),
        labels,
        ignore_index=ignore_index,
        num_items=num_items_in_batch,
        upcast=True,
    )


def causal_lm_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The loss of transformers' `ForCausalLMLoss`.

    Args:
        logits: (B, T, V).
        labels: (B, T), not shifted: each token predicts the next one.
        vocab_size: V.
        num_items_in_batch: As in `masked_lm_cross_entropy`.
        ignore_index: The label of predictions that do not count.
        shift_labels: The labels, already shifted to their predictions, if given.
    """
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    return masked_lm_cross_entropy(
        logits, shift_labels, vocab_size, num_items_in_batch, ignore_index
    )
