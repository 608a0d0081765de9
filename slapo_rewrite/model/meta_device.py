"""Runs models on the meta device, without memory or weights, where torch needs help."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, ClassVar

import torch
import torch._refs.nn.functional as _functional_refs
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

_MAKING = {
    torch.tensor, torch.as_tensor, torch.rand, torch.randn, torch.zeros, torch.ones, torch.full,
    torch.empty,
}  # fmt: skip

# The attribute in which torch caches a function wrapped to be skipped by torch.compile's tracer.
_TOLD = "__dynamo_disable"

# The size of the cache of results: some hundred bytes each.
MOST_KNOWN = 2**15

# A context in which function modes do not see operations on tensors.
unwatched = torch._C.DisableTorchFunction

# Operations that return a bool for a tensor's values, and how often one place may call them in a
# run: for each layer and expert, for example.
QUESTIONS = (torch.Tensor.__bool__, torch.Tensor.__contains__)
MOST_ASKED = 20_000
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def with_values(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call that makes a tensor. Scalars are made on CPU, with a value.

    `forward` may branch on its value: `torch.rand([])` decides which layers are dropped at random.
    """
    if func in _MAKING:
        first = args[0] if args else kwargs.get("size", kwargs.get("data"))
        plain = isinstance(first, (bool, int, float)) and func in (torch.tensor, torch.as_tensor)
        if plain or (isinstance(first, (list, tuple)) and not first and func is not torch.tensor):
            return {**kwargs, "device": "cpu"}
    return kwargs


class Answers:
    """Answers for operations that read values of meta tensors, in one run."""

    def __init__(self) -> None:
        self._asked = Counter[tuple[CodeType, int]]()  # counts, by place in a function's code

    def to(self, func: Callable[..., Any], args: Any, says: bool = False) -> Any:
        """The answer to an operation that reads values; None for other operations.

        `says` is the boolean answer for a tensor without values. A random scalar is 0.99, so that
        a rare case such as `torch.rand([]) < 0.1` is not taken.

        Raises:
            RuntimeError: A loop waits for a value and does not end.
        """
        if func in QUESTIONS:
            if not isinstance(args[0], torch.Tensor) or not args[0].is_meta:
                return None
            frame = _asking()
            self._asked[key := (frame.f_code, frame.f_lasti)] += 1
            if self._asked[key] > MOST_ASKED:
                raise RuntimeError(f"`{frame.f_code.co_name}` loops until a value says otherwise")
            return says
        if func == _IS_META and _asking().f_globals is vars(nn.init):
            return False  # `nn.init` skips meta tensors
        if func is torch.rand and (not args or args[0] in ((), [])):
            return torch.full([], 0.99, device="cpu")
        return None


def _asking() -> FrameType:
    """The frame that calls the operation which a function mode is handling."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    assert frame is not None and frame.f_back is not None
    return frame.f_back


def carry_out(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the meta device.

    There the grouped matrix product, which computes experts, supports bfloat16 only.
    """
    first = args[0] if args else None
    if (
        getattr(func, "__name__", "") not in ("grouped_mm", "_grouped_mm")
        or not isinstance(first, torch.Tensor)
        or not first.is_meta
        or first.dtype == torch.bfloat16
    ):
        return func(*args, **kwargs)
    factors = [t.bfloat16() for t in args[:2]]
    return func(*factors, *args[2:], **kwargs).to(first.dtype)


# Operations that return a new tensor and have no side effects.
_PURE = frozenset({
    "add", "sub", "rsub", "mul", "div", "pow", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "cos",
    "sin", "mean", "sum", "softmax", "log_softmax", "sigmoid", "tanh", "relu", "silu", "gelu",
    "dropout", "layer_norm", "rms_norm", "group_norm", "linear", "matmul", "bmm", "conv1d",
    "conv2d", "embedding", "cat", "stack", "where", "masked_fill", "cumsum", "diff", "eq", "ne",
    "lt", "le", "gt", "ge", "all", "any", "min", "max", "clamp", "tril", "triu", "argmax",
    "cross_entropy", "scaled_dot_product_attention", "addmm", "baddbmm", "einsum", "gather",
    "index_select", "__and__", "__or__", "__invert__", "logical_not", "logical_and", "full_like",
    "zeros_like", "ones_like", "square", "reciprocal", "minimum", "maximum", "norm", "var",
})  # fmt: skip
# Those of them that may draw random numbers.
_DRAWING = {"dropout", "scaled_dot_product_attention"}
# Operations that return a view or a copy of a tensor.
_VIEWS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten",
    "contiguous", "float", "t",
}  # fmt: skip
_BACKWARD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def gives_alone(name: str) -> bool:
    """Whether a function or tensor method of torch has no side effects and is not random."""
    return name in _VIEWS or (name in _PURE and name not in _DRAWING)


class NeedsGraph(BaseException):
    """A model runs a backward pass inside its `forward`, which needs a real autograd graph."""


class KnownResults:
    """Caches the results of operations on the meta device, which take up to milliseconds each.

    Torch computes most of them in Python. A cached result is used for the same operation on tensors
    of the same shapes: it is a new tensor, which passes no gradient back. Results do not depend on
    the model, so all runs of a process share the cache.
    """

    _known: ClassVar[dict[Hashable, tuple[Any, ...]]] = {}

    def __init__(self) -> None:
        self.is_used = True

    def carry_out(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operation as `carry_out` does; raises `NeedsGraph` for a backward pass."""
        if not self.is_used:
            return carry_out(func, args, kwargs)
        if func in _BACKWARD:
            raise NeedsGraph
        is_torchs = (getattr(func, "__module__", None) or "torch").startswith("torch")
        is_pure = getattr(func, "__name__", "") in _PURE and is_torchs and "out" not in kwargs
        if not is_pure or _in_transforms():
            return carry_out(func, args, kwargs)
        given: list[torch.Tensor] = []
        try:
            with unwatched():  # hides these operations from the modes below
                key = (func, _settings(), _key(args, given), _key(kwargs, given))
                if (known := self._known.get(key)) is not None:
                    trained = [t for t in given if t.requires_grad] if known[-1] else []
                    about = known[:-1]
                    return _Known.apply(*trained[:1], *about) if trained else _empty(*about)
                versions = [t._version for t in given]
        except TypeError:
            return carry_out(func, args, kwargs)
        output = carry_out(func, args, kwargs)
        with unwatched():
            if (
                type(output) is torch.Tensor
                and output.is_meta
                and not output._is_view()
                and all(output is not t for t in given)
                and versions == [t._version for t in given]
                and (not output.requires_grad or any(t.requires_grad for t in given))
            ):
                about = (output.shape, output.stride(), output.dtype, output.requires_grad)
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[key] = about
        return output


class _Known(torch.autograd.Function):
    """Makes a cached result require a gradient, as the operation's own result would."""

    apply = vars(torch.autograd.Function)["apply"]  # also while autograd functions are patched

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, *about: Any) -> torch.Tensor:
        return _empty(*about)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NeedsGraph


def _empty(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _settings() -> Hashable:
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.get_default_dtype(), *autocast


def _in_transforms() -> bool:
    functions: Any = torch._C
    return bool(functions._are_functorch_transforms_active())


def _key(value: Any, given: list[torch.Tensor]) -> Hashable:
    """The cache key of an argument, or `TypeError` without one; adds its tensors to `given`."""
    if type(value) in (torch.Tensor, nn.Parameter):
        if not value.is_meta:
            raise TypeError
        given.append(value)
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *[_key(item, given) for item in value]
    if isinstance(value, dict):
        return *value, *[_key(item, given) for item in value.values()]
    if isinstance(value, int) and not isinstance(value, bool):
        return int, int(value)
    if value is None or isinstance(value, (bool, float, str, torch.dtype, torch.device)):
        return type(value), value
    raise TypeError


class KnownOperators:
    """Caches the results of torch's own operators on the meta device, below autograd.

    A cached result is a new tensor of the same shape. Views, operators that change their arguments,
    and those that return memory of their arguments are run each time.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[bool, list[tuple[Any, ...] | None]]] = {}

    def carry_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operator."""
        if func.is_view or func._schema.is_mutable or func.namespace != "aten":
            return func(*args, **kwargs)
        given: list[torch.Tensor] = []
        try:
            with unwatched():
                key = (func, torch.get_default_dtype(), _key(args, given), _key(kwargs, given))
                if (known := self._known.get(key)) is not None:
                    is_one, made = known
                    results = [_empty(*each) if each else None for each in made]
                    return results[0] if is_one else tuple(results)
        except TypeError:
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        is_one = isinstance(output, torch.Tensor)
        given_back = (output,) if is_one else output
        own = {tensor.untyped_storage()._cdata for tensor in given}
        if isinstance(given_back, tuple) and all(_is_made(each, own) for each in given_back):
            self._known[key] = (
                is_one,
                [
                    None if each is None else (each.shape, each.stride(), each.dtype)
                    for each in given_back
                ],
            )
        return output


def _is_made(value: Any, others: set[int]) -> bool:
    """Whether a tensor has a storage of its own, exactly as large as it needs; or is None."""
    if value is None:
        return True
    if type(value) is not torch.Tensor or not value.is_meta:
        return False
    storage = value.untyped_storage()
    is_own = storage._cdata not in others
    others.add(storage._cdata)
    return (
        is_own
        and storage.nbytes()
        == _empty(value.shape, value.stride(), value.dtype).untyped_storage().nbytes()
    )


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Runs torch's reference implementations without importing torch.compile's tracer.

    Their first call imports it in order to wrap them as not to be traced, which takes half a second
    or more. The wrapped function is cached as an attribute of each; the function itself serves as
    well as long as nothing is compiled.
    """
    told = []
    if "torch._dynamo" not in sys.modules:
        told = [function for function in _untraced() if not hasattr(function, _TOLD)]
    for function in told:
        setattr(function, _TOLD, function)
    try:
        yield
    finally:
        for function in told:
            delattr(function, _TOLD)


@functools.cache
def _untraced() -> list[Any]:
    """The reference implementations that torch wraps by `torch._disable_dynamo`."""
    wrapper = _disable_dynamo(lambda: None).__code__
    found = dict[Any, None]()  # some have several names
    for value in [*vars(torch._refs).values(), *vars(_functional_refs).values()]:
        # All of torch's wrappers name the wrapped function `fn`; `__wrapped__` may skip some.
        while isinstance(value, FunctionType) and "fn" in value.__code__.co_freevars:
            is_told = value.__code__ is wrapper
            value = inspect.getclosurevars(value).nonlocals["fn"]
            if is_told:
                found[value] = None
    return list(found)


@contextlib.contextmanager
def pretend_world(world: int) -> Iterator[None]:
    """A fake process group of `world` ranks, in which this process is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shown = sys.excepthook  # each group adds the rank to error messages, once more
    # Torch draws numbers for collectives from `random`, which `forward` may use as well.
    numbering: Any = sys.modules.get("torch.distributed._meta_registrations")
    if hasattr(numbering, "random"):
        numbering.random = random.Random()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if hasattr(numbering, "random"):
            numbering.random = random
        sys.excepthook = shown
