"""Modules whose parameters kernels use, and when they are called instead.

A hook, a parametrization, its own `forward`, or an adapter that is put around a module
later makes it do more: it is then called as usual. So is each one if no kernel runs.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from .launch import linear_bias, runs_triton

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


def linear_product(x: Tensor, layer: Any) -> Tensor:
    """A linear layer's output without its bias, which the next operation adds.

    Shapes: x (..., D) -> (..., F).
    Numerics: exact; if the layer does more than multiply and add, it is called, and its
        bias is subtracted.

    Args:
        x: The input.
        layer: A `torch.nn.Linear`, or `Conv1D` of transformers.
    """
    if is_plain(layer):
        return nn.functional.linear(x, layer.weight)
    if forward_of(layer) == "Conv1D.forward" and runs_forward_alone(layer):
        return torch.matmul(x, layer.weight)
    y: Tensor = layer(x)
    return y if layer.bias is None else y - layer.bias.to(y.dtype)


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
