"""Gated linear units without their matrix products: activation(gate) * up, dropped out.

Shapes: M rows, F inner features.
Source: Shazeer 2020, arXiv:2002.05202.
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
    row_count,
    runs_triton,
    spaced_rows,
    tl,
)
from .plain import drop_rate, dropped, runs_forward_alone


@jit
def gated_forward_kernel(
    gate,
    up,
    seed,
    y,
    m,
    f,
    column_blocks,
    gate_stride,
    up_stride,
    p,
    keep_scale,
    kind: tl.constexpr,
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
    gate_at = rows[:, None] * gate_stride + columns[None, :]
    up_at = rows[:, None] * up_stride + columns[None, :]
    g = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + up_at, mask=inside, other=0.0).to(tl.float32)
    out = activate(g, kind) * u
    if has_dropout:
        keep = kept(seed, rows, across * block_f, p, block_f)
        out = tl.where(keep, out * keep_scale, 0.0)
    at = rows[:, None] * f + columns[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@jit
def gated_backward_kernel(
    dy,
    gate,
    up,
    seed,
    dgate,
    dup,
    m,
    f,
    column_blocks,
    dy_stride,
    gate_stride,
    up_stride,
    p,
    keep_scale,
    kind: tl.constexpr,
    has_dropout: tl.constexpr,
    block_m: tl.constexpr,
    block_f: tl.constexpr,
):
    """Writes dgate and dup (M, F)."""
    keep_scale = float32(keep_scale)
    block, across = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = (block * block_m + tl.arange(0, block_m)).to(tl.int64)
    columns = across * block_f + tl.arange(0, block_f)
    inside = (rows < m)[:, None] & (columns < f)[None, :]
    dy_at = rows[:, None] * dy_stride + columns[None, :]
    gate_at = rows[:, None] * gate_stride + columns[None, :]
    up_at = rows[:, None] * up_stride + columns[None, :]
    d = tl.load(dy + dy_at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + up_at, mask=inside, other=0.0).to(tl.float32)
    if has_dropout:
        keep = kept(seed, rows, across * block_f, p, block_f)
        d = tl.where(keep, d * keep_scale, 0.0)
    at = rows[:, None] * f + columns[None, :]
    y, slope = activate_and_slope(g, kind)
    tl.store(dgate + at, (d * u * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (d * y).to(dup.dtype.element_ty), mask=inside)


def gated_forward(
    gate: Tensor, up: Tensor, seed: Tensor | None, kind: str, p: float
) -> Tensor:
    """The gated rows, (..., F)."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    y = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    (gate_rows, gate_stride), (up_rows, up_stride) = spaced_rows(gate), spaced_rows(up)
    m, f = row_count(gate), gate.shape[-1]
    row_blocks, column_blocks, block_m, block_f = flat_tile(m, f)
    with device_of(gate):
        gated_forward_kernel[(row_blocks * column_blocks,)](
            gate_rows,
            up_rows,
            gate_rows if seed is None else seed,
            y,
            m,
            f,
            column_blocks,
            gate_stride,
            up_stride,
            p,
            keep_scale(p),
            kind=kind,
            has_dropout=seed is not None,
            block_m=block_m,
            block_f=block_f,
        )
    return y


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, seed: Tensor | None, kind: str, p: float
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, (..., F) each."""
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    dy_rows, dy_stride = spaced_rows(dy)
    (gate_rows, gate_stride), (up_rows, up_stride) = spaced_rows(gate), spaced_rows(up)
    m, f = row_count(gate), gate.shape[-1]
    row_blocks, column_blocks, block_m, block_f = flat_tile(m, f)
    with device_of(gate):
        gated_backward_kernel[(row_blocks * column_blocks,)](
            dy_rows,
            gate_rows,
            up_rows,
            gate_rows if seed is None else seed,
            dgate,
            dup,
            m,
            f,
            column_blocks,
            dy_stride,
            gate_stride,
            up_stride,
            p,
            keep_scale(p),
            kind=kind,
            has_dropout=seed is not None,
            block_m=block_m,
            block_f=block_f,
        )
    return dgate, dup


class GatedFunction(torch.autograd.Function):
    """dropout(activation(gate) * up), differentiable."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str, p: float) -> Tensor:
        """Keeps gate, up and the seed, and no activation."""
        seed = draw_seed(gate) if p > 0 else None
        ctx.save_for_backward(gate, up, seed)
        ctx.kind, ctx.p = kind, p
        return gated_forward(gate, up, seed, kind, p)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Gradients of gate and up."""
        gate, up, seed = ctx.saved_tensors
        return *gated_backward(dy, gate, up, seed, ctx.kind, ctx.p), None, None


def gated(
    gate: Tensor,
    up: Tensor,
    kind: str,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(activation(gate) * up).

    Shapes: gate and up (..., F), also two halves of one tensor -> (..., F).
    Numerics: reassociated; float32 inside, rounded once. Reseeded where something is
        dropped: dropout draws other numbers than `torch.nn.functional.dropout`, from the
        same generator, and stores no mask.
    Source: Shazeer 2020, arXiv:2002.05202.

    Args:
        gate: The operand of the activation.
        up: The factor of the activated gate.
        kind: "relu", "silu", "gelu", "gelu_tanh" or "quick_gelu".
        activation: The module of that kind, if there is one; called if it has hooks.
        dropout: The dropout module, called likewise; or the dropout rate.
    """
    p = drop_rate(dropout) if runs_triton(gate, up) else None
    if p is None or not (runs_forward_alone(activation) and gate.shape == up.shape):
        return dropped(activated(gate, kind, activation) * up, dropout)
    y: Tensor = GatedFunction.apply(gate, up, kind, p)
    return y


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(silu(gate) * up), as `gated`."""
    return gated(gate, up, "silu", activation=activation, dropout=dropout)


def reglu(
    gate: Tensor,
    up: Tensor,
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(relu(gate) * up), as `gated`."""
    return gated(gate, up, "relu", activation=activation, dropout=dropout)


def geglu(
    gate: Tensor,
    up: Tensor,
    approximate: str = "none",
    *,
    activation: nn.Module | None = None,
    dropout: nn.Module | float = 0.0,
) -> Tensor:
    """dropout(gelu(gate) * up), as `gated`; `approximate` is as torch's `gelu` takes it."""
    kind = "gelu_tanh" if approximate == "tanh" else "gelu"
    return gated(gate, up, kind, activation=activation, dropout=dropout)
