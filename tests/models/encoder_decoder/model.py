"""The model that puts words under images."""

from torch import nn
from torch.nn import functional as F

from .config import CaptionerConfig
from .encoder import Encoder
from .layers import Attention, SwiGLU


class DecoderBlock(nn.Module):
    """Looks back, and at the image."""

    def __init__(self, config: CaptionerConfig):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(config.dim) for _ in range(3))
        self.self_attention = Attention(config, causal=True)
        self.cross_attention = Attention(config)
        self.mlp = SwiGLU(config.dim, 3 * config.dim)

    def forward(self, x, memory):
        x = x + self.self_attention(self.norms[0](x))
        x = x + self.cross_attention(self.norms[1](x), memory)
        return x + self.mlp(self.norms[2](x))


class Captioner(nn.Module):
    """Encoder and decoder; the head has the embedding's weight."""

    def __init__(self, config: CaptionerConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.words = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.words.weight

    def forward(self, images, tokens, labels=None):
        memory = self.encoder(images)
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, memory)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)
