"""The forms of a function that rules call: the Triton kernel, and PyTorch operations."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

from slapo_rewrite.changes.imports import TRITON

OF_KERNELS, IN_TORCH = "slapo_rewrite.runtime.kernels.", "slapo_rewrite.runtime.eager."


@functools.cache
def in_torch(kernel: str) -> Callable[..., Any] | None:
    """The PyTorch form of a kernel, by the kernel's dotted name; None for a helper function."""
    home, _, name = kernel.removeprefix(OF_KERNELS).rpartition(".")
    if not kernel.startswith(OF_KERNELS):
        return None
    try:
        module = importlib.import_module(f"{IN_TORCH}{home}")
    except ModuleNotFoundError:
        return None
    found: Callable[..., Any] | None = vars(module).get(name)
    return found if getattr(found, "__module__", None) == module.__name__ else None


def kernel_function(kernel: str) -> Callable[..., Any]:
    """The kernel's function, by its dotted name."""
    home, _, name = kernel.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(home), name)
    return found


@functools.cache
def names_with(kernel: str, backend: str) -> frozenset[str]:
    """The names of a function and of those that it calls, in a file of the output."""
    found = kernel_function(kernel) if backend == TRITON else in_torch(kernel)
    return frozenset(_names(found))


def _names(function: Any) -> set[str]:
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    inner = [f for f in called if isinstance(f, types.FunctionType) and _has_both(f)]
    return {function.__name__}.union(*map(_names, inner))


def _has_both(function: types.FunctionType) -> bool:
    """Whether a function is a kernel with a PyTorch form, or such a form."""
    home = function.__module__.replace(IN_TORCH, OF_KERNELS)
    return in_torch(f"{home}.{function.__name__}") is not None
