"""The bias of a linear layer, dropout after it, and the residual addition.

Shapes: M rows, D features.
Source: Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM's bias, dropout and addition).
"""

from typing import Any

import torch
from torch import Tensor, nn

from .dropout import draw_seed, keep_scale, kept
from .launch import (
    device_of,
    differentiable_once,
    flat_tile,
    float32,
    jit,
    one_each,
    reducing_programs,
    row_count,
    runs_triton,
    spaced_rows,
    tl,
)
from .plain import drop_rate, dropped, product_and_bias


@jit
def dropout_residual_forward_kernel(
    x,
    residual,
    input_bias,
    seed,
    total,
    m,
    d,
    column_blocks,
    x_stride,
    residual_stride,
    p,
    keep_scale,
    has_input_bias: tl.constexpr,
    has_dropout: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
):
    """Writes the sum (M, D)."""
    keep_scale = float32(keep_scale)
    block, across = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = (block * block_m + tl.arange(0, block_m)).to(tl.int64)
    columns = across * block_d + tl.arange(0, block_d)
    inside = (rows < m)[:, None] & (columns < d)[None, :]
    x_at = rows[:, None] * x_stride + columns[None, :]
    residual_at = rows[:, None] * residual_stride + columns[None, :]
    value = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    if has_input_bias:
        added = tl.load(input_bias + columns, mask=columns < d, other=0.0)
        value += added.to(tl.float32)[None, :]
    if has_dropout:
        keep = kept(seed, rows, across * block_d, p, block_d)
        value = tl.where(keep, value * keep_scale, 0.0)
    value += tl.load(residual + residual_at, mask=inside, other=0.0).to(tl.float32)
    at = rows[:, None] * d + columns[None, :]
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)


@jit
def dropout_residual_backward_kernel(
    dtotal,
    seed,
    dx,
    dinput_bias,
    m,
    d,
    dtotal_stride,
    p,
    keep_scale,
    has_dropout: tl.constexpr,
    input_bias_gradient: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
):
    """Writes dx (M, D), and each program's part of dinput_bias, (programs, D)."""
    keep_scale = float32(keep_scale)
    columns = tl.program_id(0) * block_d + tl.arange(0, block_d)
    db = tl.zeros((block_m, block_d), tl.float32)
    step = tl.num_programs(1) * block_m
    for start in tl.range(tl.program_id(1) * block_m, m, step, num_stages=2):
        rows = (start + tl.arange(0, block_m)).to(tl.int64)
        inside = (rows < m)[:, None] & (columns < d)[None, :]
        dtotal_at = rows[:, None] * dtotal_stride + columns[None, :]
        g = tl.load(dtotal + dtotal_at, mask=inside, other=0.0).to(tl.float32)
        if has_dropout:
            keep = kept(seed, rows, tl.program_id(0) * block_d, p, block_d)
            g = tl.where(keep, g * keep_scale, 0.0)
        if input_bias_gradient:
            db += g
        at = rows[:, None] * d + columns[None, :]
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    if input_bias_gradient:
        at = tl.program_id(1) * d + columns
        tl.store(dinput_bias + at, tl.sum(db, 0), mask=columns < d)


def dropout_residual_forward(
    x: Tensor,
    residual: Tensor,
    input_bias: Tensor | None,
    seed: Tensor | None,
    p: float,
) -> Tensor:
    """The sum, (..., D)."""
    rows, stride = spaced_rows(x)
    residual_rows, residual_stride = spaced_rows(residual)
    dtype = x.dtype
    if input_bias is not None:
        dtype = torch.promote_types(dtype, input_bias.dtype)
    dtype = torch.promote_types(dtype, residual.dtype)
    total = torch.empty(x.shape, dtype=dtype, device=x.device)
    m, d = row_count(x), x.shape[-1]
    row_blocks, column_blocks, block_m, block_d = flat_tile(m, d)
    with device_of(x):
        dropout_residual_forward_kernel[(row_blocks * column_blocks,)](
            rows,
            residual_rows,
            rows if input_bias is None else input_bias.contiguous(),
            rows if seed is None else seed,
            total,
            m,
            d,
            column_blocks,
            stride,
            residual_stride,
            p,
            keep_scale(p),
            has_input_bias=input_bias is not None,
            has_dropout=seed is not None,
            block_m=block_m,
            block_d=block_d,
        )
    return total


def dropout_residual_backward(
    dtotal: Tensor,
    seed: Tensor | None,
    p: float,
    x_dtype: torch.dtype,
    input_bias_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x, (..., D), and of the bias, (D,)."""
    if seed is None and not input_bias_gradient:
        return dtotal.to(x_dtype), None
    rows, stride = spaced_rows(dtotal)
    m, d = row_count(dtotal), dtotal.shape[-1]
    dx = torch.empty(dtotal.shape, dtype=x_dtype, device=dtotal.device)
    row_blocks, column_blocks, block_m, block_d = flat_tile(m, d)
    programs = reducing_programs(dtotal, row_blocks, column_blocks=column_blocks)
    parts = torch.empty((programs, d), dtype=torch.float32, device=dtotal.device)
    with device_of(dtotal):
        dropout_residual_backward_kernel[(column_blocks, programs)](
            rows,
            rows if seed is None else seed,
            dx,
            parts,
            m,
            d,
            stride,
            p,
            keep_scale(p),
            has_dropout=seed is not None,
            input_bias_gradient=input_bias_gradient,
            block_m=block_m,
            block_d=block_d,
        )
    return dx, parts.sum(0) if input_bias_gradient else None


class DropoutResidualFunction(torch.autograd.Function):
    """dropout(x + input_bias) + residual, differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        input_bias: Tensor | None,
        p: float,
    ) -> Tensor:
        """Keeps the seed."""
        seed = draw_seed(x) if p > 0 else None
        ctx.save_for_backward(seed)
        ctx.p = p
        ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, input_bias)]
        return dropout_residual_forward(x, residual, input_bias, seed, p)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dtotal: Tensor) -> Any:
        """Gradients of x, residual and input_bias."""
        (seed,) = ctx.saved_tensors
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        bias_gradient = bias_dtype is not None and ctx.needs_input_grad[2]
        dx, dbias = dropout_residual_backward(
            dtotal, seed, ctx.p, x_dtype, bias_gradient
        )
        if dbias is not None:
            dbias = dbias.to(bias_dtype)
        return dx, dtotal.to(residual_dtype), dbias, None


def dropout_residual(
    x: Tensor,
    residual: Tensor,
    *,
    linear: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(linear(x)) + residual; the kernel adds the linear layer's bias.

    Shapes: x (..., D') where a layer makes it (..., D), residual (..., D) -> (..., D).
    Numerics: reassociated; float32 inside, rounded once. Reseeded where something is
        dropped: dropout draws other numbers than `torch.nn.functional.dropout`, from the
        same generator, and stores no mask.
    Source: Shoeybi et al. 2019, arXiv:1909.08053; Salmon et al. 2011,
        doi:10.1145/2063384.2063405.

    Args:
        x: What is added to the residual.
        residual: The stream that runs past the layers.
        linear: The linear layer before dropout, called if it has hooks or an adapter.
            Without it, dropout applies to x.
        dropout: The dropout module, called likewise; or the dropout rate.
    """
    x, input_bias = product_and_bias(x, linear)
    p = drop_rate(dropout) if runs_triton(x, residual, input_bias) else None
    if p is None or x.shape != residual.shape or not one_each(input_bias, x):
        x = x if input_bias is None else x + input_bias
        return dropped(x, dropout) + residual
    total: Tensor = DropoutResidualFunction.apply(x, residual, input_bias, p)
    return total
