"""Activation functions inside kernels, in float32, and the same in PyTorch.

Each function of `kind`: "relu", "silu", "gelu" (with the error function), "gelu_tanh" or
"quick_gelu" (x sigmoid(1.702 x), as CLIP has it).
"""

import torch
from torch import Tensor, nn

from .launch import constexpr, jit, tl


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
    """What the module gives; without one, the activation in PyTorch's operations."""
    y: Tensor = activation(x) if activation else activation_reference(x, kind)
    return y


@jit
def tanh_tile(x):
    """The hyperbolic tangent, to a few units in the last place everywhere."""
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    square = x * x
    # Where 1 - power would cancel: the series up to x ** 9.
    near = 0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488)
    near = x * (1.0 + square * (-0.3333333333333333 + square * near))
    return tl.where(square < 0.0625, near, tl.where(x < 0.0, -far, far))


@jit
def logistic(z):
    """1 / (1 + exp(-z)) and its derivative, without cancellation."""
    power = tl.exp(-tl.abs(z))
    total = 1.0 + power
    return tl.where(z >= 0.0, 1.0, power) / total, power / (total * total)


@jit
def activate(x, kind: constexpr):
    """The activation of a tile."""
    if kind == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif kind == "silu":
        return x * tl.sigmoid(x)
    elif kind == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif kind == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z); 1.5957... is 2 sqrt(2 / pi).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@jit
def activation_slope(x, kind: constexpr):
    """The activation's derivative, of a tile."""
    if kind == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    elif kind == "silu":
        share, slope = logistic(x)
        return share + x * slope
    elif kind == "quick_gelu":
        share, slope = logistic(1.702 * x)
        return share + 1.702 * x * slope
    elif kind == "gelu_tanh":
        share, slope = logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return share + x * slope * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
