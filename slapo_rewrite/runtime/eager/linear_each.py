"""Several linear layers of one input.

Shapes: D features.
"""

from torch import Tensor, nn


def linear_each(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of several linear layers for one input.

    Shapes: x (..., D) -> (..., F) of each layer.
    """
    return tuple(layer(x) for layer in layers)
