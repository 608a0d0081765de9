"""Tensor-parallel layers of `nn.Transformer`: attention split over heads, and the inner width.

Shapes: B batch, T tokens, E embedding, F inner width of the feed-forward block. A prime
(F') marks what this rank has. `batch_first` says whether it is (B, T, E) or (T, B, E).
"""

from typing import Any

import torch
from torch import Tensor, nn

from .multihead_attention import ParallelMultiheadAttention
from .tensor_parallel import ColumnParallelLinear, RowParallelLinear


def split_inside(layer: Any) -> None:
    """Replaces a layer's submodules by parallel ones, with this rank's parts.

    Raises:
        ValueError: The heads, or the inner width, do not divide over the ranks.
    """
    for name in ("self_attn", "multihead_attn"):
        whole = getattr(layer, name, None)
        if whole is not None:
            attention = ParallelMultiheadAttention(
                whole.embed_dim,
                whole.num_heads,
                whole.dropout,
                bias=whole.in_proj_bias is not None,
                batch_first=whole.batch_first,
                device="meta",
            )
            take_place(layer, name, attention)
    sizes = layer.linear1.in_features, layer.linear1.out_features
    bias = layer.linear1.bias is not None
    # Equal shares, so that the ranks draw as many random numbers for dropout.
    up = ColumnParallelLinear(*sizes, bias, "meta", multiple_of=1)
    take_place(layer, "linear1", up)
    down = RowParallelLinear(sizes[1], sizes[0], bias, "meta", multiple_of=1)
    take_place(layer, "linear2", down)


def take_place(layer: nn.Module, name: str, new: nn.Module) -> None:
    """Replaces `layer.<name>` by a new module, and copies the weights."""
    new.load_state_dict(getattr(layer, name).state_dict(), assign=True)
    setattr(layer, name, new)


class ParallelTransformerEncoderLayer(nn.TransformerEncoderLayer):
    """An `nn.TransformerEncoderLayer` split inside, with its arguments and numbers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        split_inside(self)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Maps whole (B, T, E) to whole (B, T, E)."""
        if src.is_nested:
            return self.of_lengths(src)

        def attend(x: Tensor) -> Tensor:
            y, _ = self.self_attn(
                x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal
            )
            attended: Tensor = self.dropout1(y)
            return attended

        def feed(x: Tensor) -> Tensor:
            inner = self.dropout(self.activation(self.linear1(x)))
            fed: Tensor = self.dropout2(self.linear2(inner))
            return fed

        if self.norm_first:
            x = src + attend(self.norm1(src))
            return x + feed(self.norm2(x))
        x = self.norm1(src + attend(src))
        y: Tensor = self.norm2(x + feed(x))
        return y

    def of_lengths(self, src: Tensor) -> Tensor:
        """The same for a nested tensor, as `nn.TransformerEncoder` passes in eval mode."""
        lengths = [len(x) for x in src.unbind()]
        padded = src.to_padded_tensor(0.0)
        places = torch.arange(padded.shape[1], device=padded.device)
        padding = places >= places.new_tensor(lengths)[:, None]
        y = self(padded, src_key_padding_mask=padding)
        return torch.nested.as_nested_tensor(
            [x[:length] for x, length in zip(y, lengths, strict=True)]
        )


class ParallelTransformerDecoderLayer(nn.TransformerDecoderLayer):
    """An `nn.TransformerDecoderLayer` split inside, with its arguments and numbers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        split_inside(self)


class ParallelTransformer(nn.Transformer):
    """An `nn.Transformer` of layers that are split inside, with its arguments and numbers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        split_layers(self.encoder.layers, ParallelTransformerEncoderLayer)
        split_layers(self.decoder.layers, ParallelTransformerDecoderLayer)


def split_layers(layers: nn.Module, split: type[nn.Module]) -> None:
    """Replaces the layers of a stack by parallel ones, with this rank's parts."""
    layer: Any
    for name, layer in [*layers.named_children()]:
        attention, up = layer.self_attn, layer.linear1
        new = split(
            attention.embed_dim,
            attention.num_heads,
            up.out_features,
            layer.dropout.p,
            layer.activation,
            layer.norm1.eps,
            attention.batch_first,
            layer.norm_first,
            up.bias is not None,
            device="meta",
        )
        take_place(layers, name, new)
