"""The computations that are worth a kernel are found in transformers' own files."""

from __future__ import annotations

import functools
import importlib
import math
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slapo_rewrite import call_module
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.locate import locate
from slapo_rewrite.schedule.selection import Selection
from tests.finding import selected

LAYERS = 2
MODELS = {
    "bert": ("BertForMaskedLM", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama": ("LlamaForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "opt": ("OPTForCausalLM", {}),
    "t5": ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu"}),
}


@functools.cache
def model(family: str) -> Selection:
    """All modules of a model with two layers."""
    cls, more = MODELS[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    layers = "num_layers" if family == "t5" else "num_hidden_layers"
    make = getattr(module, cls)
    config = make.config_class(**{layers: LAYERS}, **more)
    path, name = locate(module.__name__)
    folder = Path(tempfile.mkdtemp())
    return selected(SourceFile.read(path, name), lambda: make(config), folder)["**"]


def bias_gelu(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def written_gelu(x):
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def bias_relu(x, weight, bias):
    return F.relu(F.linear(x, weight, bias))


def swiglu(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def geglu(x, gate, up):
    return F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up)


def written_geglu(x, gate, up):
    return written_gelu(F.linear(x, gate)) * F.linear(x, up)


class DropoutResidualNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.norm = nn.Dropout(0.0), nn.LayerNorm(1)

    def forward(self, x, residual):
        return self.norm(self.dropout(x) + residual)


def dropout_residual(x, p, training, residual):
    return F.dropout(x, p, training=training) + residual


def rms_norm(x, weight, eps, dtype):
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return weight * x.to(dtype)


def gemma_norm(x, weight, eps):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).type_as(x)


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def softmax(q, k, scale, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    return F.softmax(scores + mask if mask is not None else scores, dim=-1)


def softmax_last(q, k, scale, mask):
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    return F.softmax(scores + mask if mask is not None else scores, dim=-1)


def softmax_float(q, k, scale, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    scores = scores + mask if mask is not None else scores
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)


def attention(q, k, v, scale, mask, p, training):
    return torch.matmul(F.dropout(softmax(q, k, scale, mask), p, training), v)


def projection(x):
    return call_module(r"(query|key|value|[qkv](_proj)?)$", x)


FOUND = [
    ("bert", bias_gelu, LAYERS + 1),
    ("bert", DropoutResidualNorm, 2 * LAYERS),
    ("bert", dropout_residual, 2 * LAYERS),
    ("bert", softmax, LAYERS),
    ("bert", projection, 3 * LAYERS),
    ("gpt2", written_gelu, 2 * LAYERS),  # the block's own, and the activation's own forward
    ("gpt2", softmax_last, LAYERS),
    ("llama", swiglu, LAYERS),
    ("llama", rms_norm, 2 * LAYERS + 1),
    ("llama", rotated, 2 * LAYERS),
    ("llama", softmax_float, LAYERS),
    ("llama", projection, 3 * LAYERS),
    ("gemma", geglu, LAYERS),
    ("gemma", gemma_norm, 2 * LAYERS + 1),
    ("gemma", softmax_float, LAYERS),
    ("qwen2", swiglu, LAYERS),
    ("qwen2", rms_norm, 2 * LAYERS + 1),
    ("qwen2", projection, 3 * LAYERS),
    ("opt", bias_relu, LAYERS),
    ("opt", dropout_residual, 2 * LAYERS),
    ("opt", projection, 3 * LAYERS),
    ("t5", written_geglu, 2 * LAYERS),
    ("t5", dropout_residual, 5 * LAYERS),
]


@pytest.mark.parametrize(
    ("family", "pattern", "count"), FOUND, ids=[f"{f}-{p.__name__}" for f, p, _ in FOUND]
)
def test_found(family, pattern, count):
    found = model(family).find(pattern)
    assert len(found) == count, str(found)
    for match in found:
        assert match.replaced.whole
    if pattern is projection:
        assert [len(group) for group in found.groups] == [3] * LAYERS


def test_what_stops_attention():
    """The probabilities are returned as well, so the whole of it is no one value."""
    found = model("bert").find(attention)
    assert not found
    assert "the value of `dropout` is also used elsewhere" in str(found)
    assert "return attn_output, attn_weights" in str(found)


def test_a_norm_after_a_residual_that_goes_on():
    """Found is what has one result, and what a module holds is read from it."""

    def residual_norm(x, residual, shape, weight, bias, eps):
        return F.layer_norm(x + residual, shape, weight, bias, eps)

    assert len(model("bert").find(residual_norm)) == 2 * LAYERS + 1
    (first, *_) = model("bert").find(residual_norm)
    assert first.operands["eps"] == "self.LayerNorm.eps"
    assert first.operands["shape"] == "self.LayerNorm.normalized_shape"
