"""What the kernels share: where they run, and how their work is divided.

Shapes: M rows, D features.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


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
