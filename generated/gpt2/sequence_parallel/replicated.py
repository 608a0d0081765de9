# Written by slapo-rewrite 0.2.0 for modeling_gpt2.py; rewrite.json says from what.
"""Layers that every rank has whole, and runs on its own part of the input.

A rank's gradient of the parameters is a summand of the true one: they are summed over
the ranks. Shapes: B batch, T' this rank's tokens, D features.
"""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import layer_norm

from .shards import Shard
from .tensor_parallel import all_reduce_gradient


def with_summed_gradient(parameter: Tensor | None) -> Tensor | None:
    """The parameter, whose gradient is summed over the ranks; None where there is none."""
    return None if parameter is None else all_reduce_gradient(parameter)


class OnParts:
    """A layer that works on a rank's part; none of its parameters is divided."""

    sharded_parameters: ClassVar[dict[str, Shard]] = {}


class ReplicatedLayerNorm(OnParts, nn.LayerNorm):
    """A layer norm of a rank's own part: (B, T', D) -> (B, T', D)."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the last axes, as `nn.LayerNorm` does."""
        weight = with_summed_gradient(self.weight)
        bias = with_summed_gradient(self.bias)
        return layer_norm(input, self.normalized_shape, weight, bias, self.eps)
