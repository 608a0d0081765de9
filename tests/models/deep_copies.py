"""An encoder-decoder whose layers are deep copies of one, and whose linear layers go by a zip.

Shapes: B batch, S tokens of the source, T of the target, C channels, N heads, V vocabulary.
"""

import copy
import math

import torch
from torch import nn


def clones(module, number):
    """A list of copies, each with parameters of its own."""
    return nn.ModuleList([copy.deepcopy(module) for _ in range(number)])


def attend(query, key, value, mask=None):
    """Scaled dot products."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.softmax(scores, dim=-1) @ value


class MultiHeadAttention(nn.Module):
    """Four linear layers in a list: query, key, value, output."""

    def __init__(self, heads, d_model):
        super().__init__()
        self.d_k = d_model // heads
        self.heads = heads
        self.linears = clones(nn.Linear(d_model, d_model), 4)

    def forward(self, query, key, value, mask=None):
        batch = query.size(0)
        query, key, value = [
            linear(x).view(batch, -1, self.heads, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value))
        ]
        x = attend(query, key, value, mask)
        x = x.transpose(1, 2).contiguous().view(batch, -1, self.heads * self.d_k)
        return self.linears[-1](x)


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, d_model, d_ff, dropout):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(self.w_1(x).relu()))


class Residual(nn.Module):
    """Norm first, then what it is given, then the sum."""

    def __init__(self, size, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class EncoderLayer(nn.Module):
    """Attention to the source, and a feed-forward layer."""

    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(Residual(size, dropout), 2)

    def forward(self, x):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Attention to the target so far and to the source, and a feed-forward layer."""

    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(Residual(size, dropout), 3)

    def forward(self, x, memory, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory))
        return self.sublayer[2](x, self.feed_forward)


class Translator(nn.Module):
    """Encoder, decoder, and a head that gives log-probabilities."""

    def __init__(
        self, vocab_size=16000, d_model=2048, d_ff=8192, heads=16, n_layers=6, dropout=0.1
    ):
        super().__init__()
        attention = MultiHeadAttention(heads, d_model)
        feed_forward = FeedForward(d_model, d_ff, dropout)
        c = copy.deepcopy
        self.src_embed = nn.Embedding(vocab_size, d_model)
        self.tgt_embed = nn.Embedding(vocab_size, d_model)
        self.encoder = clones(
            EncoderLayer(d_model, c(attention), c(feed_forward), dropout), n_layers
        )
        self.decoder = clones(
            DecoderLayer(d_model, c(attention), c(attention), c(feed_forward), dropout), n_layers
        )
        self.encoder_norm = nn.LayerNorm(d_model)
        self.decoder_norm = nn.LayerNorm(d_model)
        self.generator = nn.Linear(d_model, vocab_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, src, tgt):
        memory = self.src_embed(src) * math.sqrt(self.src_embed.embedding_dim)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        x = self.tgt_embed(tgt) * math.sqrt(self.tgt_embed.embedding_dim)
        mask = torch.ones(tgt.size(1), tgt.size(1), device=tgt.device).tril()
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return torch.log_softmax(self.generator(self.decoder_norm(x)), dim=-1)
