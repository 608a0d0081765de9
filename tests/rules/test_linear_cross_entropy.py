"""Losses without logits in transformers' models: the original's, for all arguments."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.fusion.match_rules import look
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.verify.run import verify
from tests import finding
from tests.marks import all_but
from tests.rewriting import imported, written

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5 = {
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
    "vocab_size": 61,
    "d_model": 16,
    "d_ff": 24,
    "d_kv": 4,
    "num_layers": 2,
    "num_heads": 4,
}
OPT = {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}


@dataclass(frozen=True)
class Case:
    """A model of transformers.

    Attributes:
        family: The package it is in.
        model: Its class.
        config: How it is made small.
        options: Whether its loss takes those that a trainer gives.
    """

    family: str
    model: str
    config: dict[str, object]
    options: bool = True

    @property
    def source(self) -> str:
        return f"transformers.models.{self.family}.modeling_{self.family}"


CASES = [
    Case("llama", "LlamaForCausalLM", SIZES),
    Case("qwen2", "Qwen2ForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    Case("gemma2", "Gemma2ForCausalLM", {**SIZES, "final_logit_softcapping": 0.5}),
    Case("gpt2", "GPT2LMHeadModel", GPT2),
    Case("opt", "OPTForCausalLM", OPT),
    Case("bert", "BertLMHeadModel", {**SIZES, "is_decoder": True}),
    Case("bert", "BertForMaskedLM", SIZES, options=False),
    Case("t5", "T5ForConditionalGeneration", {**T5, "scale_decoder_outputs": True}, options=False),
]
SCHEDULE = """\
from transformers import {config}


def model(m):
    return m.{model}({config}(**{sizes}))


def schedule(s):
    s.apply("linear_cross_entropy")
"""
LABELS = torch.tensor([[3, -100, 5, 0, 7, 2], [6, 1, 2, -100, 60, -100]])
IDS = LABELS.clamp(min=0)
OPTIONS = {
    "plain": {},
    "items": {"num_items_in_batch": 11},
    "tensor": {"num_items_in_batch": torch.tensor(11)},
    "ignored": {"ignore_index": 5, "labels": IDS},
    "shifted": {"shift_labels": LABELS.flip(1)},
    "nothing": {"labels": torch.full_like(LABELS, -100)},
    "tuple": {"return_dict": False},
    "kept": {"logits_to_keep": 4, "labels": LABELS[:, -4:]},
}


def text(case: Case) -> str:
    config = getattr(importlib.import_module(case.source), case.model).config_class.__name__
    return SCHEDULE.format(config=config, model=case.model, sizes=case.config)


def made(case: Case, module, state=None):
    """A model in double precision that drops nothing."""
    torch.manual_seed(0)
    cls = getattr(module, case.model)
    model = cls(cls.config_class(**case.config)).double()
    for inner in model.modules():
        if isinstance(inner, torch.nn.Dropout):
            inner.p = 0.0
    if state is not None:
        model.load_state_dict(state)
    return model.train()


def step(model, **options):
    """The outputs of a training step, and every gradient."""
    model.zero_grad()
    outputs = model(**{"input_ids": IDS, "labels": LABELS, **options})
    loss = outputs[0]
    loss.backward()
    return outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


FIRST = [CASES[0], CASES[2], CASES[6], CASES[7]]  # losses of several kinds


@pytest.mark.parametrize("case", all_but(FIRST, CASES), ids=lambda case: case.model)
def test_loss_and_gradients(case, tmp_path):
    """In training; and that nothing changes in eval mode, or where no labels are given."""
    (tmp_path / "s.py").write_text(text(case))
    output = rewrite(case.source, str(tmp_path / "s.py"))
    original = made(case, importlib.import_module(case.source))
    model = made(case, imported(written(tmp_path, output)), original.state_dict())
    known = inspect.signature(original.forward).parameters
    for name, options in OPTIONS.items():
        if name == "kept" and "logits_to_keep" not in known:
            continue
        if not case.options and options.keys() & {"ignore_index", "shift_labels"}:
            continue
        (want, gradients), (have, own) = step(original, **options), step(model, **options)
        torch.testing.assert_close(
            have[0], want[0], rtol=1e-6, atol=0, equal_nan=True, check_dtype=False
        )
        torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-8, equal_nan=True)
        if name == "tuple":
            assert len(have) == len(want) - 1, "the logits are left out"
        else:
            assert have.logits is None
    if "decoder_input_ids" not in known:
        with pytest.raises(ValueError, match="batch_size"):
            step(model, labels=LABELS[:, :-1])

    bare = {"input_ids": IDS}
    if "decoder_input_ids" in known:
        bare["decoder_input_ids"] = IDS
    same(original(**bare), model(**bare))
    for one in (original, model):
        one.eval()
    same(original(**bare, labels=LABELS), model(**bare, labels=LABELS))
    if original.can_generate():
        options = {"max_new_tokens": 3, "do_sample": False}
        assert torch.equal(original.generate(IDS, **options), model.generate(IDS, **options))


APPLY = '    s.apply("linear_cross_entropy")\n'
WHOLE = '    s.apply("cross_entropy")\n'
CALL = "F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))"
LOSS = f"loss = {CALL}\n"


@pytest.mark.long
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=lambda case: case.model)
def test_beside_the_kernel_of_whole_logits(case, tmp_path):
    """The loss outside of training may have become that kernel's, before or after."""
    models = []
    for asked in (APPLY + WHOLE, WHOLE + APPLY):
        (tmp_path / "s.py").write_text(text(case).replace(APPLY, asked))
        output = rewrite(case.source, str(tmp_path / "s.py"))
        models.append(output.files[output.model_file].partition("\n")[2])
    assert models[0] == models[1]
    assert len(re.findall(r"loss = (?:causal_lm_)?(?:linear_)?cross_entropy\(", models[0])) == 2


HOMEMADE = {
    "tuple": (LOSS + "return logits, loss", "'0'"),
    "dict": (LOSS + "return {'loss': loss, 'logits': logits}", "'logits'"),
    "at once": (f"return logits, {CALL}", "'0'"),
    "alone": (LOSS + "return loss", None),
    "early": (
        "if labels is None:\n    return logits, None\n" + LOSS + "return logits, loss",
        "'0'",
    ),
    "otherwise": (
        "if labels is None:\n    loss = None\nelse:\n    B, T, C = logits.shape\n"
        "    logits = logits.view(B * T, C)\n    labels = labels.view(B * T)\n"
        "    loss = F.cross_entropy(logits, labels)\nreturn logits, loss",
        "'0'",
    ),
    "masked": ("labels = labels.clamp(max=7)\n" + LOSS + "return logits, loss", "'0'"),
    "scores": (LOSS + "return logits.softmax(-1), loss", "needed for more than the loss, in line"),
    "kept": (
        "self.last = logits\n" + LOSS + "return loss",
        "needed for more than the loss, in line",
    ),
    "written": ("logits[..., 0] = 0\n" + LOSS + "return loss", "needed for more than the loss"),
    "input": ("x.add_(1)\n" + LOSS + "return loss", "overwritten between logits and loss"),
    "doubled": (f"loss = 2 * {CALL}\nreturn loss", "computes more than the loss"),
    "deeper": (
        "if x.dim() > 2:\n    " + LOSS + "return logits, loss",
        "right below `if labels is not",
    ),
}


@pytest.mark.parametrize("written_so", HOMEMADE.values(), ids=HOMEMADE)
def test_homemade(written_so, tmp_path):
    """What may stand around a loss, and what not."""
    body, said = written_so
    source = finding.forward(
        "logits = self.head(x)\n" + body, "self, x, labels=None", "self.head = nn.Linear(8, 11)"
    )
    whole = finding.selection(tmp_path, source)
    looked = look(rules()["linear_cross_entropy"], [whole._nodes[0]], whole._plan.sources)
    if said is None or said.startswith("'"):
        assert not looked.left, looked.left[0].reason
        spread = looked.claims[0].spread
        assert repr(list(spread.absent)) == f"[{said or ''}]"
    else:
        assert said in looked.left[0].reason


SHARD = '    s["model.embed_tokens"].shard("weight", axis=0)\n'
CUT = '    s["model.layers.0"].cut_pipeline_stage()\n'
REFUSED = {
    "the weight is split by another name": (APPLY + SHARD, "SR306", "read as a whole in training"),
    "it was split before": (SHARD + APPLY, "SR309", "`model.embed_tokens.weight` is sharded"),
    "the stages need logits": (APPLY + CUT, "SR306", "which training does not compute"),
    "they did before": (CUT + APPLY, "SR306", "which training does not compute"),
    "there is no loss left": (APPLY + APPLY, "SR309", "the logits are a branch"),
}


@pytest.mark.parametrize("lines", REFUSED.values(), ids=REFUSED)
def test_refused(lines, tmp_path):
    """What would read part of the weight, or logits; both lines of the schedule are named."""
    asked, code, words = lines
    case = CASES[1]
    (tmp_path / "s.py").write_text(text(case).replace(APPLY, asked))
    with pytest.raises(errors.RewriteError, match=words) as caught:
        rewrite(case.source, str(tmp_path / "s.py"))
    assert caught.value.code == code
    said = caught.value.render()
    first = text(case).splitlines().index(APPLY.rstrip()) + 1
    for line in (first, first + 1) if words != "the logits are a branch" else (first + 1,):
        assert f"s.py:{line}:" in said or f"line {line}" in said


KNOBS = ("fuse_head=true", "fuse=true", "ckpt_ratio=0.5")
GPT = Path(__file__).parents[1] / "models"


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "schedule", "left_out"),
    [
        ("transformers.models.bert.modeling_bert", "bert", "logits"),
        (str(GPT / "gpt.py"), str(GPT / "gpt_schedule.py"), "0"),
    ],
    ids=["bert", "gpt"],
)
def test_verified_on_two_ranks(source, schedule, left_out, tmp_path):
    """Beside split layers, the vocabulary being whole; verification knows what is left out."""
    output = rewrite(source, schedule, (*KNOBS, "sequence_parallel=true"))
    write(tmp_path, output.files)
    report = verify(tmp_path, worlds=(2,))
    assert report.ok, report.render()
    assert f"left out: {left_out}" in report.render()


def same(want, have):
    """Logits, and the loss if there is one, to the bit."""
    assert torch.equal(want.logits, have.logits)
    assert (want.loss is None) == (have.loss is None)
    assert want.loss is None or torch.equal(want.loss, have.loss)
