"""Tensor-parallel multi-head attention: each rank computes some of the heads.

Shapes: B batch, T queries, S keys, E embedding, H heads, D of a head. A prime (H') marks
what this rank has. Without a batch its axis is left out; `batch_first` says where it is.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .guards import check_parts
from .packed_axes import Packed
from .shards import rank
from .tensor_parallel import (
    Reduction,
    all_gather,
    all_reduce,
    all_reduce_gradient,
    shard_parameter,
    sum_now,
    unchanged,
)


class ParallelMultiheadAttention(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` split over its heads, with its parameters and arguments.

    Args:
        embed_dim: E.
        num_heads: H, of the whole layer, as the attribute of that name is.
        args: The further arguments of the torch class.
        reduce_input_gradient: Sum the inputs' gradients over the ranks. False where
            they are summed once for several layers.
        reduce: How the ranks' partial outputs are summed.
        kwargs: The further keyword arguments of the torch class.

    Raises:
        ValueError: The heads do not divide over the ranks, or keys or values have sizes
            of their own or added elements.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        reduce_input_gradient: bool = True,
        reduce: Reduction = sum_now,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        if self.in_proj_weight is None or self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                "`kdim`, `vdim`, `add_bias_kv` and `add_zero_attn` are not split over "
                "heads: leave this attention whole"
            )
        names = ["in_proj_weight", "in_proj_bias"]
        for name in names[: 1 if self.in_proj_bias is None else 2]:
            shard_parameter(self, name, 0, parts=Packed(3), multiple_of=self.head_dim)
        shard_parameter(self.out_proj, "weight", 1, multiple_of=self.head_dim)
        self.enter = all_reduce_gradient if reduce_input_gradient else unchanged
        self.reduce = reduce

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what the torch class does, whole on every rank.

        Raises:
            RuntimeError: `is_causal` is given without a mask.
        """
        check_parts(self.out_proj)
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "`is_causal` is a hint about `attn_mask`, which is missing"
            )
        # One sum of gradients for a tensor that is given several times.
        entered = {id(x): self.enter(x) for x in (query, key, value)}
        batched = [self.with_batch(entered[id(x)]) for x in (query, key, value)]
        q, k, v = (
            functional.linear(x, weight, bias)
            .view(*x.shape[:2], -1, self.head_dim)
            .transpose(1, 2)
            for x, weight, bias in zip(batched, *self.projections(), strict=True)
        )  # (B, H', T or S, D)
        mask = self.mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1 / self.head_dim)) @ k.mT
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = functional.dropout(weights, dropout)
            mixed = weights @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        # Tokens first, as in torch: dropout after it draws in the order of the memory.
        mixed = mixed.permute(2, 0, 1, 3).flatten(2)
        y = functional.linear(mixed, self.out_proj.weight)
        y, bias = self.reduce(y, self.out_proj.bias)
        y = self.as_given(y if bias is None else y + bias, query)
        if weights is None:
            return y, None
        if average_attn_weights:
            weights = all_reduce(weights.sum(1) / self.num_heads)
        else:
            weights = all_gather(weights, axis=1)
        return y, weights if query.dim() == 3 else weights.squeeze(0)

    def projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """The weights and biases of queries, keys and values."""
        bias: Any = self.in_proj_bias
        weights = self.in_proj_weight.chunk(3)
        return weights, (None,) * 3 if bias is None else bias.chunk(3)

    def with_batch(self, x: Tensor) -> Tensor:
        """The input in the order (B, T, E)."""
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def as_given(self, y: Tensor, query: Tensor) -> Tensor:
        """The output (T, B, E) with its axes in the order of the queries'."""
        if query.dim() == 2:
            return y.squeeze(1)
        return y.transpose(0, 1) if self.batch_first else y

    def mask(
        self, attention: Tensor | None, padding: Tensor | None, q: Tensor
    ) -> Tensor | None:
        """The mask to add to the scores of this rank's heads, (B', H' or 1, T', S)."""
        found = None
        if attention is not None:
            attention = self.added(attention, q)
            if attention.dim() == 3:  # of every head
                heads = attention.view(-1, self.num_heads, *attention.shape[1:])
                found = heads.narrow(1, rank() * q.shape[1], q.shape[1])
            else:
                found = attention[None, None]
        if padding is not None:
            # (S,) without a batch
            padded = self.added(padding, q).view(-1, 1, 1, padding.shape[-1])
            found = padded if found is None else found + padded
        return found

    def added(self, mask: Tensor, q: Tensor) -> Tensor:
        """A mask to add to scores; of a boolean one, True becomes -inf and False 0."""
        if mask.dtype != torch.bool:
            return self.enter(mask)  # it may be learnt
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
