"""A GPT in one file: packed query, key and value, tied embedding, layers in a ModuleDict.

Shapes: B batch, T tokens, C channels, N heads, H channels of a head, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .packed_axes import Packed
from .tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    part_size,
)
from .vocab_parallel_loss import vocab_parallel_cross_entropy, whole_logits


@dataclass
class GPTConfig:
    """Sizes of the model."""

    vocab_size: int = 50257
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    """Multi-head attention on what stands to the left."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = ColumnParallelLinear(
            config.n_embd, 3 * config.n_embd, parts=Packed(3)
        )  # query, key and value in one
        self.c_proj = RowParallelLinear(config.n_embd, config.n_embd)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout
        self.n_embd = part_size(self.n_embd)
        self.n_head = part_size(self.n_head)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, N, T, H)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, -1)  # the heads side by side
        return self.c_proj(y)


class MLP(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = ColumnParallelLinear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU()
        self.c_proj = RowParallelLinear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """A transformer block, norms first."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class CheckpointedBlock(Block):
    """A `Block` that recomputes its activations in the backward pass."""

    def forward(self, *args, **kwargs):
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


class GPT(nn.Module):
    """Token and position embeddings, blocks, a head that shares the embedding's weight."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=VocabParallelEmbedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList(
                    [
                        CheckpointedBlock(config) if i < config.n_layer // 2 else Block(config)
                        for i in range(config.n_layer)
                    ]
                ),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = ColumnParallelLinear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        T = idx.size(1)
        assert T <= self.config.block_size, f"{T} tokens are more than the model has positions"
        positions = torch.arange(T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            logits = whole_logits(logits, self.lm_head)
            return logits, None
        if not self.training:
            logits = whole_logits(logits, self.lm_head)
        return logits, vocab_parallel_cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), head=self.lm_head
        )
