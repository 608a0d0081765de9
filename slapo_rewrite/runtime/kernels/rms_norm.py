"""Root mean square normalisation, with dropout and the residual addition before it.

Shapes: M rows, D features.
Source: Zhang & Sennrich 2019, arXiv:1910.07467.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .dropout import draw_seed, keep_scale, kept
from .launch import (
    ceil_div,
    device_of,
    differentiable_once,
    float32,
    jit,
    one_each,
    reducing_programs,
    row_count,
    row_tile,
    runs_triton,
    spaced_rows,
    stages_of,
    tl,
    triton_dtype,
)
from .plain import drop_rate, dropped, runs_forward_alone


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str
) -> Tensor:
    """`rms_norm` in PyTorch's operations."""
    wide = x if x.dtype == torch.float64 else x.float()
    r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    hat = (x if cast == "weight" else wide) * r
    if weight is None:
        return hat.to(x.dtype)
    if cast == "output":
        return ((offset + weight.to(hat.dtype)) * hat).to(x.dtype)
    scale = offset + weight if offset else weight
    return scale * hat.to(x.dtype if cast == "input" else weight.dtype)


@jit
def rms_norm_forward_kernel(
    x,
    residual,
    seed,
    weight,
    y,
    total,
    rstd,
    m,
    d,
    x_stride,
    residual_stride,
    p,
    keep_scale,
    eps,
    offset,
    hat_dtype: tl.constexpr,
    has_residual: tl.constexpr,
    has_dropout: tl.constexpr,
    has_weight: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
):
    """Writes y (M, D) and rstd (M,), and the sum (M, D) where there is one."""
    keep_scale, eps, offset = float32(keep_scale), float32(eps), float32(offset)
    rows = (tl.program_id(0) * block_m + tl.arange(0, block_m)).to(tl.int64)
    columns = tl.arange(0, block_d)
    inside = (rows < m)[:, None] & (columns < d)[None, :]
    at = rows[:, None] * d + columns[None, :]
    x_at = rows[:, None] * x_stride + columns[None, :]
    value = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        if has_dropout:
            keep = kept(seed, rows, 0, p, block_d)
            value = tl.where(keep, value * keep_scale, 0.0)
        residual_at = rows[:, None] * residual_stride + columns[None, :]
        value += tl.load(residual + residual_at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 1) / d + eps)
    tl.store(rstd + rows, r, mask=rows < m)
    hat = (value * r[:, None]).to(hat_dtype).to(tl.float32)
    if has_weight:
        scale = tl.load(weight + columns, mask=columns < d, other=0.0).to(tl.float32)
        hat *= (scale + offset)[None, :]
    tl.store(y + at, hat.to(y.dtype.element_ty), mask=inside)


@jit
def rms_norm_backward_kernel(
    dy,
    dtotal,
    total,
    seed,
    weight,
    rstd,
    dx,
    dresidual,
    dweight,
    m,
    d,
    dy_stride,
    dtotal_stride,
    total_stride,
    p,
    keep_scale,
    offset,
    hat_dtype: tl.constexpr,
    has_dtotal: tl.constexpr,
    has_residual: tl.constexpr,
    has_dropout: tl.constexpr,
    has_weight: tl.constexpr,
    weight_gradient: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
):
    """Writes dx and dresidual (M, D), and each program's part of dweight, (programs, D)."""
    keep_scale, offset = float32(keep_scale), float32(offset)
    columns = tl.arange(0, block_d)
    if has_weight:
        scale = tl.load(weight + columns, mask=columns < d, other=0.0).to(tl.float32)
        scale += offset
    dw = tl.zeros((block_m, block_d), tl.float32)
    step = tl.num_programs(0) * block_m
    for start in tl.range(tl.program_id(0) * block_m, m, step, num_stages=stages):
        rows = (start + tl.arange(0, block_m)).to(tl.int64)
        inside = (rows < m)[:, None] & (columns < d)[None, :]
        at = rows[:, None] * d + columns[None, :]
        total_at = rows[:, None] * total_stride + columns[None, :]
        dy_at = rows[:, None] * dy_stride + columns[None, :]
        r = tl.load(rstd + rows, mask=rows < m, other=0.0)[:, None]
        hat = tl.load(total + total_at, mask=inside, other=0.0).to(tl.float32) * r
        g = tl.load(dy + dy_at, mask=inside, other=0.0).to(tl.float32)
        if weight_gradient:
            dw += g * hat.to(hat_dtype).to(tl.float32)
        if has_weight:
            g *= scale[None, :]
        g = (g - hat * (tl.sum(g * hat, 1) / d)[:, None]) * r
        if has_dtotal:
            dtotal_at = rows[:, None] * dtotal_stride + columns[None, :]
            g += tl.load(dtotal + dtotal_at, mask=inside, other=0.0).to(tl.float32)
        if has_residual:
            tl.store(dresidual + at, g.to(dresidual.dtype.element_ty), mask=inside)
        if has_dropout:
            keep = kept(seed, rows, 0, p, block_d)
            g = tl.where(keep, g * keep_scale, 0.0)
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    if weight_gradient:
        at = tl.program_id(0) * d + columns
        tl.store(dweight + at, tl.sum(dw, 0), mask=columns < d)


def rms_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    seed: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    cast: str,
    p: float,
) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """The normalised rows and the sum, (..., D), and rstd, (M,).

    Also the dtype that the rows are rounded to before the weight.
    """
    rows, stride = spaced_rows(x)
    residual_rows, residual_stride = spaced_rows(x if residual is None else residual)
    m, d = row_count(x), x.shape[-1]
    dtype = torch.promote_types(x.dtype, residual_rows.dtype)
    hat_dtype = y_dtype = dtype
    if weight is not None:
        by_cast = {"input": dtype, "weight": weight.dtype, "output": torch.float32}
        hat_dtype = by_cast[cast]
        if cast != "output":
            y_dtype = torch.promote_types(hat_dtype, weight.dtype)
    y = torch.empty(x.shape, dtype=y_dtype, device=x.device)
    rstd = torch.empty((m,), dtype=torch.float32, device=x.device)
    total = x
    if residual is not None:
        total = torch.empty(x.shape, dtype=dtype, device=x.device)
    block_m, block_d, num_warps = row_tile(d)
    with device_of(x):
        rms_norm_forward_kernel[(ceil_div(m, block_m),)](
            rows,
            residual_rows,
            rstd if seed is None else seed,
            rows if weight is None else weight.contiguous(),
            y,
            total,
            rstd,
            m,
            d,
            stride,
            residual_stride,
            p,
            keep_scale(p),
            eps,
            offset,
            hat_dtype=triton_dtype(hat_dtype),
            has_residual=residual is not None,
            has_dropout=seed is not None,
            has_weight=weight is not None,
            block_m=block_m,
            block_d=block_d,
            num_warps=num_warps,
        )
    return y, total, rstd, hat_dtype


def rms_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    seed: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    p: float,
    offset: float,
    hat_dtype: torch.dtype,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x and residual, (..., D), and of the weight, (D,)."""
    (rows, stride), (dy_rows, dy_stride) = spaced_rows(total), spaced_rows(dy)
    dtotal_rows, dtotal_stride = spaced_rows(dy if dtotal is None else dtotal)
    m, d, device = row_count(total), total.shape[-1], total.device
    block_m, block_d, num_warps = row_tile(d, 1024)
    programs = reducing_programs(total, ceil_div(m, block_m), num_warps)
    dx = torch.empty(total.shape, dtype=x_dtype, device=device)
    dresidual = dx
    apart = seed is not None or residual_dtype != x_dtype
    if residual_dtype is not None and apart:
        dresidual = torch.empty(total.shape, dtype=residual_dtype, device=device)
    dweight = torch.empty((programs, d), dtype=torch.float32, device=device)
    with device_of(total):
        rms_norm_backward_kernel[(programs,)](
            dy_rows,
            dtotal_rows,
            rows,
            rstd if seed is None else seed,
            rows if weight is None else weight.contiguous(),
            rstd,
            dx,
            dresidual,
            dweight,
            m,
            d,
            dy_stride,
            dtotal_stride,
            stride,
            p,
            keep_scale(p),
            offset,
            hat_dtype=triton_dtype(hat_dtype),
            has_dtotal=dtotal is not None,
            has_residual=residual_dtype is not None and apart,
            has_dropout=seed is not None,
            has_weight=weight is not None,
            weight_gradient=weight_gradient,
            block_m=block_m,
            block_d=block_d,
            stages=stages_of(block_m * block_d, dy, dtotal, total),
            num_warps=num_warps,
        )
    return dx, dresidual, dweight.sum(0) if weight_gradient else None


class RMSNormFunction(torch.autograd.Function):
    """The normalised rows and the sum; without a residual, no sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        offset: float,
        cast: str,
        p: float,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Keeps the sum, each row's scale and the seed."""
        seed = draw_seed(x) if p > 0 else None
        y, total, rstd, ctx.hat_dtype = rms_norm_forward(
            x, residual, seed, weight, eps, offset, cast, p
        )
        ctx.save_for_backward(total, seed, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.p, ctx.offset, ctx.x_dtype = p, offset, x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        return y if residual is None else (y, total)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> Any:
        """Gradients of x, residual and weight."""
        total, seed, weight, rstd = ctx.saved_tensors
        if dy is None and dtotal is None:
            return (None,) * 7
        dx, dresidual, dweight = rms_norm_backward(
            torch.zeros_like(total) if dy is None else dy,
            dtotal,
            total,
            seed,
            weight,
            rstd,
            ctx.p,
            ctx.offset,
            ctx.hat_dtype,
            ctx.x_dtype,
            ctx.residual_dtype,
            weight is not None and ctx.needs_input_grad[2],
        )
        if dweight is not None:
            dweight = dweight.to(weight.dtype)
        residual_gradient = None if ctx.residual_dtype is None else dresidual
        return dx, residual_gradient, dweight, None, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "input",
) -> Tensor:
    """Divides each row by its root mean square and multiplies it by the weight.

    Shapes: x (..., D), weight (D,) -> (..., D).
    Numerics: reassociated. Statistics in float32; the weight's gradient is summed in
        float32, in the same order at every run.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467.

    Args:
        x: The rows.
        weight: The scale, or None for none.
        eps: Added to the mean of the squares.
        offset: Added to the weight; 1 in Gemma.
        cast: When the normalised rows leave float32: "input" to x's dtype before they
            are multiplied (Llama), "weight" to the weight's dtype before (T5),
            "output" to x's dtype after (Gemma).
    """
    plain = not isinstance(eps, Tensor) and runs_triton(x, weight)
    if not (plain and one_each(weight, x)):
        return rms_norm_reference(x, weight, eps, offset, cast)
    y: Tensor = RMSNormFunction.apply(x, None, weight, eps, offset, cast, 0.0)
    return y


def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    norm: nn.Module | None = None,
    offset: float = 0.0,
    cast: str = "input",
    dropout: nn.Module | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Normalises residual + dropout(x) as `rms_norm` does.

    Shapes: x and residual (..., D), weight (D,) -> the normalised rows and the sum,
        (..., D) each.
    Numerics: reassociated, as `rms_norm`; without dropout the sum is exact. Reseeded
        where something is dropped: dropout draws other numbers than
        `torch.nn.functional.dropout`, from the same generator, and stores no mask.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467; Salmon et al. 2011,
        doi:10.1145/2063384.2063405.

    Args:
        x: What is added to the residual.
        residual: The stream that runs past the layers.
        weight: The scale, or None for none.
        eps: Added to the mean of the squares.
        norm: The norm module with these, if there is one. It is called if it has hooks
            or an adapter, like `dropout`.
        offset: Added to the weight; 1 in Gemma.
        cast: When the normalised rows leave float32, as in `rms_norm`.
        dropout: The module or the rate of the dropout of x.
    """
    plain = not isinstance(eps, Tensor) and runs_triton(x, residual, weight)
    p = drop_rate(dropout) if plain and runs_forward_alone(norm) else None
    if p is None or not (one_each(weight, x) and x.shape == residual.shape):
        total = residual + dropped(x, dropout)
        if norm is not None:
            return norm(total), total
        return rms_norm_reference(total, weight, eps, offset, cast), total
    y, total = RMSNormFunction.apply(x, residual, weight, eps, offset, cast, p)
    return y, total
