"""Where the rules for rotary embeddings, softmax and losses apply, and the losses' values."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.runtime.kernels.cross_entropy import (
    causal_lm_cross_entropy,
    masked_lm_cross_entropy,
)
from tests.marks import all_but
from tests.rewriting import changed_lines, rewritten

ROTARY = r"rotary\(q, k, cos, sin, unsqueeze_dim\)"
CAUSAL = r"causal_lm_cross_entropy\("
PLACES = {
    ("rotary", "llama", "LlamaForCausalLM"): [ROTARY],
    ("rotary", "qwen3", "Qwen3ForCausalLM"): [ROTARY],
    ("rotary", "gemma2", "Gemma2ForCausalLM"): [ROTARY],
    ("rotary", "phi3", "Phi3ForCausalLM"): [ROTARY],
    ("rotary", "gpt_neox", "GPTNeoXForCausalLM"): [ROTARY],
    ("masked_softmax", "llama", "LlamaForCausalLM"): [
        r"masked_softmax\(torch.matmul\(query, .*g\)"
    ],
    ("masked_softmax", "bert", "BertForMaskedLM"): [r"masked_softmax\(torch.matmul\(query, .*g\)"],
    ("masked_softmax", "gpt2", "GPT2LMHeadModel"): [
        r"masked_softmax\(torch.matmul\(query, .*g\)",
        r"masked_softmax\(attn_weights, attention_mask\)",
    ],
    ("masked_softmax", "t5", "T5ForConditionalGeneration"): [
        r"masked_softmax\(attn_weights, attention_mask\)"
    ],
    ("cross_entropy", "llama", "LlamaForCausalLM"): [CAUSAL],
    ("cross_entropy", "gpt2", "GPT2LMHeadModel"): [CAUSAL],
    ("cross_entropy", "gemma2", "Gemma2ForCausalLM"): [CAUSAL],
    ("cross_entropy", "bert", "BertForMaskedLM"): [r"cross_entropy\(prediction_scores"],
    ("cross_entropy", "bert", "BertLMHeadModel"): [CAUSAL],
    ("cross_entropy", "t5", "T5ForConditionalGeneration"): [r"cross_entropy\(lm_logits"],
}


# One file of each kind that a rule meets.
SHORT = {
    ("rotary", "llama", "LlamaForCausalLM"),
    ("masked_softmax", "gpt2", "GPT2LMHeadModel"),
    ("cross_entropy", "llama", "LlamaForCausalLM"),
    ("cross_entropy", "bert", "BertForMaskedLM"),
    ("cross_entropy", "t5", "T5ForConditionalGeneration"),
}


@pytest.mark.parametrize("case", all_but(SHORT, PLACES), ids="-".join)
def test_places(case, tmp_path):
    """What is written in a model, and how often."""
    rule, family, name = case
    module = f"transformers.models.{family}.modeling_{family}"
    config = getattr(importlib.import_module(module), name).config_class.__name__
    eager = 'attn_implementation="eager"' if rule == "masked_softmax" else ""
    (tmp_path / "s.py").write_text(
        f"""\
from transformers import {config}


def model(m):
    return m.{name}({config}({eager}))


def schedule(s):
    s.apply("{rule}")
"""
    )
    output = rewrite(module, str(tmp_path / "s.py"))
    new = [line for line in output.diff(0).splitlines() if re.match(r"\+ ", line)]
    written = [line for line in new if re.search(rf"{rule}\(", line)]
    assert len(written) == len(PLACES[case])
    for line, wanted in zip(written, PLACES[case], strict=True):
        assert re.search(wanted, line)


def test_another_attention_is_said(tmp_path):
    schedule = """\
from transformers import LlamaConfig


def model(m):
    return m.LlamaForCausalLM(LlamaConfig())


def schedule(s):
    s.apply("masked_softmax")
"""
    (tmp_path / "s.py").write_text(schedule)
    with pytest.raises(errors.NoMatch, match="attends by 'sdpa'"):
        rewrite("transformers.models.llama.modeling_llama", str(tmp_path / "s.py"))


LABELS = torch.tensor([[3, -100, 5, 0, -100], [6, 1, 2, -100, 4]])
OPTIONS = {
    "plain": {},
    "num_items": {"num_items_in_batch": 11},
    "tensor": {"num_items_in_batch": torch.tensor(11)},
    "ignored": {"ignore_index": 5, "labels": LABELS.clamp(min=0)},
    "shifted": {"shift_labels": LABELS.flip(1)},
    "nothing": {"labels": torch.full_like(LABELS, -100)},
    "further": {"return_dict": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "losses",
    [(ForCausalLMLoss, causal_lm_cross_entropy), (ForMaskedLMLoss, masked_lm_cross_entropy)],
    ids=["causal", "masked"],
)
def test_losses_of_transformers(losses, options):
    """The same numbers and gradients, whatever the trainer gives."""
    found = []
    for loss in losses:
        torch.manual_seed(0)
        logits = torch.randn(2, 5, 7, requires_grad=True)
        value = loss(**{"logits": logits, "labels": LABELS, "vocab_size": 7, **options})
        value.backward()
        found.append((value.detach(), logits.grad))
    torch.testing.assert_close(*found, equal_nan=True)


SPLIT = """\
import torch


def model(m):
    return m.Tagger(8, 11)


def inputs(model):
    return {"x": torch.randn(2, 6, 8), "labels": torch.arange(12).view(2, 6) % 11}


def loss(outputs):
    return outputs[0]


def schedule(s):
    s.apply("cross_entropy")
    s["head"].shard(["weight", "bias"], axis=0)
    s["head"].sync("bwd_post", "all_reduce")
"""


def test_a_parallel_loss_takes_the_place_of_a_fused_one(tmp_path):
    """Where the head is split afterwards; nothing is left of the kernel then."""
    source = rules()["cross_entropy"].examples[0].source
    assert (
        changed_lines(rewritten(tmp_path, source, SPLIT))
        == """\
-from torch.nn import CrossEntropyLoss
+from .tensor_parallel import ColumnParallelLinear
+from .vocab_parallel_loss import vocab_parallel_cross_entropy, whole_logits
-        self.head = nn.Linear(width, classes)
+        self.head = ColumnParallelLinear(width, classes)
-            loss_fct = CrossEntropyLoss()
-            loss = loss_fct(logits.view(-1, logits.size(-1)), labels.view(-1))
+            loss = vocab_parallel_cross_entropy(
+                logits.view(-1, logits.size(-1)), labels.view(-1), head=self.head
+            )
+        if labels is None or not self.training:
+            logits = whole_logits(logits, self.head)
"""
    )
