"""What is made up for a model of somebody's own."""

import sys
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from slapo_rewrite.auto.plain_model import steps_of


@dataclass
class Config:
    dim: int = 2048
    hidden_dim: int | None = None
    dims: tuple[int, ...] = field(default_factory=lambda: (1, 2))


class Net(nn.Module):
    """What is `None` by default is made of what else is given."""

    def __init__(
        self, config: Config, norm_layer=None, num_heads=16, embed_dim=2048, head_dim=None
    ):
        super().__init__()
        width = config.hidden_dim or 4 * config.dim
        self.norm = (norm_layer or partial(nn.LayerNorm, eps=1e-6))(config.dims[1] * embed_dim)
        self.up = nn.Linear(embed_dim, width)
        self.heads = nn.Linear(head_dim or embed_dim // num_heads, num_heads)

    def forward(self, x):
        return self.up(self.norm(x))


class Sizes:
    def __init__(self, dim=2048, heads=16, kv_heads=4, head_dim=128, expert_dim=1408, depth=8):
        self.dim = dim


class Decoder(nn.Module):
    """As many queries share keys in the small model as in the model."""

    def __init__(self, config: Sizes):
        super().__init__()
        self.up = nn.Linear(config.dim, config.dim)

    def forward(self, x):
        return self.up(x)


def test_sizes_of_a_plain_class_are_made_small_in_their_ratio():
    step = next(steps_of(Decoder, sys.modules[__name__]))
    sizes = "dim=64, heads=8, kv_heads=2, head_dim=16, expert_dim=32"
    assert step.twin == f"m.Decoder(config=m.Sizes({sizes}))"


def test_what_is_none_or_made_by_default_stays_so_in_a_small_model():
    step = next(steps_of(Net, sys.modules[__name__]))
    assert step.twin == "m.Net(config=m.Config(dim=64), num_heads=4, embed_dim=64)"
