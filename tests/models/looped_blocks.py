"""Two blocks gone through several times, from a factory of classes; linear layers that cast.

Shapes: B batch, T tokens, C channels, N heads, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F


class CastingLinear(nn.Linear):
    """A linear layer that computes in the precision of its weight, and answers in its input's."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square normalization."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class SelfAttention(nn.Module):
    """Causal attention."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq = CastingLinear(dim, dim, bias=False)
        self.wk = CastingLinear(dim, dim, bias=False)
        self.wv = CastingLinear(dim, dim, bias=False)
        self.wo = CastingLinear(dim, dim, bias=False)

    def forward(self, x):
        def heads(y):
            return y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

        y = F.scaled_dot_product_attention(
            heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x)), is_causal=True
        )
        return self.wo(y.transpose(1, 2).flatten(-2))


def make_block(activation):
    """A class of blocks with an activation."""

    class Block(nn.Module):
        def __init__(self, dim, n_heads, ffn_mult=4):
            super().__init__()
            self.attn_norm = RMSNorm(dim)
            self.attn = SelfAttention(dim, n_heads)
            self.ffn_norm = RMSNorm(dim)
            self.w1 = CastingLinear(dim, ffn_mult * dim)
            self.w2 = CastingLinear(ffn_mult * dim, dim)

        def forward(self, x):
            x = x + self.attn(self.attn_norm(x))
            return x + self.w2(activation(self.w1(self.ffn_norm(x))))

    return Block


GeluBlock = make_block(F.gelu)


class LoopedLM(nn.Module):
    """The same two blocks, `loops` times."""

    def __init__(self, vocab_size=32000, dim=2048, n_heads=16, loops=3, n_classes=0):
        super().__init__()
        self.loops = loops
        self.wte = nn.Embedding(vocab_size, dim)
        self.first = GeluBlock(dim, n_heads)
        self.second = make_block(F.silu)(dim, n_heads, ffn_mult=2)
        self.norm = RMSNorm(dim)
        self.lm_head = CastingLinear(dim, vocab_size, bias=False)

    def forward(self, tokens, labels=None):
        x = self.wte(tokens)
        for _ in range(self.loops):
            x = self.second(self.first(x))
        logits = self.lm_head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return {"logits": logits, "loss": loss}
