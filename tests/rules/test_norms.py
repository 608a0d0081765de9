"""Norms, gated units, activations and dropout in transformers' own files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping

import pytest

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.locate import locate
from slapo_rewrite.fusion.match_rules import look
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Tree, build_model
from tests.marks import all_but
from tests.rewriting import rewritten

RULES = (
    *("rms_norm", "residual_rms_norm", "residual_layer_norm", "dropout_residual"),
    *("swiglu", "geglu", "reglu", "activation_dropout", "quick_gelu", "bias_gelu"),
)
POST_NORM = {"residual_layer_norm": 2, "dropout_residual": 2}
LLAMA = {"rms_norm": 1, "residual_rms_norm": 1, "swiglu": 1}
# The class, what is set of its configuration, and at how many places each rule is taken.
PLACES: Mapping[str, tuple[str, Mapping[str, object], Mapping[str, int]]] = {
    "bert": ("BertForMaskedLM", {}, {**POST_NORM, "bias_gelu": 2}),
    "roberta": ("RobertaForMaskedLM", {}, {**POST_NORM, "bias_gelu": 1}),
    "gpt2": ("GPT2LMHeadModel", {}, {"bias_gelu": 1}),
    "gpt_neo": ("GPTNeoForCausalLM", {}, {"residual_layer_norm": 1, "bias_gelu": 1}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}, {"residual_layer_norm": 1, "bias_gelu": 1}),
    "opt": ("OPTForCausalLM", {}, {"dropout_residual": 2}),
    "llama": ("LlamaForCausalLM", {}, LLAMA),
    "mistral": ("MistralForCausalLM", {}, LLAMA),
    "qwen2": ("Qwen2ForCausalLM", {}, LLAMA),
    "gemma": ("GemmaForCausalLM", {}, {"rms_norm": 1, "residual_rms_norm": 1, "geglu": 1}),
    "olmo2": ("Olmo2ForCausalLM", {}, {"rms_norm": 1, "swiglu": 1}),
    "phi3": ("Phi3ForCausalLM", {}, LLAMA),
    "t5": (
        "T5ForConditionalGeneration",
        {},
        {"rms_norm": 1, "dropout_residual": 3, "activation_dropout": 1},
    ),
    "t5 1.1": (
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-gelu"},
        {"rms_norm": 1, "dropout_residual": 3, "geglu": 1},
    ),
    "bart": (
        "BartForConditionalGeneration",
        {},
        {"residual_layer_norm": 7, "dropout_residual": 5, "bias_gelu": 2},
    ),
    "pegasus": (
        "PegasusForConditionalGeneration",
        {},
        {"residual_layer_norm": 1, "dropout_residual": 5, "bias_gelu": 2},
    ),
    "vit": ("ViTForImageClassification", {}, {"residual_layer_norm": 1, "bias_gelu": 1}),
}


@pytest.mark.parametrize("name", all_but({"bert", "gpt2", "llama", "t5", "bart"}, PLACES))
def test_places(name):
    cls, options, expected = PLACES[name]
    family = name.partition(" ")[0]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    make = getattr(module, cls)
    config = make.config_class(**options)
    tree = Tree(build_model(lambda _: make(config), sys))
    sources = Sources(SourceFile.read(*locate(module.__name__)))
    found = {}
    for rule in RULES:
        looked = look(rules()[rule], tree.root.walk(), sources)
        places = {id(claim.match.replaced.node) for claim in looked.claims}
        assert all(claim.match.replaced.whole for claim in looked.claims)
        if places:
            found[rule] = len(places)
    assert found == expected


def test_blank_lines_go_with_the_statements_between_them(tmp_path):
    (example,) = (e for e in rules()["rms_norm"].examples if "convert into" in e.source)
    output = rewritten(tmp_path, example.source, example.schedule)
    (name,) = (name for name in output.files if name.startswith("source_"))
    assert output.files[name].endswith("""\
    def forward(self, hidden_states):
        # Only scales, and does not shift.

        # convert into half-precision if necessary
        return rms_norm(hidden_states, self.weight, self.eps, cast="weight")
""")


LISTED_NORMS = """\
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        h = self.norms[0](x)
        h = x + self.fc(h)
        return h + self.norms[1](h)
"""


def test_a_norm_in_a_list_is_named_by_its_number(tmp_path):
    schedule = "def model(m):\n    return m.Block()\n\n\ndef schedule(s):\n    s.apply_all()\n"
    output = rewritten(tmp_path, LISTED_NORMS, schedule)
    assert "self.norms[1].weight, self.norms[1].bias" in " ".join(
        output.files[output.model_file].split()
    )
