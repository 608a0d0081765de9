"""The bias of a linear layer, the activation after it, and dropout after that.

Shapes: M rows, F inner features.
Source: Hendrycks & Gimpel 2016, arXiv:1606.08415.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .activations import activate, activate_and_slope, activated
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
from .plain import drop_rate, dropped, product_and_bias, runs_forward_alone


@jit
def bias_activation_forward_kernel(
    x,
    bias,
    seed,
    y,
    m,
    f,
    column_blocks,
    x_stride,
    p,
    keep_scale,
    kind: tl.constexpr,
    has_bias: tl.constexpr,
    has_dropout: tl.constexpr,
    block_m: tl.constexpr,
    block_f: tl.constexpr,
):
    """Writes y (M, F)."""
    keep_scale = float32(keep_scale)
    block, across = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = (block * block_m + tl.arange(0, block_m)).to(tl.int64)
    columns = across * block_f + tl.arange(0, block_f)
    inside = (rows < m)[:, None] & (columns < f)[None, :]
    x_at = rows[:, None] * x_stride + columns[None, :]
    value = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        value += tl.load(bias + columns, mask=columns < f).to(tl.float32)[None, :]
    out = activate(value, kind)
    if has_dropout:
        keep = kept(seed, rows, across * block_f, p, block_f)
        out = tl.where(keep, out * keep_scale, 0.0)
    at = rows[:, None] * f + columns[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@jit
def bias_activation_backward_kernel(
    dy,
    x,
    bias,
    seed,
    dx,
    dbias,
    m,
    f,
    dy_stride,
    x_stride,
    p,
    keep_scale,
    kind: tl.constexpr,
    has_bias: tl.constexpr,
    has_dropout: tl.constexpr,
    bias_gradient: tl.constexpr,
    block_m: tl.constexpr,
    block_f: tl.constexpr,
):
    """Writes dx (M, F), and each program's part of dbias, (programs, F)."""
    keep_scale = float32(keep_scale)
    columns = tl.program_id(0) * block_f + tl.arange(0, block_f)
    if has_bias:
        added = tl.load(bias + columns, mask=columns < f, other=0.0).to(tl.float32)
    db = tl.zeros((block_m, block_f), tl.float32)
    step = tl.num_programs(1) * block_m
    for start in tl.range(tl.program_id(1) * block_m, m, step, num_stages=2):
        rows = (start + tl.arange(0, block_m)).to(tl.int64)
        inside = (rows < m)[:, None] & (columns < f)[None, :]
        x_at = rows[:, None] * x_stride + columns[None, :]
        dy_at = rows[:, None] * dy_stride + columns[None, :]
        value = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            value += added[None, :]
        g = tl.load(dy + dy_at, mask=inside, other=0.0).to(tl.float32)
        if has_dropout:
            keep = kept(seed, rows, tl.program_id(0) * block_f, p, block_f)
            g = tl.where(keep, g * keep_scale, 0.0)
        _, slope = activate_and_slope(value, kind)
        g *= slope
        if bias_gradient:
            db += g
        at = rows[:, None] * f + columns[None, :]
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    if bias_gradient:
        at = tl.program_id(1) * f + columns
        tl.store(dbias + at, tl.sum(db, 0), mask=columns < f)


def bias_activation_forward(
    x: Tensor, bias: Tensor | None, seed: Tensor | None, kind: str, p: float
) -> Tensor:
    """The activated rows, (..., F)."""
    rows, stride = spaced_rows(x)
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    m, f = row_count(x), x.shape[-1]
    row_blocks, column_blocks, block_m, block_f = flat_tile(m, f)
    with device_of(x):
        bias_activation_forward_kernel[(row_blocks * column_blocks,)](
            rows,
            rows if bias is None else bias.contiguous(),
            rows if seed is None else seed,
            y,
            m,
            f,
            column_blocks,
            stride,
            p,
            keep_scale(p),
            kind=kind,
            has_bias=bias is not None,
            has_dropout=seed is not None,
            block_m=block_m,
            block_f=block_f,
        )
    return y


def bias_activation_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    kind: str,
    p: float,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x, (..., F), and of the bias, (F,)."""
    (rows, stride), (dy_rows, dy_stride) = spaced_rows(x), spaced_rows(dy)
    m, f = row_count(x), x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    row_blocks, column_blocks, block_m, block_f = flat_tile(m, f)
    programs = reducing_programs(x, row_blocks, column_blocks=column_blocks)
    dbias = torch.empty((programs, f), dtype=torch.float32, device=x.device)
    with device_of(x):
        bias_activation_backward_kernel[(column_blocks, programs)](
            dy_rows,
            rows,
            rows if bias is None else bias.contiguous(),
            rows if seed is None else seed,
            dx,
            dbias,
            m,
            f,
            dy_stride,
            stride,
            p,
            keep_scale(p),
            kind=kind,
            has_bias=bias is not None,
            has_dropout=seed is not None,
            bias_gradient=bias_gradient,
            block_m=block_m,
            block_f=block_f,
        )
    if bias is None or not bias_gradient:
        return dx, None
    return dx, dbias.sum(0).to(bias.dtype)


class BiasActivationFunction(torch.autograd.Function):
    """dropout(activation(x + bias)), differentiable."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, kind: str, p: float
    ) -> Tensor:
        """Keeps x, the bias and the seed, and not the sum."""
        seed = draw_seed(x) if p > 0 else None
        ctx.save_for_backward(x, bias, seed)
        ctx.kind, ctx.p = kind, p
        return bias_activation_forward(x, bias, seed, kind, p)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Gradients of x and bias."""
        x, bias, seed = ctx.saved_tensors
        bias_gradient = bias is not None and ctx.needs_input_grad[1]
        dx, dbias = bias_activation_backward(
            dy, x, bias, seed, ctx.kind, ctx.p, bias_gradient
        )
        return dx, dbias, None, None


def bias_activation(
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(activation(x + bias)).

    Shapes: x (..., F), bias (F,) or None -> (..., F).
    Numerics: reassociated; float32 inside, rounded once. A sigmoid or the normal
        distribution is within 1e-6 of itself between -4 and 4, and within 1e-5 farther
        out. The bias's gradient is summed in float32, in the same order at every run.
        Reseeded where something is dropped: dropout draws other numbers than
        `torch.nn.functional.dropout`, from the same generator, and stores no mask.
    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415; Salmon et al. 2011,
        doi:10.1145/2063384.2063405.

    Args:
        x: What the bias is added to.
        bias: The bias.
        kind: "relu", "silu", "gelu", "gelu_tanh" or "quick_gelu".
        activation: The module of that kind, if there is one; called if it has hooks.
        dropout: The dropout module, called likewise; or the dropout rate.
    """
    p = drop_rate(dropout) if runs_triton(x, bias) else None
    if p is None or not (runs_forward_alone(activation) and one_each(bias, x)):
        x = x if bias is None else x + bias
        return dropped(activated(x, kind, activation), dropout)
    y: Tensor = BiasActivationFunction.apply(x, bias, kind, p)
    return y


def linear_activation(
    x: Tensor,
    linear: nn.Module,
    kind: str,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(activation(linear(x))); the rest is as in `bias_activation`.

    The layer is called if it has hooks or an adapter.
    """
    y, bias = product_and_bias(x, linear)
    return bias_activation(y, bias, kind, activation=activation, dropout=dropout)


def gelu_kind(approximate: str) -> str:
    """What `torch.nn.functional.gelu` calls "none" or "tanh", as a kind of activation."""
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def bias_gelu(
    x: Tensor,
    bias: Tensor | None,
    approximate: str = "none",
    *,
    activation: nn.Module | None = None,
) -> Tensor:
    """gelu(x + bias), as `bias_activation`.

    Args:
        x: What the bias is added to.
        bias: The bias.
        approximate: "none" for the error function, "tanh" for what GPT-2 calls
            `gelu_new`, as in `torch.nn.functional.gelu`.
        activation: As in `bias_activation`.
    """
    return bias_activation(x, bias, gelu_kind(approximate), activation=activation)


def linear_gelu(
    x: Tensor,
    linear: nn.Module,
    approximate: str = "none",
    *,
    activation: nn.Module | None = None,
) -> Tensor:
    """gelu(linear(x)), as `linear_activation`; `approximate` is as in `bias_gelu`."""
    return linear_activation(x, linear, gelu_kind(approximate), activation=activation)


def activation_dropout(
    x: Tensor,
    kind: str,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(activation(x)), as `bias_activation`."""
    return bias_activation(x, None, kind, activation=activation, dropout=dropout)


def quick_gelu(x: Tensor, *, activation: nn.Module | None = None) -> Tensor:
    """X sigmoid(1.702 x), as `bias_activation`."""
    return bias_activation(x, None, "quick_gelu", activation=activation)
