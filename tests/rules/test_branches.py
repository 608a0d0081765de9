"""Norms that follow a residual past a branch are fused with it, and the numbers stay the same."""

from __future__ import annotations

import re

import pytest
import torch

from tests.marks import all_but
from tests.numbers import Case, compare, prepare

SCHEDULE = """\
from transformers import {config}


def model(m):
    return m.{cls}({config}({sizes}))


verify_model = model


def schedule(s):
    s.apply("residual_layer_norm"{given})
"""
OPT = (
    "vocab_size=61, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=2, "
    "num_attention_heads=2, max_position_embeddings=32, do_layer_norm_before=False, dropout=0.0"
)
PEGASUS = (
    "vocab_size=61, d_model=16, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=32, "
    "decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0, "
    "max_position_embeddings=32"
)
XGLM = (
    "vocab_size=61, d_model=16, ffn_dim=32, num_layers=2, attention_heads=2, dropout=0.0, "
    "attention_dropout=0.0, max_position_embeddings=32"
)
BIOGPT = (
    "vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, "
    "intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0, "
    "attention_probs_dropout_prob=0.0"
)
GPT2 = (
    "vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, "
    "embd_pdrop=0.0, attn_pdrop=0.0"
)
# The class, its sizes, what arguments are, and how many norms are fused with a sum.
MODELS = {
    "opt": ("OPTForCausalLM", OPT, "", 1),
    "pegasus": (
        "PegasusForConditionalGeneration",
        PEGASUS,
        ', concrete_args={"encoder_hidden_states": True}',
        4,
    ),
    "xglm": ("XGLMForCausalLM", XGLM, ', concrete_args={"encoder_hidden_states": None}', 2),
    "biogpt": ("BioGptForCausalLM", BIOGPT, "", 1),
    "gpt2": ("GPT2LMHeadModel", GPT2, ', concrete_args={"encoder_hidden_states": None}', 2),
}


@pytest.fixture
def double():
    """Constants that a model makes are in double precision as well: XGLM's mask has to be."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", all_but(["gpt2"], MODELS))
def test_transformers(family, tmp_path):
    cls, sizes, given, fused = MODELS[family]
    config = re.sub("LMHeadModel|For.*", "Config", cls)
    schedule = SCHEDULE.format(config=config, cls=cls, sizes=sizes, given=given)
    source = f"transformers.models.{family}.modeling_{family}"
    cases = {family: Case(source, schedule)}
    prepare(tmp_path, cases)
    compare(tmp_path, cases)
    text = (tmp_path / f"{family}_out" / f"modeling_{family}.py").read_text()
    assert len(re.findall(r"= (?:residual|add)_layer_norm\(", text)) == fused
