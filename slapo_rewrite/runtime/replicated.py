"""Layers that every rank has whole, and runs on its own part of the input.

A rank's gradient of the parameters is a summand of the true one: they are summed over
the ranks. Shapes: B batch, T' this rank's tokens, D features.
"""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm, linear, rms_norm

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


class ReplicatedRMSNorm(OnParts, nn.RMSNorm):
    """A root mean square norm of a rank's own part: (B, T', D) -> (B, T', D)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axes, as `nn.RMSNorm` does."""
        weight = with_summed_gradient(self.weight)
        return rms_norm(x, self.normalized_shape, weight, self.eps)


class ReplicatedLinear(OnParts, nn.Linear):
    """A linear layer on a rank's own part: (B, T', D) -> (B, T', F)."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps D features to F, as `nn.Linear` does."""
        bias = with_summed_gradient(self.bias)
        return linear(input, all_reduce_gradient(self.weight), bias)


class ReplicatedEmbedding(OnParts, nn.Embedding):
    """A table that a rank looks its own ids up in: (B, T') -> (B, T', D)."""

    def forward(self, input: Tensor) -> Tensor:
        """Looks up ids, as `nn.Embedding` does."""
        return embedding(
            input,
            all_reduce_gradient(self.weight),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
