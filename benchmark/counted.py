"""Counts the bytes that a training step reads and writes, without running it.

A step runs on fake tensors: shapes and no values. Every operator that reaches the dispatcher is one
call, and moves the bytes of its input and output tensors, each once. Views move none. Operations
that use other operators on a GPU than on a CPU are counted as on a GPU: dropout, the softmax that
widens, and scaled dot product attention, which counts as flash attention (queries, keys, values,
result and one number per row, but not the scores).

For a Triton kernel, tensors count as read if its compiled code loads from them, and as written if
it stores to them (`memory_use`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark.compiled import Launch, caught

MULTIPROCESSORS = 132  # of an H100 or H200

ADDING_PRODUCTS = {"addmm", "baddbmm"}  # a bias, or another product's result
PRODUCTS = {"mm", "bmm"} | ADDING_PRODUCTS
ATTENTION = "_scaled_dot_product_"

# Operators that give a view without saying so, or that make what nothing has been written to.
_FREE = {"_unsafe_view", "_reshape_alias", "empty", "empty_like", "new_empty", "empty_strided"}
# In place, and the old values do not matter.
_OVERWRITING = {"copy_", "fill_", "zero_", "bernoulli_", "random_", "normal_", "uniform_"}
# Of an operand only as many elements are read as there are in the result.
_PICKING = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}
# Operands that only give a shape.
_UNREAD = {"nll_loss_backward": (1,), "zeros_like": (0,), "ones_like": (0,), "full_like": (0,)}


@dataclass(frozen=True)
class Call:
    """One operator.

    Attributes:
        operator: Its name, or the kernel's.
        module: The class in whose `forward` it stands, or whose operator it goes back through.
        backward: Whether it runs in the backward pass.
        bytes: Read and written.
        addend: Of these, what a matrix product adds its result to.
    """

    operator: str
    module: str
    backward: bool
    bytes: int
    addend: int = 0

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product, or adds one to what is there."""
        return self.operator.removesuffix("_") in PRODUCTS


def size(x: Tensor) -> int:
    """Bytes of a tensor; what is repeated along an axis is one."""
    count = 1
    for length, stride in zip(x.shape, x.stride(), strict=True):
        count *= length if stride or not length else 1
    return count * x.element_size()


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an operator's arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [x for item in value for x in tensors(item)]
    return []


def moved(function: Any, arguments: Sequence[Any], results: Any) -> int | None:
    """Bytes that an operator reads and writes; None where it only looks at memory anew."""
    name = function._schema.name.removeprefix("aten::")
    aliases = [r.alias_info for r in function._schema.returns]
    if name in _FREE or function.namespace == "prim" or not tensors(results):
        return None
    if all(a is not None and not a.is_write for a in aliases):
        return None
    unread = _UNREAD.get(name, ())
    read = [x for i, a in enumerate(arguments) if i not in unread for x in tensors(a)]
    written = tensors(results)
    if name.startswith("new_"):
        read = []
    if name in _OVERWRITING:
        read = read[1:]
    if name in _PICKING:
        rows = size(written[0])
        read_bytes = min(size(read[0]), rows) + sum(map(size, read[1:]))
    else:
        read_bytes = sum({place(x): size(x) for x in read}.values())
    return read_bytes + sum({place(x): size(x) for x in written}.values())


def place(x: Tensor) -> tuple[Any, ...]:
    """A key that identifies a piece of memory."""
    return (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), tuple(x.stride()))


class Counter(TorchDispatchMode):
    """Counts every operator, and every kernel that is launched.

    Attributes:
        calls: What moved memory, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._modules: list[str] = []
        self._owners: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        given = [*args, *(x for name, x in kwargs.items() if name != "out")]  # not read
        bytes_ = moved(func, given, results)
        if bytes_ is not None:
            name = func._schema.name.removeprefix("aten::")
            adds = name.removesuffix("_") in ADDING_PRODUCTS
            self.add(name, bytes_, size(args[0]) if adds else 0)
        return results

    def add(self, operator: str, bytes_: int, addend: int = 0) -> None:
        """Counts a call where the step now is."""
        node = torch._C._current_autograd_node()
        if node is None:
            module = self._modules[-1] if self._modules else ""
            # The operator's own node, made before it; what has none finds the one before's.
            self._owners.setdefault(torch._C._autograd._get_sequence_nr() - 1, module)
        else:
            module = self._owners.get(node._sequence_nr(), "")
        self.calls.append(Call(operator, module, node is not None, bytes_, addend))

    def launched(self, launch: Launch) -> None:
        """Counts a launch of a Triton kernel."""
        self.add(launch.name, sum(launch_bytes(launch)))

    @contextmanager
    def inside_modules(self) -> Iterator[None]:
        """Inside, it is known whose `forward` runs."""

        def enter(module: nn.Module, arguments: Any) -> None:
            self._modules.append(type(module).__name__)

        def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
            self._modules.pop()

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class AsOnGPU(TorchFunctionMode):
    """Sends functions to the operators that a GPU runs for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand_in = _ON_GPU.get(func)
        return (stand_in or func)(*args, **(kwargs or {}))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, training)[0] if training and p else x


def _softmax(x: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    widens = dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    if dtype is not None and not widens:
        x = x.to(dtype)
    return torch._softmax(x, dim, widens)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


_ON_GPU: dict[Any, Callable[..., Any]] = {
    nn.functional.dropout: _dropout,
    nn.functional.softmax: _softmax,
    nn.functional.scaled_dot_product_attention: _attention,
}


# Kernels.


def launch_bytes(launch: Launch) -> tuple[int, int]:
    """Bytes that a launch reads and those that it writes, a tensor given twice counting once."""
    arguments = launch.arguments
    read, written = (
        sum({place(arguments[name]): size(arguments[name]) for name in names}.values())
        for names in memory_use(launch)
    )
    return read, written


def memory_use(launch: Launch) -> tuple[set[str], set[str]]:
    """The parameters that a kernel loads from, and those that it stores to.

    Read off its intermediate code, compiled for these arguments: what a constant argument turns off
    is not in it.
    """
    kinds = (
        v.dtype if isinstance(v, Tensor) else type(v) if k not in launch.constants else v
        for k, v in launch.arguments.items()
    )
    key = (launch.kernel, *kinds)
    if key not in _MEMORY_USE:
        _MEMORY_USE[key] = used_pointers(launch.compiled().asm["ttir"])
    return _MEMORY_USE[key]


_MEMORY_USE: dict[Any, tuple[set[str], set[str]]] = {}


def used_pointers(code: str) -> tuple[set[str], set[str]]:
    """The function's parameters that are loaded from and stored to, of Triton's code."""
    roots: dict[str, set[str]] = {}
    for name in re.findall(r"%(\w+): !tt\.ptr<", code.partition("{")[0] + code):
        roots.setdefault(name, {name})
    reads: set[str] = set()
    writes: set[str] = set()
    for line in code.splitlines():
        if not (found := re.match(r"\s*(?:%(\w+)(?::\d+)? = )?(tt\.\w+) (.*)", line)):
            continue
        result, operator, rest = found.groups()
        operands = re.findall(r"%(\w+)", rest)
        known = set().union(*(roots.get(o, set()) for o in operands[:1]))
        if operator == "tt.load":
            reads |= known
        elif operator == "tt.store":
            writes |= known
        elif result and known:
            roots[result] = known
    return reads, writes


@contextmanager
def kernels_counted(counter: Counter, module: ModuleType | None) -> Iterator[None]:
    """Inside, a module's kernels run for every tensor, and their launches are counted.

    Args:
        counter: What counts them.
        module: An output's `kernels.py`; None where it has none.
    """
    if module is None:
        yield
        return
    with caught([module], counter.launched, MULTIPROCESSORS):
        yield


def count(
    build: Callable[[], nn.Module],
    inputs: Callable[[], dict[str, Tensor]],
    kernels: ModuleType | None = None,
) -> list[Call]:
    """The calls of a training step: the forward pass with a loss, and the backward pass.

    Args:
        build: Makes the model.
        inputs: Makes its arguments.
        kernels: The Triton kernels that it calls.
    """
    counter = Counter()
    # It looks at positions' values to see whether several texts are packed into one sequence.
    packed = "transformers.masking_utils.find_packed_sequence_indices"
    with FakeTensorMode(), mock.patch(packed, lambda position_ids: None):
        model, arguments = build(), inputs()
        with AsOnGPU(), kernels_counted(counter, kernels), counter.inside_modules(), counter:
            model(**arguments).loss.backward()
    return counter.calls
