"""Layer normalisation, with the bias, dropout and residual addition before it.

Shapes: M rows, D features.
Source: Ba et al. 2016, arXiv:1607.06450.
"""

import weakref
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
)
from .plain import drop_rate, dropped, product_and_bias, runs_forward_alone


@jit
def layer_norm_forward_kernel(
    x,
    residual,
    input_bias,
    seed,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    m,
    d,
    x_stride,
    residual_stride,
    p,
    keep_scale,
    eps,
    has_residual: tl.constexpr,
    has_input_bias: tl.constexpr,
    has_dropout: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
):
    """Writes y (M, D), mean and rstd (M,), and the sum (M, D) where there is one."""
    keep_scale, eps = float32(keep_scale), float32(eps)
    rows = (tl.program_id(0) * block_m + tl.arange(0, block_m)).to(tl.int64)
    columns = tl.arange(0, block_d)
    real = columns < d
    inside = (rows < m)[:, None] & real[None, :]
    at = rows[:, None] * d + columns[None, :]
    x_at = rows[:, None] * x_stride + columns[None, :]
    value = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        if has_input_bias:
            added = tl.load(input_bias + columns, mask=real, other=0.0).to(tl.float32)
            value += added[None, :]
        if has_dropout:
            keep = kept(seed, rows, 0, p, block_d)
            value = tl.where(keep, value * keep_scale, 0.0)
        residual_at = rows[:, None] * residual_stride + columns[None, :]
        value += tl.load(residual + residual_at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mu = tl.sum(tl.where(inside, value, 0.0), 1) / d
    centred = tl.where(inside, value - mu[:, None], 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, 1) / d + eps)
    tl.store(mean + rows, mu, mask=rows < m)
    tl.store(rstd + rows, r, mask=rows < m)
    out = centred * r[:, None]
    if has_weight:
        scale = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
        out *= scale[None, :]
    if has_bias:
        out += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@jit
def layer_norm_backward_kernel(
    dy,
    handed,
    dtotal,
    total,
    seed,
    weight,
    mean,
    rstd,
    dx,
    dresidual,
    dweight,
    dbias,
    dinput_bias,
    m,
    d,
    dy_stride,
    handed_stride,
    dtotal_stride,
    total_stride,
    p,
    keep_scale,
    has_handed: tl.constexpr,
    has_dtotal: tl.constexpr,
    has_residual: tl.constexpr,
    has_dropout: tl.constexpr,
    has_weight: tl.constexpr,
    weight_gradient: tl.constexpr,
    bias_gradient: tl.constexpr,
    input_bias_gradient: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
):
    """Writes dx and dresidual (M, D), and each program's part of the sums over rows.

    Those are dweight, dbias and dinput_bias, (programs, D) each.
    """
    keep_scale = float32(keep_scale)
    columns = tl.arange(0, block_d)
    real = columns < d
    if has_weight:
        scale = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    dw = tl.zeros((block_m, block_d), tl.float32)
    db = tl.zeros((block_m, block_d), tl.float32)
    dib = tl.zeros((block_m, block_d), tl.float32)
    step = tl.num_programs(0) * block_m
    for start in tl.range(tl.program_id(0) * block_m, m, step, num_stages=stages):
        rows = (start + tl.arange(0, block_m)).to(tl.int64)
        inside = (rows < m)[:, None] & real[None, :]
        at = rows[:, None] * d + columns[None, :]
        total_at = rows[:, None] * total_stride + columns[None, :]
        dy_at = rows[:, None] * dy_stride + columns[None, :]
        mu = tl.load(mean + rows, mask=rows < m, other=0.0)[:, None]
        r = tl.load(rstd + rows, mask=rows < m, other=0.0)[:, None]
        value = tl.load(total + total_at, mask=inside, other=0.0).to(tl.float32)
        hat = (value - mu) * r  # in columns that are not there, g is 0
        g = tl.load(dy + dy_at, mask=inside, other=0.0).to(tl.float32)
        if has_handed:
            handed_at = rows[:, None] * handed_stride + columns[None, :]
            g += tl.load(handed + handed_at, mask=inside, other=0.0).to(tl.float32)
        if weight_gradient:
            dw += g * hat
        if bias_gradient:
            db += g
        if has_weight:
            g *= scale[None, :]
        along = tl.sum(g * hat, 1) / d
        g = (g - (tl.sum(g, 1) / d)[:, None] - hat * along[:, None]) * r
        if has_dtotal:
            dtotal_at = rows[:, None] * dtotal_stride + columns[None, :]
            g += tl.load(dtotal + dtotal_at, mask=inside, other=0.0).to(tl.float32)
        if has_residual:
            tl.store(dresidual + at, g.to(dresidual.dtype.element_ty), mask=inside)
        if has_dropout:
            keep = kept(seed, rows, 0, p, block_d)
            g = tl.where(keep, g * keep_scale, 0.0)
        if input_bias_gradient:
            dib += g  # r is 0 in rows that are not there
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    at = tl.program_id(0) * d + columns
    if weight_gradient:
        tl.store(dweight + at, tl.sum(dw, 0), mask=real)
    if bias_gradient:
        tl.store(dbias + at, tl.sum(db, 0), mask=real)
    if input_bias_gradient:
        tl.store(dinput_bias + at, tl.sum(dib, 0), mask=real)


def layer_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    seed: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The normalised rows and the sum, (..., D); mean and rstd, (M,).

    Without a residual the sum is x.
    """
    rows, stride = spaced_rows(x)
    residual_rows, residual_stride = spaced_rows(x if residual is None else residual)
    m, d, device = row_count(x), x.shape[-1], x.device
    total, dtype = x, torch.promote_types(x.dtype, residual_rows.dtype)
    if residual is not None:
        total = torch.empty(x.shape, dtype=dtype, device=device)
    if torch.is_autocast_enabled(device.type):  # under it layer_norm gives float32
        dtype = torch.float32
    y = torch.empty(x.shape, dtype=dtype, device=device)
    mean = torch.empty((m,), dtype=torch.float32, device=device)
    rstd = torch.empty_like(mean)
    block_m, block_d, num_warps = row_tile(d)
    with device_of(x):
        layer_norm_forward_kernel[(ceil_div(m, block_m),)](
            rows,
            residual_rows,
            rows if input_bias is None else input_bias.contiguous(),
            rstd if seed is None else seed,
            rows if weight is None else weight.contiguous(),
            rows if bias is None else bias.contiguous(),
            y,
            total,
            mean,
            rstd,
            m,
            d,
            stride,
            residual_stride,
            p,
            keep_scale(p),
            eps,
            has_residual=residual is not None,
            has_input_bias=input_bias is not None,
            has_dropout=seed is not None,
            has_weight=weight is not None,
            has_bias=bias is not None,
            block_m=block_m,
            block_d=block_d,
            num_warps=num_warps,
        )
    return y, total, mean, rstd


def layer_norm_backward(
    dy: Tensor,
    handed: Tensor | None,
    dtotal: Tensor | None,
    total: Tensor,
    seed: Tensor | None,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    p: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    sums: tuple[bool, bool, bool],
    sum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The gradients of x, residual and, as far as `sums` asks, the three vectors.

    Those are weight, bias and input_bias, added up in float32 and rounded to `sum_dtype`.
    `handed` is added to dy.
    """
    (rows, stride), (dy_rows, dy_stride) = spaced_rows(total), spaced_rows(dy)
    handed_rows, handed_stride = spaced_rows(dy if handed is None else handed)
    dtotal_rows, dtotal_stride = spaced_rows(dy if dtotal is None else dtotal)
    m, d, device = row_count(total), total.shape[-1], total.device
    block_m, block_d, num_warps = row_tile(d, 1024)
    programs = reducing_programs(total, ceil_div(m, block_m), num_warps)
    dx = torch.empty(total.shape, dtype=x_dtype, device=device)
    dresidual = dx
    apart = seed is not None or residual_dtype != x_dtype
    if residual_dtype is not None and apart:
        dresidual = torch.empty(total.shape, dtype=residual_dtype, device=device)
    wanted = [number for number, want in enumerate(sums) if want]
    parts = torch.empty((len(wanted), programs, d), dtype=torch.float32, device=device)
    each = dict(zip(wanted, parts.unbind(), strict=True))
    with device_of(total):
        layer_norm_backward_kernel[(programs,)](
            dy_rows,
            handed_rows,
            dtotal_rows,
            rows,
            rstd if seed is None else seed,
            rows if weight is None else weight.contiguous(),
            mean,
            rstd,
            dx,
            dresidual,
            *(each.get(number, rstd) for number in range(3)),
            m,
            d,
            dy_stride,
            handed_stride,
            dtotal_stride,
            stride,
            p,
            keep_scale(p),
            has_handed=handed is not None,
            has_dtotal=dtotal is not None,
            has_residual=residual_dtype is not None and apart,
            has_dropout=seed is not None,
            has_weight=weight is not None,
            weight_gradient=sums[0],
            bias_gradient=sums[1],
            input_bias_gradient=sums[2],
            block_m=block_m,
            block_d=block_d,
            stages=stages_of(block_m * block_d, dy, handed, dtotal, total),
            num_warps=num_warps,
        )
    if wanted:
        each = dict(zip(wanted, parts.sum(1).to(sum_dtype).unbind(), strict=True))
    return dx, dresidual, [each.get(number) for number in range(3)]


def norm_before(ctx: Any) -> Any:
    """The norm that gave the residual, if it can take the residual's gradient from here.

    It then adds it to the gradient that it reads, while autograd would add the two up
    in a separate pass. None if that would be visible: by a hook of the tensor between
    the two, `retain_grad`, or `torch.autograd.grad`, which does not run the nodes that
    write to parameters. None as well if `torch.compile` adds them up.
    """
    if torch.compiler.is_compiling():
        return None
    node, output = ctx.next_functions[1]
    residual = ctx.residual()
    if type(node) is not type(ctx) or output != 0 or node.handed is not None:
        return None
    if residual is None or residual._backward_hooks or residual.retains_grad:
        return None
    behind = (n for n, _ in ctx.next_functions[2:])
    leaf = next((n for n in behind if n is not None and not n.next_functions), None)
    try:
        will_run = torch._C._will_engine_execute_node
        return node if leaf is not None and will_run(leaf) and will_run(node) else None
    except RuntimeError:  # a parameter's gradient was asked for
        return None


class LayerNormFunction(torch.autograd.Function):
    """The normalised rows and the sum; without a residual, no sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        input_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        p: float,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Keeps the sum, each row's statistics and the seed."""
        seed = draw_seed(x) if p > 0 else None
        y, total, mean, rstd = layer_norm_forward(
            x, residual, input_bias, seed, weight, bias, eps, p
        )
        ctx.save_for_backward(total, seed, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.p = p
        ctx.dtypes = [
            None if t is None else t.dtype
            for t in (x, residual, input_bias, weight, bias)
        ]
        ctx.residual = None if residual is None else weakref.ref(residual)
        ctx.handed = None  # the gradient of y as a residual, by the norm that read it
        return y if residual is None else (y, total)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> Any:
        """Gradients of x, residual, input_bias, weight and bias."""
        total, seed, weight, mean, rstd = ctx.saved_tensors
        handed, ctx.handed = ctx.handed, None
        if dy is None:
            dy, handed = handed, None
        if dy is None and dtotal is None:
            return (None,) * 7
        x_dtype, residual_dtype, input_bias_dtype, *norm_dtypes = ctx.dtypes
        sums = tuple(ctx.needs_input_grad[i] for i in (3, 4, 2))
        kinds = zip(sums, (*norm_dtypes, input_bias_dtype), strict=True)
        alike = {dtype for want, dtype in kinds if want}
        dx, dresidual, (dweight, dbias, dinput_bias) = layer_norm_backward(
            torch.zeros_like(total) if dy is None else dy,
            handed,
            dtotal,
            total,
            seed,
            weight,
            mean,
            rstd,
            ctx.p,
            x_dtype,
            residual_dtype,
            sums,
            alike.pop() if len(alike) == 1 else torch.float32,
        )
        before = norm_before(ctx) if ctx.needs_input_grad[1] else None
        if before is not None:
            before.handed = dresidual
        gradients = (
            dx,
            None if residual_dtype is None or before is not None else dresidual,
            dinput_bias,
            dweight,
            dbias,
        )
        return (
            *(
                g if g is None or g.dtype == dtype else g.to(dtype)
                for g, dtype in zip(gradients, ctx.dtypes, strict=True)
            ),
            None,
            None,
        )


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> Tensor:
    """Brings each row to mean 0 and variance 1, then scales and shifts it.

    Shapes: x (..., D), weight and bias (D,) or None -> (..., D).
    Numerics: reassociated. Statistics in float32; the sums over rows in float32, in the
        same order at every run.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    plain = not isinstance(eps, Tensor) and runs_triton(x, weight, bias)
    if not (plain and one_each(weight, x) and one_each(bias, x)):
        return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y: Tensor = LayerNormFunction.apply(x, None, None, weight, bias, eps, 0.0)
    return y


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    norm: nn.Module | None = None,
    linear: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Normalises dropout(linear(x)) + residual as `layer_norm` does.

    Shapes: x (..., D') where a layer makes it (..., D), residual (..., D), weight and
        bias (D,) or None -> the normalised rows and the sum, (..., D) each.
    Numerics: reassociated; reseeded where something is dropped: dropout draws other
        numbers than `torch.nn.functional.dropout`, from the same generator, and stores
        no mask. Where the residual is what another norm gave, that one adds up its
        gradients, unless someone looks at their sum (`norm_before`).
    Source: Ba et al. 2016, arXiv:1607.06450; Salmon et al. 2011,
        doi:10.1145/2063384.2063405.

    Args:
        x: What is added to the residual.
        residual: The stream that runs past the layers.
        weight: The scale.
        bias: The shift.
        eps: Added to the variance.
        norm: The norm module with these three, if there is one. It is called if it has
            hooks or an adapter, like the next two.
        linear: The linear layer before dropout; the kernel adds its bias.
        dropout: The dropout module, or the dropout rate.
    """
    x, input_bias = product_and_bias(x, linear)
    vectors = (weight, bias, input_bias)
    plain = not isinstance(eps, Tensor) and runs_triton(x, residual, *vectors)
    p = drop_rate(dropout) if plain and runs_forward_alone(norm) else None
    alike = p is not None and x.shape == residual.shape
    if not (alike and all(one_each(each, x) for each in vectors)):
        x = x if input_bias is None else x + input_bias
        total = dropped(x, dropout) + residual
        if norm is not None:
            return norm(total), total
        y = nn.functional.layer_norm(total, total.shape[-1:], weight, bias, eps)
        return y, total
    y, total = LayerNormFunction.apply(x, residual, input_bias, weight, bias, eps, p)
    return y, total


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    norm: nn.Module | None = None,
    linear: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """The normalised rows of `residual_layer_norm`, where nothing else reads the sum."""
    normed, _ = residual_layer_norm(
        x,
        residual,
        weight,
        bias,
        eps,
        norm=norm,
        linear=linear,
        dropout=dropout,
    )
    return normed
