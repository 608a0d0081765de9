"""Compiles every kernel for an H100/H200, which needs no GPU.

    python -m tests.runtime.kernels.compile

The public functions run on fake tensors, forwards and backwards, and every launch is compiled
instead. That finds what the interpreter lets through, and a value that is read back from the
device: a fake tensor has none. Prints a line for each launch.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmark.compiled import TYPES, Launch, caught, kernel_modules, resources
from tests.runtime.kernels import picked

FOLDER = "slapo_rewrite.runtime.kernels"


def calls(dtype: torch.dtype, d: int = 1024, v: int = 32000) -> dict[str, Callable[[Any], Any]]:
    """A call of every public function, with the options that change its kernels.

    Args:
        dtype: Of the tensors.
        d: Columns.
        v: Classes.
    """

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    def labels(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def rows() -> Tensor:
        return make(64, d)

    layers = [nn.Linear(32, 64, dtype=dtype) for _ in range(2)]
    layer = nn.Linear(d, d, dtype=dtype)
    cos, sin = torch.zeros(2, 1, 32, 64, dtype=dtype)
    keep = torch.zeros(2, 1, 1, d, dtype=torch.bool)
    return {
        "rms_norm": lambda f: f(rows(), make(d), offset=1.0, cast="output"),
        "residual_rms_norm": lambda f: f(rows(), rows(), make(d)),
        "residual_rms_norm dropout": lambda f: f(rows(), rows(), make(d), dropout=0.1),
        "layer_norm": lambda f: f(rows(), make(d), make(d)),
        "residual_layer_norm": lambda f: f(
            rows(), rows(), make(d), make(d), linear=layer, dropout=0.1
        ),
        "add_layer_norm": lambda f: f(rows(), rows(), make(d), make(d), dropout=0.1),
        "dropout_residual": lambda f: f(rows(), rows(), linear=layer, dropout=0.1),
        "gated": lambda f: f(rows(), rows(), "quick_gelu", dropout=0.1),
        "swiglu": lambda f: f(rows(), rows()),
        "reglu": lambda f: f(rows(), rows()),
        "geglu": lambda f: f(rows(), rows()),
        "geglu tanh": lambda f: f(rows(), rows(), "tanh"),
        "bias_activation": lambda f: f(rows(), None, "relu", dropout=0.1),
        "activation_dropout": lambda f: f(rows(), "relu", dropout=0.1),
        "quick_gelu": lambda f: f(rows()),
        "linear_activation": lambda f: f(rows(), layer, "silu", dropout=0.1),
        "linear_gelu": lambda f: f(rows(), layer),
        "bias_gelu": lambda f: f(rows(), make(d)),
        "bias_gelu tanh": lambda f: f(rows(), None, "tanh"),
        "rotary": lambda f: f(make(2, 8, 32, 80), make(2, 2, 32, 80), cos, sin),
        "cross_entropy": lambda f: f(make(64, v), labels(64), label_smoothing=0.1, softcap=30.0),
        "linear_each": lambda f: f(make(64, 32), *layers),
        "linear_cross_entropy": lambda f: f(make(64, 32), make(v, 32), labels(64)),
        "masked_softmax": lambda f: f(make(2, 4, 32, d), make(2, 1, 32, d), 0.3),
        "masked_softmax keep": lambda f: f(make(2, 4, 32, d), None, 0.3, keep),
    }


def compile_all(dtype: torch.dtype, only: str = "") -> list[str]:
    """Names of the kernels compiled, in order.

    Args:
        dtype: Of the tensors.
        only: One of the calls; all without it.
    """
    launched: list[str] = []

    def compile_one(launch: Launch) -> None:
        compiled = launch.compiled()
        assert re.search(r"ld\.global|cp\.async", compiled.asm["ptx"])
        assert not resources(compiled.asm["cubin"])["STACK"], f"{launch.name} lacks registers"
        launched.append(launch.name)

    with caught(kernel_modules(), compile_one), FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Triton 3.9: its default will change
        for name, call in calls(dtype).items():
            if only in ("", name):
                outputs = call(public(name))
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    return launched


def public(name: str) -> Callable[..., Any]:
    """The public function that a call is of."""
    function = name.split()[0]
    return getattr(importlib.import_module(f"{FOLDER}.{picked.PUBLIC[function]}"), function)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    for dtype in TYPES:
        if dtype.is_floating_point:
            print(dtype, *compile_all(dtype), sep="\n  ")
