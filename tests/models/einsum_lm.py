"""A language model on einsum: parameters beside layers, a learned bias by distance.

Shapes: B batch, T tokens, C channels, N heads, H channels of a head, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    """Sizes of the model."""

    vocab_size: int = 32000
    context: int = 512
    depth: int = 6
    heads: int = 16
    dim: int = 2048
    dropout: float = 0.1


class Attention(nn.Module):
    """Multi-head attention; each head prefers tokens of some distances."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.scale = (config.dim // config.heads) ** -0.5
        self.to_q = nn.Linear(config.dim, config.dim, bias=False)
        self.to_k = nn.Linear(config.dim, config.dim, bias=False)
        self.to_v = nn.Linear(config.dim, config.dim, bias=False)
        self.distance = nn.Parameter(torch.zeros(config.heads, config.context))
        self.to_out = nn.Linear(config.dim, config.dim)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            project(x).reshape(b, t, self.heads, -1)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) * self.scale
        steps = torch.arange(t, device=x.device)
        back = steps[:, None] - steps[None, :]
        scores = scores + self.distance[:, back.clamp(min=0)]
        scores = scores.masked_fill(back < 0, float("-inf"))
        mixed = torch.einsum("bnqk,bknh->bqnh", scores.softmax(dim=-1), v)
        return self.to_out(mixed.flatten(2))


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each with a learned share of what it adds."""

    def __init__(self, config: Config):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 2 * 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.gamma_1 = nn.Parameter(0.1 * torch.ones(config.dim))
        self.gamma_2 = nn.Parameter(0.1 * torch.ones(config.dim))

    def forward(self, x):
        x = x + self.gamma_1 * self.dropout(self.attention(self.norm_1(x)))
        value, gate = self.up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.gamma_2 * self.dropout(self.down(value * F.silu(gate)))


class EinsumLM(nn.Module):
    """The embedding's weight is the head's as well; positions are a parameter of the model."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.emb = nn.Embedding(config.vocab_size, config.dim)
        self.pos = nn.Parameter(0.02 * torch.randn(config.context, config.dim))
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(config.dim)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, idx, targets=None):
        x = self.emb(idx) + self.pos[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.emb.weight.T + self.bias
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
