"""Query, key and value in one layer, in three orders; the class is an argument.

Shapes: B batch, T tokens, C channels, N heads, G groups of heads that share a key and a value, H
channels of a head, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """What the three have in common."""

    def __init__(self, dim: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups = heads, groups
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, self.packed_dim(dim))
        self.proj = nn.Linear(dim, dim)

    def packed_dim(self, dim):
        return 3 * dim

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.unpack(self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Thirds(Attention):
    """All queries, all keys, all values."""

    def unpack(self, packed):
        b, t, _ = packed.shape
        return packed.reshape(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)


class PerHead(Attention):
    """The query, key and value of one head, then those of the next."""

    def unpack(self, packed):
        b, t, _ = packed.shape
        packed = packed.view(b, t, self.heads, 3 * self.head_dim).transpose(1, 2)
        return packed.chunk(3, dim=-1)


class Grouped(Attention):
    """The queries of one group, its key and its value, then those of the next group."""

    def packed_dim(self, dim):
        return dim + 2 * self.groups * self.head_dim

    def unpack(self, packed):
        b, t, _ = packed.shape
        each = self.heads // self.groups
        packed = packed.view(b, t, self.groups, each + 2, self.head_dim)
        q = packed[:, :, :, :-2].reshape(b, t, self.heads, self.head_dim)
        k = packed[:, :, :, -2].repeat_interleave(each, dim=2)
        v = packed[:, :, :, -1].repeat_interleave(each, dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class Block(nn.Module):
    """A block with attention of the class that it is given."""

    def __init__(self, attention: type, dim: int, heads: int, groups: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(dim)
        self.attention = attention(dim, heads, groups)
        self.norm_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class PackedLM(nn.Module):
    """A language model whose blocks all have attention of one class."""

    def __init__(
        self,
        attention: type = Thirds,
        vocab_size: int = 32000,
        block_size: int = 512,
        dim: int = 2048,
        heads: int = 16,
        groups: int = 4,
        n_layers: int = 4,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(block_size, dim)
        blocks = []
        for _ in range(n_layers):
            blocks.append(Block(attention, dim, heads, groups))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, idx, targets=None):
        positions = torch.arange(idx.shape[-1], device=idx.device)
        x = self.blocks(self.tokens(idx) + self.positions(positions))
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.transpose(1, 2), targets)
