"""Softmax of attention scores, scaled and masked, in one pass.

Shapes: M rows, B batch, N query heads, T tokens, S tokens attended to.
Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
"""

from typing import Any

import torch
from torch import Tensor

from .activations import exponential
from .launch import (
    ceil_div,
    device_of,
    differentiable_once,
    float32,
    jit,
    row_tile,
    rows_of,
    runs_triton,
    tl,
)


def masked_softmax_reference(
    x: Tensor, mask: Tensor | None, scale: float, keep: Tensor | None
) -> Tensor:
    """`masked_softmax` in PyTorch's operations."""
    scores = x * scale
    if mask is not None:
        scores = scores + mask
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(-1, dtype=wide).to(x.dtype)


@jit
def mask_rows(row, n, t, mask_batch, mask_head, mask_token):
    """Where the mask has these rows of scores; divided in 32 bits, 64 are much slower."""
    token, head, batch = row % t, row // t % n, row // t // n
    at = batch.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head
    return at + token.to(tl.int64) * mask_token


@jit
def masked_softmax_forward_kernel(
    x,
    mask,
    y,
    m,
    n,
    t,
    s,
    x_stride,
    mask_batch,
    mask_head,
    mask_token,
    mask_key,
    scale,
    mask_kind: tl.constexpr,
    block_m: tl.constexpr,
    block_s: tl.constexpr,
):
    """Writes y (M, S), a row for each token of each head."""
    scale = float32(scale)
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    rows = row.to(tl.int64)
    columns = tl.arange(0, block_s)[None, :]
    inside = (rows < m)[:, None] & (columns < s)
    score = tl.load(x + rows[:, None] * x_stride + columns, mask=inside, other=0.0)
    # Rounded wherever the original rounds: a row that is masked whole, by the lowest
    # number of its dtype, then gets the same weights.
    score = (score.to(tl.float32) * scale).to(x.dtype.element_ty).to(tl.float32)
    if mask_kind != "none":
        at = (
            mask_rows(row, n, t, mask_batch, mask_head, mask_token)[:, None]
            + columns * mask_key
        )
        if mask_kind == "keep":
            keep = tl.load(mask + at, mask=inside, other=0)
            score = tl.where(keep != 0, score, float("-inf"))
        else:
            score += tl.load(mask + at, mask=inside, other=0.0).to(tl.float32)
            if mask_kind == "add_rounded":
                score = score.to(x.dtype.element_ty).to(tl.float32)
    score = tl.where(inside, score, float("-inf"))
    score = tl.where((rows < m)[:, None], score, 0.0)
    power = exponential(score - tl.max(score, 1)[:, None])
    out = power * (1.0 / tl.sum(power, 1))[:, None]
    at = rows[:, None] * s + columns
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@jit
def masked_softmax_backward_kernel(
    dy,
    y,
    mask,
    dx,
    dmask,
    m,
    n,
    t,
    s,
    dy_stride,
    mask_batch,
    mask_head,
    mask_token,
    mask_key,
    scale,
    mask_kind: tl.constexpr,
    mask_gradient: tl.constexpr,
    block_m: tl.constexpr,
    block_s: tl.constexpr,
):
    """Writes dx (M, S), and the mask's gradient before it is summed, if it is asked."""
    scale = float32(scale)
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    rows = row.to(tl.int64)
    columns = tl.arange(0, block_s)[None, :]
    inside = (rows < m)[:, None] & (columns < s)
    at = rows[:, None] * s + columns
    dy_at = rows[:, None] * dy_stride + columns
    weights = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + dy_at, mask=inside, other=0.0).to(tl.float32)
    g = weights * (g - tl.sum(weights * g, 1)[:, None])
    if mask_kind == "keep":  # else a row that is masked whole would have a gradient
        mask_at = (
            mask_rows(row, n, t, mask_batch, mask_head, mask_token)[:, None]
            + columns * mask_key
        )
        keep = tl.load(mask + mask_at, mask=inside, other=0)
        g = tl.where(keep != 0, g, 0.0)
    if mask_gradient:
        tl.store(dmask + at, g.to(dmask.dtype.element_ty), mask=inside)
    tl.store(dx + at, (g * scale).to(dx.dtype.element_ty), mask=inside)


def four_axes(x: Tensor) -> Tensor:
    """Views x as (B, N, T, S), with axes of length 1 before its own."""
    return x[(None,) * (4 - x.dim())]


def masked_softmax_forward(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The weights, of x's shape; the mask has four axes and x's sizes."""
    rows, (_, n, t, s) = rows_of(x), four_axes(x).shape
    m = len(rows)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mask_kind = "none"
    strides = (0, 0, 0, 0) if mask is None else mask.stride()
    if mask is not None:
        rounded = torch.promote_types(x.dtype, mask.dtype) == x.dtype
        mask_kind = "add_rounded" if rounded else "add"
        mask_kind = "keep" if mask.dtype == torch.bool else mask_kind
    block_m, block_s, num_warps = row_tile(s)
    with device_of(x):
        masked_softmax_forward_kernel[(ceil_div(m, block_m),)](
            rows,
            rows if mask is None else mask,
            y,
            m,
            n,
            t,
            s,
            rows.stride(0),
            *strides,
            scale,
            mask_kind=mask_kind,
            block_m=block_m,
            block_s=block_s,
            num_warps=num_warps,
        )
    return y


def masked_softmax_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, mask_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x, and of the mask at x's sizes."""
    rows, (_, n, t, s) = rows_of(dy), four_axes(dy).shape
    m = len(rows)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dmask = dx
    if mask is not None and mask_gradient:
        dmask = torch.empty(y.shape, dtype=mask.dtype, device=y.device)
    keep = mask is not None and mask.dtype == torch.bool
    strides = (0, 0, 0, 0) if mask is None else mask.stride()
    block_m, block_s, num_warps = row_tile(s)
    with device_of(y):
        masked_softmax_backward_kernel[(ceil_div(m, block_m),)](
            rows,
            y,
            rows if mask is None else mask,
            dx,
            dmask,
            m,
            n,
            t,
            s,
            rows.stride(0),
            *strides,
            scale,
            mask_kind="keep" if keep else "none",
            mask_gradient=mask_gradient,
            block_m=block_m,
            block_s=block_s,
            num_warps=num_warps,
        )
    return dx, dmask if mask_gradient else None


class MaskedSoftmaxFunction(torch.autograd.Function):
    """softmax(x * scale + mask), differentiable in x and in the mask.

    A boolean mask says which scores are kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Saves the result, which the product with the values saves anyway."""
        wide = None if mask is None else mask.expand(four_axes(x).shape)
        y = masked_softmax_forward(x, wide, scale)
        ctx.save_for_backward(y, mask)
        ctx.scale = scale
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Gradients of x and the mask."""
        y, mask = ctx.saved_tensors
        wide = None if mask is None else mask.expand(four_axes(y).shape)
        dx, dmask = masked_softmax_backward(
            dy, y, wide, ctx.scale, ctx.needs_input_grad[1]
        )
        return dx, None if dmask is None else dmask.sum_to_size(mask.shape), None


def masked_softmax(
    x: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    keep: Tensor | None = None,
) -> Tensor:
    """softmax(x * scale + mask) over the last axis, in float32.

    Shapes: x (B, N, T, S) or without its first axes, mask broadcast to it -> as x.
    Numerics: reassociated; scores are rounded to x's dtype where the original rounds.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.

    Args:
        x: Scores.
        mask: Numbers to add, if any; True adds 1.
        scale: The factor of the scores; kernels take a number, not a tensor.
        keep: Which scores count, if not all. If none of a row's scores count, its
            weights are NaN.
    """
    given = mask if keep is None else keep
    kernel = (
        runs_triton(x, mask)
        and x.dim() in (2, 3, 4)
        and not isinstance(scale, Tensor)
        and (mask is None or keep is None)
        and (keep is None or keep.dtype == torch.bool)
        and (
            given is None
            or (
                given.device == x.device
                and torch.broadcast_shapes(x.shape, given.shape) == x.shape
                # The mask's gradient is made of weights in x's dtype.
                and not (given.requires_grad and given.dtype != x.dtype)
            )
        )
    )
    if not kernel:
        return masked_softmax_reference(x, mask, scale, keep)
    y: Tensor = MaskedSoftmaxFunction.apply(x, given, scale)
    return y
