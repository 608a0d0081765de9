# Written by slapo-rewrite 0.2.0 for modeling_bert.py; rewrite.json says from what.
"""Kernels that the model uses, each with its reference in PyTorch.

Shapes: M rows, D features, F inner features.
"""

import re
import weakref
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


def row_tile(columns: int, elements: int = 2048) -> tuple[int, int, int]:
    """How many (whole) rows and columns a program holds at a time, and its warps.

    16 elements a thread are two loads of 16 bytes in half precision. A backward pass
    that sums over rows as well takes 1,024 elements or one row, 8 to 16 a thread. So
    compiled for A100, H200 and B200, threads have registers enough up to 8,192 columns.
    Measured on an H200: 79 to 93% of what its memory allows forwards.
    """
    block_d = block_size(columns)
    block_m = max(elements // block_d, 1)
    return block_m, block_d, min(max(block_m * block_d // 512, 4), 32)


def flat_tile(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Blocks of rows and of columns for work on single elements, and a block's sizes.

    16 elements for each of four warps' threads, as in `row_tile`. Measured on an
    H200: 78 to 100% of what its memory allows forwards.
    """
    block_d = min(block_size(columns), 1024)
    block_m = 2048 // block_d
    return ceil_div(rows, block_m), ceil_div(columns, block_d), block_m, block_d


def stages_of(block: int, *tensors: Tensor | None) -> int:
    """Two to load a block of each tensor while the block before is worked on, or one.

    Blocks wait in shared memory; one if they do not fit in 64 KiB, which every GPU has.
    """
    held = block * sum(t.element_size() for t in tensors if t is not None)
    return 2 if held <= 2**16 else 1


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


# Activation functions inside kernels, in float32, and the same in PyTorch.


def activation_reference(x: Tensor, kind: str) -> Tensor:
    """The activation in PyTorch's operations."""
    if kind == "relu":
        return nn.functional.relu(x)
    if kind == "silu":
        return nn.functional.silu(x)
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return nn.functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def activated(x: Tensor, kind: str, activation: nn.Module | None) -> Tensor:
    """The module's result; without one, the activation in PyTorch's operations."""
    y: Tensor = activation(x) if activation else activation_reference(x, kind)
    return y


@jit
def exponential(x):
    """exp(x), and 0 where it is below 2 ** -126: two instructions, where `tl.exp` has five."""
    return tl.exp2(x * 1.4426950408889634)


@jit
def reciprocal(x):
    """1 / x of positive numbers, within 4e-7 of it.

    Two instructions, where a division takes eight.
    """
    root = tl.rsqrt(x)
    return root * root


@jit
def normal_distribution(x):
    """The share of a standard normal distribution that is below x, and its density there.

    The density times a polynomial of 1 / (1 + 0.305 |x|), fitted to the share beyond |x|:
    within 1e-7 of it, and so of small shares as well, which 1 + erf loses.
    """
    power = exponential(-0.5 * x * x)
    t = reciprocal(1.0 + 0.305 * tl.abs(x))
    tail = 0.1857168972492218 + t * (-0.15298831462860107 + t * 0.036699190735816956)
    tail = 0.12102167308330536 + t * (-0.03797682747244835 + t * tail)
    tail = 0.12246681749820709 + t * (0.10342086851596832 + t * tail)
    tail = power * (t * (0.12163973599672318 + t * tail))
    return tl.where(x < 0.0, tail, 1.0 - tail), 0.3989422804014327 * power


@jit
def steepness(x, kind: tl.constexpr):
    """Activations that are x sigmoid(z): z by x, and its derivative."""
    if kind == "silu":
        return x, 1.0
    elif kind == "quick_gelu":
        return 1.702 * x, 1.702
    else:  # "gelu_tanh": (1 + tanh(z / 2)) / 2 is sigmoid(z); 1.5957... is 2 sqrt(2 / pi)
        square = x * x
        z = x * (1.5957691216057308 + 0.07135481627260025 * square)
        return z, 1.5957691216057308 + 0.21406444881780074 * square


@jit
def activate(x, kind: tl.constexpr):
    """The activation of a tile."""
    if kind == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif kind == "gelu":
        share, _ = normal_distribution(x)
        return x * share
    else:
        z, _ = steepness(x, kind)
        return x * reciprocal(1.0 + exponential(-z))


@jit
def activate_and_slope(x, kind: tl.constexpr):
    """The activation of a tile, and its derivative."""
    if kind == "relu":
        return tl.where(x < 0.0, 0.0, x), tl.where(x > 0.0, 1.0, 0.0)
    elif kind == "gelu":
        share, density = normal_distribution(x)
        return x * share, share + x * density
    else:
        z, dz = steepness(x, kind)
        # 1 - sigmoid(z) is the sigmoid times this power, and does not cancel so.
        power = exponential(tl.minimum(-z, 87.0))
        share = reciprocal(1.0 + power)
        y = x * share
        return y, share * (1.0 + y * power * dz)


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


# The bias of a linear layer, the activation after it, and dropout after that.


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


def linear_gelu(
    x: Tensor,
    linear: nn.Module,
    approximate: str = "none",
    *,
    activation: nn.Module | None = None,
) -> Tensor:
    """gelu(linear(x)), as `linear_activation`; `approximate` is as in `bias_gelu`."""
    return linear_activation(x, linear, gelu_kind(approximate), activation=activation)


# Layer normalisation, with the bias, dropout and residual addition before it.


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
