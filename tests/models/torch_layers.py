"""A classifier of patches: a block on `nn.MultiheadAttention`, then torch's own encoder.

Shapes: B batch, T tokens, C channels.
"""

import torch
from torch import nn


class CrossAttention(nn.Module):
    """A few learned queries that look at all patches."""

    def __init__(self, dim, num_heads, queries):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, dim) * dim**-0.5)
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
        )

    def forward(self, x):
        queries = self.queries.expand(x.shape[0], -1, -1)
        found, _ = self.attn(queries, x, x, need_weights=False)
        return found + self.mlp(self.norm(found))


class PatchClassifier(nn.Module):
    """Patches, torch's encoder, learned queries, classes."""

    def __init__(self, image_size=224, patch=16, dim=2048, num_heads=16, depth=6, num_classes=1000):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.pos = nn.Parameter(torch.zeros(1, (image_size // patch) ** 2, dim))
        layer = nn.TransformerEncoderLayer(
            dim,
            num_heads,
            4 * dim,
            dropout=0.1,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.pool = CrossAttention(dim, num_heads, queries=8)
        self.head = nn.Linear(dim, num_classes)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, images, labels=None):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.pos
        x = self.pool(self.encoder(x))
        logits = self.head(x.mean(dim=1))
        if labels is None:
            return logits
        return self.criterion(logits, labels), logits
