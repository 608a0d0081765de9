# Written by slapo-rewrite 0.1.0 for modeling_gpt2.py; rewrite.json says from what.
"""Kernels that the model uses, each with its reference in PyTorch.

Shapes: M rows, D columns, B batch, N heads, T queries, S keys; M = B N T rows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # the PyTorch references run
    triton = tl = None

constexpr: Any = None if triton is None else tl.constexpr
# Kernels are what they are when they are defined.
interpreted = triton is not None and bool(triton.knobs.runtime.interpret)


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function as it is where there is no Triton."""
    return kernel if triton is None else triton.jit(kernel)


def runs_triton(*tensors: Tensor | None) -> bool:
    """Whether kernels take these tensors; else the PyTorch reference does.

    They take plain floating-point tensors of up to 32 bits on one GPU, or anywhere under
    Triton's interpreter, and no transform of `torch.func` around them.
    """
    given = [x for x in tensors if x is not None]
    return (
        triton is not None
        and not torch._C._are_functorch_transforms_active()
        and all(
            type(x) in (Tensor, nn.Parameter)
            and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and (x.is_cuda or interpreted)
            and x.device == given[0].device
            and x.shape[-1:] != (0,)
            for x in given
        )
    )


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, kernels start on the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def neighbouring(x: Tensor) -> Tensor:
    """The tensor, copied if elements of its last axis are not next to one another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_of(x: Tensor) -> Tensor:
    """(..., D) as (M, D) with neighbouring columns, copied only where it must be."""
    return neighbouring(neighbouring(x).reshape(-1, x.shape[-1]))


def ceil_div(size: int, block: int) -> int:
    """How many blocks cover `size`. Triton's own stops `torch.compile`'s tracing."""
    return -(-size // block)


def block_size(size: int) -> int:
    """The power of two, at least 16, that holds `size` elements."""
    return 1 << max(size - 1, 15).bit_length()


def row_tile(columns: int) -> tuple[int, int, int]:
    """Rows and columns that a program holds at a time, whole rows, and its warps.

    16 elements a thread are two loads of 16 bytes in half precision. Chosen for an
    H100/H200: as compiled for it, threads have registers enough up to 4,096 columns,
    and but for some bytes of the backward passes at 8,192. Not measured yet.
    """
    block_d = block_size(columns)
    block_m = max(2048 // block_d, 1)
    return block_m, block_d, min(max(block_m * block_d // 512, 4), 32)


def masked_softmax_reference(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`masked_softmax` in PyTorch's operations."""
    scores = x * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(-1, dtype=wide).to(x.dtype)


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
    lowest,
    mask_kind: constexpr,
    block_m: constexpr,
    block_s: constexpr,
):
    """Writes y (M, S)."""
    rows = (tl.program_id(0) * block_m + tl.arange(0, block_m)).to(tl.int64)
    token, head, batch = rows % t, rows // t % n, rows // t // n
    columns = tl.arange(0, block_s)[None, :]
    inside = (rows < m)[:, None] & (columns < s)
    score = tl.load(x + rows[:, None] * x_stride + columns, mask=inside, other=0.0)
    # Rounded wherever the original rounds: a row that is masked whole, by the lowest
    # number of its dtype, then gets the same weights.
    score = (score.to(tl.float32) * scale).to(x.dtype.element_ty).to(tl.float32)
    if mask_kind != "none":
        row = batch * mask_batch + head * mask_head + token * mask_token
        at = row[:, None] + columns * mask_key
        if mask_kind == "keep":
            keep = tl.load(mask + at, mask=inside, other=0)
            score = tl.where(keep != 0, score, lowest)
        else:
            score += tl.load(mask + at, mask=inside, other=0.0).to(tl.float32)
            if mask_kind == "add_rounded":
                score = score.to(x.dtype.element_ty).to(tl.float32)
    score = tl.where(inside, score, float("-inf"))
    score = tl.where((rows < m)[:, None], score, 0.0)
    power = tl.exp(score - tl.max(score, 1)[:, None])
    out = power / tl.sum(power, 1)[:, None]
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
    mask_kind: constexpr,
    mask_gradient: constexpr,
    block_m: constexpr,
    block_s: constexpr,
):
    """Writes dx (M, S), and the mask's gradient before it is summed, if it is asked."""
    rows = (tl.program_id(0) * block_m + tl.arange(0, block_m)).to(tl.int64)
    columns = tl.arange(0, block_s)[None, :]
    inside = (rows < m)[:, None] & (columns < s)
    at = rows[:, None] * s + columns
    dy_at = rows[:, None] * dy_stride + columns
    weights = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + dy_at, mask=inside, other=0.0).to(tl.float32)
    g = weights * (g - tl.sum(weights * g, 1)[:, None])
    if mask_kind == "keep":  # else a row that is masked whole would have a gradient
        token, head, batch = rows % t, rows // t % n, rows // t // n
        row = batch * mask_batch + head * mask_head + token * mask_token
        keep = tl.load(mask + row[:, None] + columns * mask_key, mask=inside, other=0)
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
            torch.finfo(x.dtype).min,
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
    """softmax(x * scale + mask), differentiable in x and in an additive mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Keeps the result, which the product with the values keeps anyway."""
        wide = None if mask is None else mask.expand(four_axes(x).shape)
        y = masked_softmax_forward(x, wide, scale)
        ctx.save_for_backward(y, mask)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Gradients of x and the mask."""
        y, mask = ctx.saved_tensors
        wide = None if mask is None else mask.expand(four_axes(y).shape)
        dx, dmask = masked_softmax_backward(
            dy, y, wide, ctx.scale, ctx.needs_input_grad[1]
        )
        return dx, None if dmask is None else dmask.sum_to_size(mask.shape), None


def masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """softmax(x * scale + mask) over the last axis, in float32.

    Shapes: x (B, N, T, S) or without its first axes, mask broadcast to it -> as x.
    Numerics: reassociated; scores are rounded to x's dtype where the original rounds.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.

    Args:
        x: Scores.
        mask: Numbers to add, or which scores to keep, as in
            `torch.nn.functional.scaled_dot_product_attention`; None for neither. Where
            no score of a row is kept, all weigh the same.
        scale: What scores are multiplied by first; kernels take a number, no tensor.
    """
    kernel = (
        runs_triton(x, None if mask is None or mask.dtype == torch.bool else mask)
        and x.dim() in (2, 3, 4)
        and not isinstance(scale, Tensor)
        and (
            mask is None
            or (
                mask.device == x.device
                and torch.broadcast_shapes(x.shape, mask.shape) == x.shape
                # The mask's gradient is made of weights in x's dtype.
                and not (mask.requires_grad and mask.dtype != x.dtype)
            )
        )
    )
    if not kernel:
        return masked_softmax_reference(x, mask, scale)
    y: Tensor = MaskedSoftmaxFunction.apply(x, mask, scale)
    return y
