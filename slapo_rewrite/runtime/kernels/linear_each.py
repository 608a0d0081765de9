"""Several linear layers of one input, whose gradient is added up inside the products.

Shapes: M rows, D features.
Source: `FusedDense` of github.com/Dao-AILab/flash-attention, whose product adds the
residual's gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .launch import differentiable_once, rows_of, runs_triton
from .plain import is_plain


class LinearEachFunction(torch.autograd.Function):
    """The layers' outputs, from one input and each layer's weight and bias in turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        """Keeps the input and the weights."""
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        pairs = zip(weights, biases, strict=True)
        return tuple(nn.functional.linear(x, weight, bias) for weight, bias in pairs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Gradients of the input, and of each weight and bias."""
        x, *weights = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dx: Tensor | None = None
        found: list[Tensor | None] = []
        wanted = zip(
            ctx.needs_input_grad[1::2], ctx.needs_input_grad[2::2], strict=True
        )
        for dy, weight, (of_weight, of_bias) in zip(
            gradients, weights, wanted, strict=True
        ):
            if dy is None:
                found += [None, None]
                continue
            dy = rows_of(dy)
            if ctx.needs_input_grad[0]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            found.append(dy.t() @ rows if of_weight else None)
            found.append(dy.sum(0) if of_bias else None)
        return None if dx is None else dx.view(x.shape), *found


def linear_each(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of several linear layers for one input.

    Shapes: x (..., D) -> (..., F) of each layer.
    Numerics: reassociated. Backwards each product adds to the input's gradient of those
        before it, while autograd would add them up in separate passes.
    Source: `FusedDense` of github.com/Dao-AILab/flash-attention.

    Args:
        x: The input.
        layers: The layers. They are called one by one if one of them does more than
            `torch.nn.Linear` or has hooks, or if autocast is on.
    """
    plain = [layer for layer in layers if is_plain(layer)]
    parameters: list[Any] = [p for a in plain for p in (a.weight, a.bias)]
    dtypes = {t.dtype for t in (x, *parameters) if t is not None}
    alike = len(plain) == len(layers) and len(dtypes) == 1
    if not (alike and runs_triton(x, *parameters)) or torch.is_autocast_enabled(
        x.device.type
    ):
        return tuple(layer(x) for layer in layers)
    outputs: tuple[Tensor, ...] = LinearEachFunction.apply(x, *parameters)
    return outputs
