"""A model of sound: weight-normed convolutions, and pairs of layers that go by their index.

Shapes: B batch, C channels, T samples or frames.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


def normed_conv(inputs, outputs, width, dilation=1):
    """A convolution in time that keeps the length, its weight normalized."""
    padding = dilation * (width - 1) // 2
    return weight_norm(nn.Conv1d(inputs, outputs, width, padding=padding, dilation=dilation))


class Mixer(nn.Module):
    """Attention over frames."""

    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x):
        b, t, c = x.shape
        y = self.norm(x)
        q, k, v = [
            layer(y).view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


class FeedForward(nn.Module):
    """Weight-normed linear layers."""

    def __init__(self, channels, inner):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.inner = weight_norm(nn.Linear(channels, inner))
        self.outer = weight_norm(nn.Linear(inner, channels))

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class AudioModel(nn.Module):
    """Samples to frames, pairs of layers, scores of the units of speech for each frame."""

    def __init__(self, channels=2048, inner=8192, heads=16, n_layers=6, n_units=500):
        super().__init__()
        self.encode = nn.Sequential(
            normed_conv(1, channels, 7),
            nn.ELU(),
            normed_conv(channels, channels, 3, dilation=2),
        )
        self.layers = nn.ModuleList([])
        for i in range(n_layers):
            first = Mixer(channels, heads) if i % 2 == 0 else nn.Identity()
            self.layers.append(nn.ModuleList([first, FeedForward(channels, inner)]))
        self.norm = nn.LayerNorm(channels)
        self.units = nn.Linear(channels, n_units)

    def forward(self, wave, units=None):
        x = self.encode(wave).transpose(1, 2)
        for i, (mixer, feed_forward) in enumerate(self.layers):
            if i % 2 == 0:
                x = mixer(x)
            x = feed_forward(x)
        scores = self.units(self.norm(x))
        if units is None:
            return scores, None
        return scores, F.cross_entropy(scores.reshape(-1, scores.shape[-1]), units.reshape(-1))
