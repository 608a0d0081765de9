"""What the fusion rules look for is found in transformers' own files, and what only looks alike is
not: each spelling of a norm, of rotary embeddings and of attention is a pattern of its own."""

from __future__ import annotations

import functools
import importlib
import math
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.locate import locate
from slapo_rewrite.schedule.selection import Selection
from tests.finding import selected

MODELS = {
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
ONE_LAYER = {"num_layers": 1, "num_hidden_layers": 1, "pad_token_id": 0}


@functools.cache
def model(family: str) -> Selection:
    """One module of each class of a model."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    make = getattr(module, MODELS[family])
    config = make.config_class(**ONE_LAYER)
    path, name = locate(module.__name__)
    folder = Path(tempfile.mkdtemp())
    every = selected(SourceFile.read(path, name), lambda: make(config), folder)["**"]
    first = {node.cls: node for node in reversed(every._nodes)}
    return Selection(every._plan, list(reversed(first.values())))


def rms_norm(x, weight, eps):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def rms_norm_cast_last(x, weight, eps):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * h).to(x.dtype)


def rms_norm_plus_one(x, weight, eps):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + weight.float())).type_as(x)


def rms_norm_half(x, weight, eps):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    h = x * torch.rsqrt(variance + eps)
    return weight * (h.to(weight.dtype) if weight.dtype in [torch.float16, torch.bfloat16] else h)


def residual_rms_norm(x, residual, weight, eps):
    total = residual + x
    return rms_norm(total, weight, eps), total


def residual_layer_norm(x, residual, shape, weight, bias, eps):
    total = x + residual
    return F.layer_norm(total, shape, weight, bias, eps), total


def dropout_residual_layer_norm(x, p, training, residual, shape, weight, bias, eps):
    return F.layer_norm(F.dropout(x, p, training) + residual, shape, weight, bias, eps)


def rotated(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotary(q, k, cos, sin, dim):
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin


def partial_rotary(q, k, cos, sin):
    return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin


def swiglu(gate, up):
    return F.silu(gate) * up


def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def gelu_new(x):
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def attention(q, k, v, scale, mask, p, training):
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    probs = F.softmax(scores + mask if mask is not None else scores, dim=-1)
    probs = F.dropout(probs, p, training)
    return torch.matmul(probs, v).transpose(1, 2).contiguous(), probs


def attention_float(q, k, v, scale, mask, p, training):
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    scores = scores + mask if mask is not None else scores
    probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    probs = F.dropout(probs, p, training)
    return torch.matmul(probs, v).transpose(1, 2).contiguous(), probs


def attention_float_mirrored(q, k, v, scale, mask, p, training):
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = scores + mask if mask is not None else scores
    probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    probs = F.dropout(probs, p, training)
    return torch.matmul(probs, v).transpose(1, 2).contiguous(), probs


def attention_gpt2(q, k, v, scale, mask, p, training):
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = scores + mask if mask is not None else scores
    probs = F.dropout(F.softmax(scores, dim=-1).type(v.dtype), p, training)
    return torch.matmul(probs, v).transpose(1, 2), probs


def attention_biased(q, k, v, scale, bias, mask, p, training):
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    scores = scores + bias if bias is not None else scores
    probs = F.softmax(scores + mask if mask is not None else scores, dim=-1)
    probs = F.dropout(probs, p, training)
    return torch.matmul(probs, v).transpose(1, 2).contiguous(), probs


def query_key_value(x, q, q_bias, k, k_bias, v, v_bias):
    return F.linear(x, q, q_bias), F.linear(x, k, k_bias), F.linear(x, v, v_bias)


def cross_entropy(logits, labels, ignored):
    return F.cross_entropy(logits, labels, ignore_index=ignored)


LLAMA_LIKE = ("llama", "qwen3", "phi3")
# The pattern, and the classes and functions in which it is found, by model.
FOUND = {
    rms_norm: {
        "llama": {"LlamaRMSNorm.forward"},
        "qwen3": {"Qwen3RMSNorm.forward"},
        "phi3": {"Phi3RMSNorm.forward"},
    },
    rms_norm_cast_last: {"olmo2": {"Olmo2RMSNorm.forward"}},
    rms_norm_plus_one: {"gemma3": {"Gemma3RMSNorm.forward"}},
    rms_norm_half: {"t5": {"T5LayerNorm.forward"}},
    residual_rms_norm: {
        "llama": {"LlamaDecoderLayer.forward"},
        "qwen3": {"Qwen3DecoderLayer.forward"},
        "phi3": {"Phi3DecoderLayer.forward"},
    },
    residual_layer_norm: {"gpt_neox": {"GPTNeoXLayer.forward"}},
    dropout_residual_layer_norm: {"bert": {"BertSelfOutput.forward", "BertOutput.forward"}},
    rotary: {
        "llama": {"LlamaAttention.apply_rotary_pos_emb"},
        "qwen3": {"Qwen3Attention.apply_rotary_pos_emb"},
        "gemma3": {"Gemma3Attention.apply_rotary_pos_emb"},
        "olmo2": {"Olmo2Attention.apply_rotary_pos_emb"},
    },
    partial_rotary: {
        "llama": {"LlamaAttention.apply_rotary_pos_emb"},
        "qwen3": {"Qwen3Attention.apply_rotary_pos_emb"},
        "gemma3": {"Gemma3Attention.apply_rotary_pos_emb"},
        "olmo2": {"Olmo2Attention.apply_rotary_pos_emb"},
        "gpt_neox": {"GPTNeoXAttention.apply_rotary_pos_emb"},
        "phi3": {"Phi3Attention.apply_rotary_pos_emb"},
    },
    swiglu: {
        "llama": {"LlamaMLP.forward"},
        "qwen3": {"Qwen3MLP.forward"},
        "olmo2": {"Olmo2MLP.forward"},
        "phi3": {"Phi3MLP.forward"},
    },
    geglu: {"gemma3": {"Gemma3MLP.forward"}},
    gelu_new: {"gpt2": {"GPT2MLP.forward", "NewGELUActivation.forward"}},
    attention: {"bert": {"BertSelfAttention.eager_attention_forward"}},
    attention_float: {
        "llama": {"LlamaAttention.eager_attention_forward"},
        "qwen3": {"Qwen3Attention.eager_attention_forward"},
        "olmo2": {"Olmo2Attention.eager_attention_forward"},
        "phi3": {"Phi3Attention.eager_attention_forward"},
        "gpt_neox": {"GPTNeoXAttention.eager_attention_forward"},
    },
    attention_float_mirrored: {"opt": {"OPTAttention.eager_attention_forward"}},
    attention_gpt2: {"gpt2": {"GPT2Attention.eager_attention_forward"}},
    attention_biased: {"t5": {"T5Attention.eager_attention_forward"}},
    query_key_value: {
        "bert": {"BertSelfAttention.forward"},
        "llama": {"LlamaAttention.forward"},
        "qwen3": {"Qwen3Attention.forward"},
        "gemma3": {"Gemma3Attention.forward"},
        "olmo2": {"Olmo2Attention.forward"},
        "opt": {"OPTAttention.forward"},
    },
    cross_entropy: {
        "bert": {"BertForMaskedLM.forward"},
        "t5": {"T5ForConditionalGeneration.forward"},
    },
}


@pytest.mark.parametrize("pattern", FOUND, ids=lambda pattern: pattern.__name__)
def test_found_where_a_reader_would(pattern):
    for family in MODELS:
        every = model(family)
        classes = {node.path: node.cls.__name__ for node in every._nodes}
        found = every.find(pattern)
        places = {f"{classes[match.path]}.{match.function}" for match in found}
        assert places == FOUND[pattern].get(family, set()), f"{family}: {found}"
        assert all(match.replaced.whole for match in found), family


# What a pattern comes nearest to, and what stops it there.
MISSED = [
    ("gpt2", residual_layer_norm, "a branch is in between", "encoder_hidden_states is not None"),
    ("opt", residual_layer_norm, "a branch is in between", "if self.do_layer_norm_before"),
    ("gemma3", attention_float, "a branch is in between", "if softcap is not None"),
    ("bert", residual_layer_norm, "but not used", "LayerNorm"),
    ("opt", attention_float, "the pattern has 2 where the model has -2", "key.transpose(-1, -2)"),
    ("gpt_neox", rotary, "the value of `unsqueeze` is also used elsewhere", "cos.unsqueeze"),
]


@pytest.mark.parametrize(("family", "pattern", "reason", "line"), MISSED)
def test_the_nearest_miss(family, pattern, reason, line):
    found = model(family).find(pattern)
    missed = [miss.render() for miss in found.misses]
    assert not found and any(reason in text for text in missed), str(found)


def test_what_takes_the_place():
    """Readable in the diff: names of the model, and what belongs to a submodule by its path."""
    (match,) = model("llama").find(residual_rms_norm)
    place, segment = match.replaced, match.file.segment
    assert place.target == "hidden_states, residual = " and not place.above
    assert segment(place.node) == "hidden_states = self.post_attention_layernorm(hidden_states)"
    assert [segment(s) for s in place.removed] == [
        "hidden_states = residual + hidden_states", "residual = hidden_states",
    ]  # fmt: skip
    assert match.operands["weight"] == "self.post_attention_layernorm.weight"
    assert match.operands["eps"] == "self.post_attention_layernorm.variance_epsilon"
    (match,) = model("llama").find(attention_float)
    assert match.operands["k"] == "key_states" and match.operands["training"] == "module.training"
    assert match.file.segment(match.replaced.node) == "attn_output, attn_weights"
    (match,) = model("phi3").find(partial_rotary)
    assert match.replaced.above and [name for _, name in match.replaced.reads]


def test_the_loss_function_of_transformers_is_found_by_its_call():
    (match,) = model("llama").find(where=lambda call: call.operation == "self.loss_function")
    assert {"logits", "labels", "vocab_size"} <= match.operands.keys()
