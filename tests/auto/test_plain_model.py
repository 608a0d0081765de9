"""Arguments and inputs that are made up for a model of the user's own."""

import sys
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from slapo_rewrite.auto.derive import derive
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


@dataclass
class Deep:
    dim: int = 2048
    n_layers: int = 40


class Stack(nn.Module):
    """Deeper than small models are made, and still cut into stages."""

    def __init__(self, config: Deep):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(config.dim, 64) for _ in range(config.n_layers))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def test_a_small_model_has_as_many_layers():
    """Those that a pipeline's stages are cut between."""
    step = next(steps_of(Stack, sys.modules[__name__]))
    assert step.twin == "m.Stack(config=m.Deep(dim=64))"


def test_what_is_none_or_made_by_default_stays_so_in_a_small_model():
    step = next(steps_of(Net, sys.modules[__name__]))
    assert step.twin == "m.Net(config=m.Config(dim=64), num_heads=4, embed_dim=64)"


INSIDE_ANOTHER = """\
import torch
from torch import nn
from torch.nn import functional as F


class Wrapped(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out, bias=False)

    def forward(self, x):
        return self.linear(x)


class Block(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.size = size
        self.q, self.k = Wrapped(width, width), Wrapped(width, width)
        self.v, self.out = Wrapped(width, width), Wrapped(width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x):
        shape = (*x.shape[:2], -1, self.size)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(y.flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, size) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
GIVEN = """\
import torch


def model(m):
    return m.Model(1024, 128)


def verify_model(m):
    return m.Model(64, 16)


def inputs(model):
    return {"x": torch.randn(2, 8, model.blocks[0].up.in_features)}


def loss(outputs):
    return outputs.square().mean()
"""


def test_what_the_small_model_cannot_tell_is_left_whole(tmp_path):
    """What makes the layers does not know how wide a head is, so it is written as a number."""
    source, step = tmp_path / "inside.py", tmp_path / "step.py"
    source.write_text(INSIDE_ANOTHER)
    step.write_text(GIVEN)
    text = derive(str(source), str(step)).text
    assert '"*.up"].shard(' in text and '{q,k,v}.linear"].shard(' not in text
    assert "the small model does not fit 2" in " ".join(text.replace("#", "").split())


MASKED = """\
import torch
from torch import nn
from torch.nn import functional as F


class Masked(nn.Linear):
    def __init__(self, given, made):
        super().__init__(given, made, bias=False)
        self.register_buffer("mask", torch.ones(made, given).tril())

    def forward(self, x):
        return F.linear(x, self.weight * self.mask)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = Masked(width, 4 * width), Masked(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
"""
OF_MASKED = (
    GIVEN.replace("1024, 128", "16")
    .replace("64, 16", "16")
    .replace("model.blocks[0].up.in_features", "16")
)


def test_what_a_layer_adds_in_the_shape_of_a_parameter_is_split_with_it(tmp_path):
    source, step = tmp_path / "masked.py", tmp_path / "step.py"
    source.write_text(MASKED)
    step.write_text(OF_MASKED)
    text = derive(str(source), str(step)).text
    assert 's["up"].shard(["weight", "mask"], axis=0)' in text
    assert 's["down"].shard(["weight", "mask"], axis=1)' in text


BESIDE = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(8, heads))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) + self.bias.T[:, None]
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        parts = lambda: nn.Sequential(nn.LayerNorm(width), Attention(width, 4))
        self.blocks = nn.ModuleList([parts() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x
"""


def test_what_heads_have_is_split_in_a_sequence_of_a_norm_and_attention(tmp_path):
    """A line for every element of the sequence would ask the norm for it, too."""
    source, step = tmp_path / "beside.py", tmp_path / "step.py"
    source.write_text(BESIDE)
    step.write_text(OF_MASKED)
    text = derive(str(source), str(step)).text
    assert 'layers["*.1"].shard("bias", axis=1)' in text and "layers[:].checkpoint()" in text


RESPONSE = """\
import torch
from torch import nn


class ResponseNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, x):
        size = torch.norm(x, p=2, dim=1, keepdim=True)
        return self.gamma * (x * size / (size.mean(dim=-1, keepdim=True) + 1e-6)) + x


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = ResponseNorm(4 * width)

    def forward(self, x):
        return self.down(self.norm(torch.relu(self.up(x))))
"""


def test_a_norm_between_whose_features_are_last_is_split_with_them(tmp_path):
    source, step = tmp_path / "response.py", tmp_path / "step.py"
    source.write_text(RESPONSE)
    step.write_text(OF_MASKED)
    assert 's["norm"].shard("gamma", axis=2)' in derive(str(source), str(step)).text
