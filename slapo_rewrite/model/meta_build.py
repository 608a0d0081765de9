"""Builds models on the meta device, without memory, but with the values of small constants.

Also imported in processes that may not import the rest of this package, so it imports torch and the
standard library only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Functions that fill a tensor with random numbers. On the meta device torch's implementations have
# no effect, and take a third of the time of a model's construction.
_FILLS = frozenset({
    nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_, nn.init.xavier_uniform_, nn.init.xavier_normal_,
    torch.Tensor.uniform_, torch.Tensor.normal_,
})  # fmt: skip
# Functions whose result depends on their arguments alone.
_CONSTANTS = frozenset({
    torch.linspace, torch.logspace, torch.arange, torch.tensor, torch.as_tensor, torch.zeros,
    torch.ones, torch.full, torch.eye,
})  # fmt: skip
# Functions that read a tensor's values.
READS = frozenset({
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__",
    "__int__", "__index__", "__contains__", "__array__",
})  # fmt: skip
MOST_VALUES = 1024  # the largest constant that a constructor may read


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Builds tensors on the meta device in the context: they have shapes but no memory.

    Random initialisation is skipped. A constructor may read constants that it makes, such as the
    rates of stochastic depth: `[x.item() for x in torch.linspace(0, rate, depth)]`.
    """
    with torch.device("meta"), _OnMeta():
        yield


def _staying(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of an operation without values: a move to another device stays on meta.

    For example `torch.linalg.qr(torch.randn(n, n).cpu())`, or `self.to(device)` of a whole module.
    """
    if func is Tensor.cpu:
        return args[0]
    if func is Tensor.to:
        args, kwargs = tuple(map(_here, args)), {name: _here(v) for name, v in kwargs.items()}
    return func(*args, **kwargs)


def _here(value: Any) -> Any:
    return "meta" if isinstance(value, (str, torch.device)) else value


class _OnMeta(TorchFunctionMode):
    """Skips random initialisation, and records the values of small constants."""

    def __init__(self) -> None:
        super().__init__()
        # The constants by `id`, each with its values and the difference between the two versions:
        # if an in-place operation changes only one of the two, the values are out of date.
        self._known: dict[int, tuple[Tensor, Tensor, int]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS:
            # Some functions of `nn.init` pass their tensor on by keyword.
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                self._forget(filled)
                return filled
        if func not in _CONSTANTS and not self._takes_constants(args, kwargs):
            is_without = func in (Tensor.to, Tensor.cpu) and args[0].is_meta
            return _staying(func, args, kwargs) if is_without else func(*args, **kwargs)
        values = self._values_of(func, args, kwargs)
        if getattr(func, "__name__", "") in READS and values is not None:
            return values
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:  # not on the meta device: `to_sparse`
            if not isinstance(values, Tensor):
                raise
            result = values.to("meta")
        self._note(result, values)
        return result

    def _takes_constants(self, args: Any, kwargs: Any) -> bool:
        """Whether any argument, or element of a list argument, is a known constant."""
        return bool(self._known) and any(
            id(given) in self._known
            or (isinstance(given, (list, tuple)) and any(id(each) in self._known for each in given))
            for given in (*args, *kwargs.values())
        )

    def _values_of(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of an operation on the values of its arguments; None if some are not known."""
        try:
            given, named = self._as_values(args), self._as_values(kwargs)
            if func in _CONSTANTS:
                return func(*given, **{**named, "device": "cpu"})
            before = torch.get_rng_state()
            values = func(*given, **named)
        except Exception:  # the operation on the meta device raises the error
            return None
        if torch.equal(torch.get_rng_state(), before):
            return values
        torch.set_rng_state(before)
        for tensor in args:
            self._forget(tensor)  # it may have been filled with random numbers
        return None

    def _as_values(self, value: Any) -> Any:
        """Replaces constants by their values; raises `KeyError` for a tensor without values."""
        if isinstance(value, Tensor):
            tensor, values, ahead = self._known[id(value)]
            if tensor._version - values._version != ahead:
                raise KeyError
            return values
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._as_values, value))
        if isinstance(value, dict):
            return {name: self._as_values(item) for name, item in value.items()}
        return value

    def _note(self, result: Any, values: Any) -> None:
        if isinstance(result, Tensor) and isinstance(values, Tensor):
            is_small = values.numel() <= MOST_VALUES and values.shape == result.shape
            if is_small and result.is_meta and not values.is_meta:
                ahead = result._version - values._version
                self._known[id(result)] = (result, values, ahead)
        elif isinstance(result, (list, tuple)) and isinstance(values, (list, tuple)):
            for one, other in zip(result, values, strict=False):
                self._note(one, other)

    def _forget(self, tensor: object) -> None:
        """Forgets the values of a tensor that gets random numbers, and zeroes their views."""
        if (known := self._known.pop(id(tensor), None)) is not None:
            known[1].zero_()
