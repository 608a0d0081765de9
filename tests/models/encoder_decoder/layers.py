"""What encoder and decoder share."""

import torch
from torch import nn
from torch.nn import functional as F

from .config import CaptionerConfig


def rotate(x):
    """The angles of each position, from the sines of its number."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    a, b = x.split(half, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    """Attention to itself or to what another gives; heads share keys and values."""

    def __init__(self, config: CaptionerConfig, causal: bool = False):
        super().__init__()
        self.causal = causal
        self.n_heads, self.n_kv = config.heads, config.kv_heads
        self.head_dim = config.dim // config.heads
        self.q = nn.Linear(config.dim, self.n_heads * self.head_dim, bias=False)
        self.kv = nn.Linear(config.dim, 2 * self.n_kv * self.head_dim, bias=False)
        self.o = nn.Linear(self.n_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x, memory=None):
        b, t, _ = x.shape
        source = x if memory is None else memory
        q = self.q(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k, v = self.kv(source).chunk(2, dim=-1)
        k = k.reshape(b, -1, self.n_kv, self.head_dim).transpose(1, 2)
        v = v.reshape(b, -1, self.n_kv, self.head_dim).transpose(1, 2)
        if memory is None:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, dim, inner):
        super().__init__()
        self.gate = nn.Linear(dim, inner, bias=False)
        self.up = nn.Linear(dim, inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))
