# Written by slapo-rewrite 0.2.0 for modeling_opt.py; rewrite.json says from what.
"""Kernels that the model uses, each with its reference in PyTorch.

Shapes: M rows, D features.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# What the kernels share: where they run, and how their work is divided.


try:
    import triton
    import triton.language as tl
except ImportError:  # the PyTorch references run
    triton, tl = None, SimpleNamespace(constexpr=None)

# Whether kernels are interpreted is fixed when they are defined.
interpreted = triton is not None and bool(triton.knobs.runtime.interpret)


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, or the unchanged function without Triton."""
    return kernel if triton is None else triton.jit(kernel)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `backward` refuse to compute gradients that are differentiated again.

    Torch's `once_differentiable` refuses late, or never: if the incoming gradient is a
    constant, like a loss's, or `torch.autograd.grad` does not reach it.
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.compiler.is_compiling():
            return once(ctx, *gradients)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "what a kernel's backward pass gives has no gradient of its own, as "
                'create_graph=True wants it: fuse by backend="eager" in the schedule, '
                "which writes PyTorch's operations"
            )
        return backward(ctx, *gradients)  # gradients are off, and the host spared

    return refusing


@jit
def float32(number):
    """A number in float32, since `torch.compile` hands Python's over in float64."""
    return tl.cast(number, tl.float32)


def runs_triton(*tensors: Tensor | None) -> bool:
    """Whether kernels take these tensors; else the PyTorch reference does.

    They take plain floating-point tensors of up to 32 bits on one GPU, or anywhere under
    Triton's interpreter, and no transform of `torch.func` around them.
    """
    if triton is None or torch._C._are_functorch_transforms_active():
        return False
    device = None
    for x in tensors:
        if x is None:
            continue
        if not (
            type(x) in (Tensor, nn.Parameter)
            and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and (x.is_cuda or interpreted)
            and device in (None, x.device)
            and x.shape[-1:] not in ((), (0,))
        ):
            return False
        device = x.device
    return True


def one_each(vector: Tensor | None, x: Tensor) -> bool:
    """Whether a weight or bias has one number per feature, as kernels read it."""
    return vector is None or vector.shape == x.shape[-1:]


def linear_bias(x: Tensor, bias: Tensor | None) -> Tensor | None:
    """The bias of the linear layer that gave x, cast as autocast casts it there."""
    mixed = bias is not None and bias.dtype != x.dtype and not x.is_meta
    if bias is not None and mixed and torch.is_autocast_enabled(x.device.type):
        return bias.to(x.dtype)
    return bias


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which kernels start on the device of `x`."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def neighbouring(x: Tensor) -> Tensor:
    """The tensor, copied if elements of its last axis are not next to one another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_of(x: Tensor) -> Tensor:
    """(..., D) as (M, D) with neighbouring columns, copied only if necessary."""
    return neighbouring(neighbouring(x).reshape(-1, x.shape[-1]))


def spaced_rows(x: Tensor) -> tuple[Tensor, int]:
    """A tensor with the rows of x for a kernel to read, and their stride.

    It is x itself if x is contiguous, which saves the host from making a view.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = rows_of(x)
    return rows, rows.stride(0)


def row_count(x: Tensor) -> int:
    """How many rows x (..., D) has."""
    return x.numel() // x.shape[-1]


def ceil_div(size: int, block: int) -> int:
    """How many blocks cover `size`. Triton's own stops `torch.compile`'s tracing."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def block_size(size: int) -> int:
    """The power of two, at least 16, that holds `size` elements."""
    return max(power_of_two(size), 16)


def flat_tile(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Blocks of rows and of columns for work on single elements, and a block's sizes.

    16 elements for each of four warps' threads, as in `row_tile`. Measured on an
    H200: 78 to 100% of what its memory allows forwards.
    """
    block_d = min(block_size(columns), 1024)
    block_m = 2048 // block_d
    return ceil_div(rows, block_m), ceil_div(columns, block_d), block_m, block_d


def multiprocessors(x: Tensor) -> int:
    """How many multiprocessors the GPU of `x` has; one if kernels are interpreted."""
    if not x.is_cuda:
        return 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def reducing_programs(
    x: Tensor, blocks: int, num_warps: int = 4, column_blocks: int = 1
) -> int:
    """How many programs share `blocks` blocks of rows and keep a partial sum each.

    16 warps on each multiprocessor of the GPU, over all blocks of columns: as compiled,
    no more than run at a time, and as many as keep its memory busy while the rows to
    come are loaded. Measured on an H200: of 1,024 columns a norm forwards and backwards
    reaches 53% of what its memory allows, of 2,048 it reaches 74 to 85%.
    """
    programs = max(16 // num_warps, 1) * multiprocessors(x) // column_blocks
    return min(blocks, max(programs, 1))


# Random numbers that the backward pass draws again, so that no mask is stored.


def draw_seed(x: Tensor) -> Tensor:
    """A seed from the generator of x's device, left there: (1,), int64.

    Restoring the generator's state, as recomputation does, draws it again.
    """
    return torch.randint(2**63 - 1, (1,), device=x.device)


def keep_scale(p: float) -> float:
    """The factor of kept elements, which preserves the mean."""
    return 1 / (1 - p) if p < 1 else 0.0


@jit
def kept(seed, rows, first, p, block_d: tl.constexpr):
    """Which elements dropout keeps, each with probability 1 - p.

    Of these rows, `block_d` columns from `first` on, a multiple of four. A pure function
    of the seed and of an element's row and column. Philox gives four numbers at once;
    seven rounds pass the BigCrush tests (Salmon et al. 2011).
    """
    groups = (first // 4 + tl.arange(0, block_d // 4))[None, :]
    row = rows.to(tl.int32)[:, None] + tl.zeros_like(groups)
    column = tl.zeros_like(row) + groups
    zero = tl.zeros_like(row)
    a, b, c, d = tl.philox(tl.load(seed), row, column, zero, zero, 7)
    bits = tl.interleave(tl.interleave(a, b), tl.interleave(c, d))
    # At most the largest float below 2 ** 32: what is kept at p = 1 is scaled by 0.
    return bits >= tl.minimum(float32(p) * 4294967296.0, 4294967040.0).to(tl.uint32)


# Modules whose parameters kernels use, and when they are called instead.


# Layers besides `torch.nn.Linear` whose call is a product and a bias.
LINEAR = re.compile(r"(Conv1D|(Column|Row)Parallel(Linear|Conv1D))\.forward")


def is_plain(layer: nn.Module) -> bool:
    """Whether a call of a layer does nothing but `torch.nn.functional.linear`."""
    return type(layer).forward is nn.Linear.forward and runs_forward_alone(layer)


def runs_forward_alone(module: nn.Module | None) -> bool:
    """Whether a call runs the `forward` of the module's class and nothing else.

    Modules that kernels replace have no submodules: one that has is an adapter around
    one, or has a parametrization. None, for no module, does no more either.
    """
    if module is None:
        return True
    if "forward" in module.__dict__ or module._modules:
        return False
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    return not any((*hooks, module._backward_pre_hooks, module._backward_hooks))


def product_and_bias(x: Tensor, layer: Any) -> tuple[Tensor, Tensor | None]:
    """A linear layer's output without its bias, and the bias, for a kernel to add.

    Shapes: x (..., D) -> (..., F) and (F,).

    Args:
        x: The input.
        layer: The layer; None if x is its output already.

    Returns:
        The product and the bias; the whole output and None if the layer was called.
    """
    if layer is None:
        return x, None
    if not (runs_triton(x) and adds_a_bias(layer)):
        return layer(x), None
    if "enter" in layer.__dict__:  # split over its outputs
        x = layer.enter(x)
    multiply = nn.functional.linear if isinstance(layer, nn.Linear) else torch.matmul
    y, bias = multiply(x, layer.weight), layer.bias
    if "reduce" in layer.__dict__:  # split over its inputs
        y, bias = layer.reduce(y, bias)
    return y, linear_bias(y, bias)


def adds_a_bias(layer: nn.Module) -> bool:
    """Whether a call of a layer is a product, to which a bias is added last."""
    known = type(layer).forward is nn.Linear.forward or LINEAR.fullmatch(
        forward_of(layer)
    )
    gathers = layer.__dict__.get("output_shard") is not None
    return bool(known) and not gathers and runs_forward_alone(layer)


def forward_of(layer: nn.Module) -> str:
    """The class and name of a layer's `forward`, as `Conv1D.forward`; "" if not a function.

    It is read from its code object, which `torch.compile` supports.
    """
    code = getattr(type(layer).forward, "__code__", None)
    return "" if code is None else code.co_qualname


def drop_rate(dropout: nn.Module | float) -> float | None:
    """The dropout rate; None if a module has to be called for it."""
    if not isinstance(dropout, nn.Module):
        return dropout
    if not (isinstance(dropout, nn.Dropout) and runs_forward_alone(dropout)):
        return None
    return dropout.p if dropout.training else 0.0


def dropped(x: Tensor, dropout: nn.Module | float) -> Tensor:
    """Dropout in PyTorch's operations: by the module, or with a rate."""
    if isinstance(dropout, nn.Module):
        return dropout(x)  # type: ignore[no-any-return]
    return nn.functional.dropout(x, dropout) if dropout else x


# The bias of a linear layer, dropout after it, and the residual addition.


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


# Several linear layers of one input, whose gradient is added up inside the products.


class LinearEachFunction(torch.autograd.Function):
    """The layers' outputs, from one input and each layer's weight and bias in turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        """Keeps the input and the weights."""
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        pairs = zip(weights, biases, strict=True)
        return tuple(nn.functional.linear(x, weight, bias) for weight, bias in pairs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Gradients of the input, and of each weight and bias."""
        x, *weights = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dx: Tensor | None = None
        found: list[Tensor | None] = []
        wanted = zip(
            ctx.needs_input_grad[1::2], ctx.needs_input_grad[2::2], strict=True
        )
        for dy, weight, (of_weight, of_bias) in zip(
            gradients, weights, wanted, strict=True
        ):
            if dy is None:
                found += [None, None]
                continue
            dy = rows_of(dy)
            if ctx.needs_input_grad[0]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            found.append(dy.t() @ rows if of_weight else None)
            found.append(dy.sum(0) if of_bias else None)
        return None if dx is None else dx.view(x.shape), *found


def linear_each(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of several linear layers for one input.

    Shapes: x (..., D) -> (..., F) of each layer.
    Numerics: reassociated. Backwards each product adds to the input's gradient of those
        before it, while autograd would add them up in separate passes.
    Source: `FusedDense` of github.com/Dao-AILab/flash-attention.

    Args:
        x: The input.
        layers: The layers. They are called one by one if one of them does more than
            `torch.nn.Linear` or has hooks, or if autocast is on.
    """
    plain = [layer for layer in layers if is_plain(layer)]
    parameters: list[Any] = [p for a in plain for p in (a.weight, a.bias)]
    dtypes = {t.dtype for t in (x, *parameters) if t is not None}
    alike = len(plain) == len(layers) and len(dtypes) == 1
    if not (alike and runs_triton(x, *parameters)) or torch.is_autocast_enabled(
        x.device.type
    ):
        return tuple(layer(x) for layer in layers)
    outputs: tuple[Tensor, ...] = LinearEachFunction.apply(x, *parameters)
    return outputs
