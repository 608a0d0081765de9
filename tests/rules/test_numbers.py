"""Fused models against their originals, outputs and every gradient, on one rank and on two."""

from __future__ import annotations

import pytest

from slapo_rewrite.schedule.load import bundled
from tests.marks import long
from tests.numbers import Case, compare, prepare
from tests.processes import run

PARTS = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        residual = x
        x = self.norm(x)
        gated = F.silu(self.gate(x))  # in float32
        x = self.down(gated * self.up(x))
        x = x * 0.5
        return x + residual


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
SCHEDULE = '''\
import torch
import torch.nn.functional as F


def model(m):
    return m.Net(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def swiglu(gate, up):
    return F.silu(gate) * up


def half_residual(x, residual):
    return x * 0.5 + residual


def scaled_sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Half of one, and all of the other."""
    return torch.add(other, one, alpha=0.5)


def schedule(s):
    blocks = s["blocks"]
    s["blocks.0"].fuse(swiglu, compiler="triton")
    s["blocks.1"].fuse(swiglu)
    s["blocks.2"].fuse(swiglu, name="gate_and_up")
    blocks[1:].replace(scaled_sum, half_residual)
    for name in ("gate", "up"):
        s[f"blocks.*.{name}"].shard(["weight", "bias"], axis=0)
        s[f"blocks.*.{name}"].sync("bwd_post", "all_reduce")
    s["blocks.*.down"].shard("weight", axis=1)
    s["blocks.*.down"].sync("fwd_post", "all_reduce")
    blocks[:2].checkpoint()
'''


def fused(name: str) -> str:
    """A bundled schedule that fuses first, half of the layers checkpointed."""
    text = bundled()[name].read_text()
    for knob, value in (
        ("fuse: bool = False", "True"),
        ("sequence_parallel: bool = False", "True"),
        ("ckpt_ratio: float = 0.0", "0.5"),
    ):
        text = text.replace(knob, f"{knob.rpartition(' ')[0]} {value}")
    if "layers[0]" in text:  # beside it a share is written by numbers, with a warning
        text = text.replace("[:ckpt_ratio]", '[: round(ckpt_ratio * len(layers["*"]))]')
    return text


PACKED = """\
from torch import nn
from transformers import LlamaConfig


def model(m):
    return m.LlamaForCausalLM(
        LlamaConfig(
            vocab_size=53,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_bias=True,
        )
    )


verify_model = model


def schedule(s):
    layers = s["model.layers"]
    layers[1:2]["self_attn"].replace(nn.Linear, "[qkv]_proj", name="qkv_proj")
    layers[2:].apply("pack_qkv")
    s.apply("pack_gate_up")
    s.apply_all()
    layers[0]["self_attn.{q_proj,k_proj,v_proj}"].shard(["weight", "bias"], axis=0)
    layers[0]["self_attn.{q_proj,k_proj,v_proj}"].sync("bwd_post", "all_reduce")
    packed = layers[1:]["self_attn.qkv_proj"]
    packed.shard(["weight", "bias"], axis=0, parts=[32, 8, 8])
    packed.sync("bwd_post", "all_reduce")
    layers["*.self_attn.o_proj"].shard("weight", axis=1)
    layers["*.self_attn.o_proj"].sync("fwd_post", "all_reduce")
    mlps = s["model.layers.*.mlp"]
    mlps["gate_up_proj"].shard("weight", axis=0, parts=2)
    mlps["gate_up_proj"].sync("bwd_post", "all_reduce")
    mlps["down_proj"].shard("weight", axis=1)
    mlps["down_proj"].sync("fwd_post", "all_reduce")
    layers[:2].checkpoint()
"""

PACKED_BERT = """\
from transformers import BertConfig


def model(m):
    return m.BertForMaskedLM(
        BertConfig(
            vocab_size=53,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


verify_model = model


def schedule(s):
    s.apply("pack_qkv")
    s["**.self.qkv_proj"].shard(["weight", "bias"], axis=0, parts=3)
    s["**.attention.output.dense"].shard("weight", axis=1)
    s["**.attention.self"].fork_rng()
    s.infer_sync()
"""

# Norms are computed in float32 by the model itself.
CASES = {
    "packed": Case("transformers.models.llama.modeling_llama", PACKED, 1e-6),
    "packed_bert": Case("transformers.models.bert.modeling_bert", PACKED_BERT),
    "parts": Case(PARTS, SCHEDULE),
    **{
        name: Case(f"transformers.models.{name}.modeling_{name}", fused(name), 1e-6)
        for name in ("bert", "gpt2", "llama", "t5")
    },
    "gated": Case(
        "transformers.models.t5.modeling_t5",
        fused("t5")
        .replace("v,wi}", "v,wi_0,wi_1}")
        .replace('"**.wi"', '"**.{wi_0,wi_1}"')
        .replace("T5Config(", "T5Config(feed_forward_proj='gated-gelu', "),
        1e-6,
    ),
}
# Kernels that read the parameters of a norm that is no longer called are among them.
TAKEN = {
    "bert": ("add_layer_norm", "linear_gelu", "linear_each"),
    "llama": ("residual_rms_norm", "rms_norm", "swiglu"),
    "t5": ("rms_norm", "dropout_residual", "activation_dropout"),
    "gated": ("rms_norm", "dropout_residual", "geglu"),
}


FURTHER = ("packed_bert", "gpt2", "t5")


@pytest.mark.processes
@pytest.mark.parametrize("names", [set(CASES) - set(FURTHER), long(FURTHER)], ids=["", "further"])
def test_the_numbers_are_the_originals(names, tmp_path):
    cases = {name: CASES[name] for name in CASES if name in names}
    prepare(tmp_path, cases)
    for name in TAKEN.keys() & cases:
        text = (tmp_path / f"{name}_out" / "kernels.py").read_text()
        for kernel in TAKEN[name]:
            assert f"\ndef {kernel}(" in text, (name, kernel)
    for world in (1, 2):
        run(compare, world, tmp_path, cases)
