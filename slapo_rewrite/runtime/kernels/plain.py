"""Layers of which kernels take the parameters, and what makes them be called after all.

A hook, a parametrization, a `forward` of its own, or an adapter put around a layer later
makes it do more: it is called then, as ever.
"""

from typing import Any

import torch
from torch import Tensor, nn


def is_plain(layer: nn.Module) -> bool:
    """Whether a call of a layer does nothing but `torch.nn.functional.linear`."""
    return type(layer).forward is nn.Linear.forward and runs_forward_alone(layer)


def runs_forward_alone(layer: nn.Module) -> bool:
    """Whether a call runs the `forward` of the layer's class and nothing else.

    A layer with parameters for kernels holds no other module: what does is an adapter
    around one, or has a parametrization.
    """
    if "forward" in layer.__dict__ or layer._modules:
        return False
    hooks = (layer._forward_pre_hooks, layer._forward_hooks)
    return not any((*hooks, layer._backward_pre_hooks, layer._backward_hooks))


def linear_product(x: Tensor, layer: Any) -> Tensor:
    """What a linear layer gives without its bias, which what follows adds.

    Shapes: x (..., D) -> (..., F).
    Numerics: exact; where the layer does more than multiply and add, it is called, and
        its bias is taken off.

    Args:
        x: The input.
        layer: A `torch.nn.Linear`, or `Conv1D` of transformers.
    """
    if is_plain(layer):
        return nn.functional.linear(x, layer.weight)
    named = type(layer).forward.__qualname__ == "Conv1D.forward"
    if named and runs_forward_alone(layer):
        return torch.matmul(x, layer.weight)
    y: Tensor = layer(x)
    return y if layer.bias is None else y - layer.bias.to(y.dtype)
