"""Images to tokens."""

import torch
from torch import nn

from .config import CaptionerConfig
from .layers import Attention, SwiGLU


class EncoderBlock(nn.Module):
    """Looks both ways."""

    def __init__(self, config: CaptionerConfig):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp = SwiGLU(config.dim, 3 * config.dim)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Encoder(nn.Module):
    """Patches through blocks."""

    def __init__(self, config: CaptionerConfig):
        super().__init__()
        size = config.vision.patch_size
        self.patches = nn.Conv2d(3, config.dim, size, stride=size)
        places = (config.vision.image_size // size) ** 2
        self.places = nn.Parameter(torch.zeros(places, config.dim))
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.vision.depth))
        self.norm = nn.RMSNorm(config.dim)

    def forward(self, images):
        x = self.patches(images).flatten(2).mT + self.places
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
