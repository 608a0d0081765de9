"""The bias of a linear layer and the GELU after it.

Shapes: M rows, F features.
Source: Hendrycks & Gimpel 2016, arXiv:1606.08415.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .activations import activate, activation_reference, activation_slope
from .launch import (
    constexpr,
    device_of,
    flat_tile,
    jit,
    reducing_programs,
    rows_of,
    runs_triton,
    tl,
)


def bias_gelu_reference(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """`bias_gelu` in PyTorch's operations."""
    return activation_reference(x if bias is None else x + bias, kind)


@jit
def bias_gelu_forward_kernel(
    x,
    bias,
    y,
    m,
    f,
    column_blocks,
    x_stride,
    kind: constexpr,
    has_bias: constexpr,
    block_m: constexpr,
    block_f: constexpr,
):
    """Writes y (M, F)."""
    block, across = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = (block * block_m + tl.arange(0, block_m)).to(tl.int64)
    columns = across * block_f + tl.arange(0, block_f)
    inside = (rows < m)[:, None] & (columns < f)[None, :]
    x_at = rows[:, None] * x_stride + columns[None, :]
    value = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        value += tl.load(bias + columns, mask=columns < f).to(tl.float32)[None, :]
    at = rows[:, None] * f + columns[None, :]
    tl.store(y + at, activate(value, kind).to(y.dtype.element_ty), mask=inside)


@jit
def bias_gelu_backward_kernel(
    dy,
    x,
    bias,
    dx,
    dbias,
    m,
    f,
    dy_stride,
    x_stride,
    kind: constexpr,
    has_bias: constexpr,
    bias_gradient: constexpr,
    block_m: constexpr,
    block_f: constexpr,
):
    """Writes dx (M, F), and each program's part of dbias, (programs, F)."""
    columns = tl.program_id(0) * block_f + tl.arange(0, block_f)
    if has_bias:
        added = tl.load(bias + columns, mask=columns < f, other=0.0).to(tl.float32)
    db = tl.zeros((block_m, block_f), tl.float32)
    step = tl.num_programs(1) * block_m
    for start in range(tl.program_id(1) * block_m, m, step):
        rows = (start + tl.arange(0, block_m)).to(tl.int64)
        inside = (rows < m)[:, None] & (columns < f)[None, :]
        x_at = rows[:, None] * x_stride + columns[None, :]
        dy_at = rows[:, None] * dy_stride + columns[None, :]
        value = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            value += added[None, :]
        g = tl.load(dy + dy_at, mask=inside, other=0.0).to(tl.float32)
        g *= activation_slope(value, kind)
        if bias_gradient:
            db += g
        at = rows[:, None] * f + columns[None, :]
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    if bias_gradient:
        at = tl.program_id(1) * f + columns
        tl.store(dbias + at, tl.sum(db, 0), mask=columns < f)


def bias_gelu_forward(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The activated rows, (..., F)."""
    rows = rows_of(x)
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    m, f = rows.shape
    row_blocks, column_blocks, block_m, block_f = flat_tile(m, f)
    with device_of(x):
        bias_gelu_forward_kernel[(row_blocks * column_blocks,)](
            rows,
            rows if bias is None else bias.contiguous(),
            y,
            m,
            f,
            column_blocks,
            rows.stride(0),
            kind=kind,
            has_bias=bias is not None,
            block_m=block_m,
            block_f=block_f,
        )
    return y


def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, bias_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x, (..., F), and of the bias, (F,)."""
    rows, dy_rows = rows_of(x), rows_of(dy)
    m, f = rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    row_blocks, column_blocks, block_m, block_f = flat_tile(m, f)
    programs = reducing_programs(x, row_blocks, column_blocks)
    dbias = torch.empty((programs, f), dtype=torch.float32, device=x.device)
    with device_of(x):
        bias_gelu_backward_kernel[(column_blocks, programs)](
            dy_rows,
            rows,
            rows if bias is None else bias.contiguous(),
            dx,
            dbias,
            m,
            f,
            dy_rows.stride(0),
            rows.stride(0),
            kind=kind,
            has_bias=bias is not None,
            bias_gradient=bias_gradient,
            block_m=block_m,
            block_f=block_f,
        )
    if bias is None or not bias_gradient:
        return dx, None
    return dx, dbias.sum(0).to(bias.dtype)


class BiasGELUFunction(torch.autograd.Function):
    """gelu(x + bias), differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        """Keeps x and the bias, and not their sum."""
        ctx.save_for_backward(x, bias)
        ctx.kind = kind
        return bias_gelu_forward(x, bias, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Gradients of x and bias."""
        x, bias = ctx.saved_tensors
        bias_gradient = bias is not None and ctx.needs_input_grad[1]
        return *bias_gelu_backward(dy, x, bias, ctx.kind, bias_gradient), None


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """gelu(x + bias).

    Shapes: x (..., F), bias (F,) or None -> (..., F).
    Numerics: reassociated; float32 inside, rounded once. The bias's gradient is summed
        in float32, in the same order at every run.
    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415.

    Args:
        x: The linear layer's output before its bias.
        bias: Its bias.
        approximate: "none" for the error function, "tanh" for what GPT-2 calls
            `gelu_new`, as in `torch.nn.functional.gelu`.
    """
    kind = "gelu_tanh" if approximate == "tanh" else "gelu"
    if not runs_triton(x, bias):
        return bias_gelu_reference(x, bias, kind)
    y: Tensor = BiasGELUFunction.apply(x, bias, kind)
    return y
