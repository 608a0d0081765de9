"""Activation functions inside kernels, in float32, and the same in PyTorch.

Each function of `kind`: "relu", "silu", "gelu" (with the error function), "gelu_tanh" or
"quick_gelu" (x sigmoid(1.702 x), as in CLIP).
"""

import torch
from torch import Tensor, nn

from .launch import jit, tl


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
def tanh_tile(x):
    """The hyperbolic tangent, within 1e-6 of it."""
    power = exponential(-2.0 * tl.abs(x))
    far = (1.0 - power) * reciprocal(1.0 + power)
    square = x * x
    # Where 1 - power would cancel: the series up to x ** 9.
    near = 0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488)
    near = x * (1.0 + square * (-0.3333333333333333 + square * near))
    return tl.where(square < 0.0625, near, tl.where(x < 0.0, -far, far))


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
