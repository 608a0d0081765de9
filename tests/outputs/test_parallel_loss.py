"""A loss of logits that stay split over the vocabulary, in the forms that models use."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify
from tests.marks import long
from tests.processes import run
from tests.rewriting import changed_lines, refused, rewritten

SOURCE = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, width=8, vocabulary=30):
        super().__init__()
        self.vocabulary = {"size": vocabulary}
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.criterion = nn.CrossEntropyLoss(ignore_index=-1)

    def forward(self, ids, labels=None):
        logits = self.head(self.embedding(ids))
BODY
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    ids = torch.randint(30, (2, 5))
    return {"ids": ids, "labels": ids}


def loss(outputs):
    return outputs[0]


def schedule(s):
    s["embedding"].shard("weight", axis=0)
    s["embedding"].sync("fwd_post", "all_reduce")
    s["head"].shard("weight", axis=0)
    s["head"].sync("bwd_post", "all_reduce")
"""
GATHER = "logits = whole_logits(logits, self.head)"
EVALUATED = f"if not self.training:\n    {GATHER}"
WAITED = f"if labels is None or not self.training:\n    {GATHER}"


def model(body: str) -> str:
    """The model with the rest of its `forward`."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return SOURCE.replace("BODY\n", lines)


FORMS = {
    "a function": (
        "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)\n"
        "return loss, logits",
        "loss = vocab_parallel_cross_entropy(\n"
        "    logits.flatten(0, 1), labels.flatten(), ignore_index=-1, "
        f"head=self.head\n)\n{EVALUATED}\nreturn loss, logits",
    ),
    "a criterion made here, uneven parts": (
        "loss = None\nif labels is not None:\n    loss_fct = nn.CrossEntropyLoss()  # mean\n"
        '    loss = loss_fct(logits.view(-1, self.vocabulary["size"]), labels.view(-1))  # all\n'
        "return loss, logits",
        "loss = None\nif labels is not None:\n    loss_fct = nn.CrossEntropyLoss()  # mean\n"
        "    loss = vocab_parallel_criterion(\n"
        "        loss_fct,\n        logits.view(-1, logits.shape[-1]),\n"
        f"        labels.view(-1),\n        head=self.head,\n    )  # all\n"
        f"{WAITED}\nreturn loss, logits",
    ),
    "a criterion made with the model, shifted logits": (
        "if labels is None:\n    loss = None\nelse:\n    shifted = logits[:, :-1].contiguous()\n"
        '    loss = self.criterion(shifted.view(-1, self.vocabulary["size"]), '
        "labels[:, 1:].reshape(-1))\n"
        "return loss, logits",
        "if labels is None:\n    loss = None\n"
        "else:\n    shifted = logits[:, :-1].contiguous()\n"
        "    loss = vocab_parallel_criterion(\n        self.criterion,\n"
        "        shifted.view(-1, shifted.shape[-1]),\n        labels[:, 1:].reshape(-1),\n"
        f"        head=self.head,\n    )\n{WAITED}\nreturn loss, logits",
    ),
    "an expression, soft-capped logits, classes on axis 1": (
        "logits = 30 * torch.tanh(logits / 30)\n"
        "loss = F.cross_entropy(logits.transpose(1, 2), labels) if labels is not None else None\n"
        "return loss, logits",
        "logits = 30 * torch.tanh(logits / 30)\n"
        "loss = (\n    vocab_parallel_cross_entropy(\n"
        f"        logits.transpose(1, 2), labels, head=self.head\n    )\n"
        "    if labels is not None\n    else None\n)\n"
        f"{WAITED}\nreturn loss, logits",
    ),
    "logits of their own without a loss": (
        "if labels is not None:\n"
        "    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))\n"
        "else:\n    logits = logits[:, [-1]]\n    loss = None\n"
        "return loss, logits",
        "if labels is not None:\n    loss = vocab_parallel_cross_entropy(\n"
        f"        logits.view(-1, logits.size(-1)), labels.view(-1), head=self.head\n    )\n"
        f"    if not self.training:\n        {GATHER}\n"
        f"else:\n    logits = logits[:, [-1]]\n    {GATHER}\n    loss = None\n"
        "return loss, logits",
    ),
    "weights of classes": (
        "return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), torch.ones(30)), logits",
        f"{EVALUATED}\nreturn vocab_parallel_cross_entropy(\n    logits.flatten(0, 1), "
        "labels.flatten(), torch.ones(30), head=self.head\n), logits",
    ),
    "an expression that is returned": (
        "return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) "
        "if labels is not None else None, logits",
        f"{WAITED}\nreturn (vocab_parallel_cross_entropy(logits.flatten(0, 1), labels.flatten(), "
        "head=self.head) if labels is not None else None), logits",
    ),
    "returned in a branch": (
        "if labels is not None:\n"
        "    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits\n"
        "return None, logits",
        "if labels is not None:\n    if not self.training:\n"
        f"        {GATHER}\n    return vocab_parallel_cross_entropy("
        "logits.flatten(0, 1), labels.flatten(), head=self.head), logits\n"
        f"if labels is None:\n    {GATHER}\nreturn None, logits",
    ),
    "an early return": (
        "if labels is None:\n    return None, logits\n"
        "return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits",
        f"if labels is None:\n    {GATHER}\n    return None, logits\n{EVALUATED}\n"
        "return vocab_parallel_cross_entropy(\n"
        f"    logits.flatten(0, 1), labels.flatten(), head=self.head\n), logits",
    ),
    "other conditions": (
        "if labels is not None:\n"
        "    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
        "elif self.training:\n    loss = 0\nelse:\n    loss = 1\n"
        "return loss, logits",
        "if labels is not None:\n    loss = vocab_parallel_cross_entropy(\n"
        f"        logits.flatten(0, 1), labels.flatten(), head=self.head,\n    )\n"
        "elif self.training:\n    loss = 0\nelse:\n    loss = 1\n"
        f"{WAITED}\nreturn loss, logits",
    ),
    "labels that become others": (
        "loss = None\nif labels is not None:\n    labels = labels.clip(0)\n"
        "    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
        "return loss, logits",
        "loss = None\nif labels is not None:\n    labels = labels.clip(0)\n"
        "    loss = vocab_parallel_cross_entropy(\n"
        f"        logits.flatten(0, 1), labels.flatten(), head=self.head\n    )\n"
        f"    if not self.training:\n        {GATHER}\nelse:\n    {GATHER}\n"
        "return loss, logits",
    ),
    "two losses, one after the other": (
        "if labels is not None:\n"
        "    labels = labels.to(logits.device)\n"
        "    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
        "    loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
        "return loss, logits",
        "if labels is not None:\n"
        "    labels = labels.to(logits.device)\n"
        "    loss = vocab_parallel_cross_entropy(\n"
        f"        logits.flatten(0, 1), labels.flatten(), head=self.head\n    )\n"
        "    loss = loss + vocab_parallel_cross_entropy(\n"
        f"        logits.flatten(0, 1), labels.flatten(), head=self.head\n    )\n"
        f"{WAITED}\nreturn loss, logits",
    ),
    "two losses, one or the other": (
        "if self.training:\n"
        "    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)\n"
        "else:\n    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
        "return loss, logits",
        "if self.training:\n    loss = vocab_parallel_cross_entropy(logits.flatten(0, 1), "
        f"labels.flatten(), label_smoothing=0.1, head=self.head)\n"
        "else:\n    loss = vocab_parallel_cross_entropy("
        f"logits.flatten(0, 1), labels.flatten(), head=self.head)\n"
        f"{EVALUATED}\nreturn loss, logits",
    ),
    "logits that nobody else wants": (
        "if labels is not None:\n"
        "    return (F.cross_entropy(logits.flatten(0, 1), labels.flatten()),)\n"
        "return (None,)",
        "if labels is not None:\n"
        "    return (vocab_parallel_cross_entropy(logits.flatten(0, 1), labels.flatten(), "
        "head=self.head),)\nreturn (None,)",
    ),
}


def forward(text: str) -> str:
    """The statements of `forward`, whatever their layout."""
    return next(
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == "forward"
    )


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, tmp_path):
    before, after = FORMS[form]
    output = rewritten(tmp_path, model(before), SCHEDULE)
    text = output.files[output.model_file]
    assert forward(text) == forward(model(after))
    assert re.findall("# .*", text) == re.findall("# .*", before)
    gathers = after.count("whole_logits")
    assert text.count("whole_logits") == gathers + bool(gathers), "imported where used"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), "
            "weight=logits[0, 0].detach()), logits",
            "takes split weights of its classes",
        ),
        (
            "return F.cross_entropy(logits.flatten(0, 1), torch.ones(10, 30)), logits",
            "takes probabilities of its classes",
        ),
        (
            "return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()), logits",
            "`log_softmax` needs the whole axis",
        ),
        (
            "logits = logits / logits.norm(dim=-1, keepdim=True)\n"
            "return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits",
            "`norm` needs the whole axis",
        ),
        (
            "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
            "return loss, logits.softmax(-1)",
            "`softmax` needs the whole axis",
        ),
        (
            "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
            "return loss, logits.relu()",
            "on a rank instead of",
        ),
    ],
)
def test_whatever_else_needs_whole_logits_is_refused(body, words, tmp_path):
    text = refused(tmp_path, model(body), SCHEDULE, "SR104")
    assert words in text and 'sync("fwd_post", "all_gather", axis=-1)' in text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), None, None), logits",
            "takes logits, targets, weights of classes, and by name",
        ),
        (
            "if labels is not None:\n"
            "    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
            "elif self.training:\n    loss = logits[0, 0, 0]\nelse:\n    loss = 1\n"
            "return loss, logits",
            "other conditions follow",
        ),
        (
            "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
            "if self.training:\n"
            "    loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten())\n"
            "return loss, logits",
            "some of the losses of these logits are skipped if this condition is false",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(body, words, tmp_path):
    text = refused(tmp_path, model(body), SCHEDULE, "SR305")
    assert words in text and "gather the logits instead" in text


def test_inferred_syncs_leave_the_logits_whole(tmp_path):
    """What the model returns stays what it was, unless the schedule asks for parts."""
    before, _ = FORMS["a function"]
    schedule = SCHEDULE.replace('    s["head"].sync("bwd_post", "all_reduce")\n', "")
    text = changed_lines(rewritten(tmp_path, model(before), schedule + "    s.infer_sync()\n"))
    assert "gather_output=True" in text and "vocab_parallel" not in text
    text = changed_lines(rewritten(tmp_path, model(before), SCHEDULE + "    s.infer_sync()\n"))
    assert "gather_output" not in text and "vocab_parallel_cross_entropy(" in text


@pytest.mark.parametrize(
    ("name", "made", "head", "function"),
    [
        ("opt", "OPTForCausalLM(OPTConfig(num_hidden_layers=2))", "lm_head", "causal_lm_loss"),
        long("gemma2", "Gemma2ForCausalLM(Gemma2Config())", "lm_head", "causal_lm_loss"),
        long("roberta", "RobertaForCausalLM(RobertaConfig())", "lm_head.decoder", "causal_lm_loss"),
        ("modernbert", "ModernBertForMaskedLM(ModernBertConfig())", "decoder", "masked_lm_loss"),
    ],
)
def test_the_loss_functions_of_transformers(name, made, head, function, tmp_path):
    config = made.partition("(")[2].partition("(")[0]
    names = ["weight", "bias"] if "decoder" in head else ["weight"]
    (tmp_path / "s.py").write_text(
        f"from transformers import {config}\n\n\ndef model(m):\n    return m.{made}\n\n\n"
        f'def schedule(s):\n    s["{head}"].shard({names}, axis=0)\n'
        f'    s["{head}"].sync("bwd_post", "all_reduce")\n    s.infer_sync()\n'
    )
    source = f"transformers.models.{name}.modeling_{name}"
    text = changed_lines(rewrite(source, str(tmp_path / "s.py")))
    assert f"loss = {function}(" in text
    assert f"+            logits = whole_logits(logits, self.{head})" in text


@pytest.mark.parametrize("told", ["{}", "vocab_size={}"])
def test_a_loss_is_told_of_all_classes_where_the_layer_says_those_of_its_part(told, tmp_path):
    size = "self.head.out_features"
    body = f"return ForMaskedLMLoss(logits, labels, {told.format(size)}), logits"
    source = "from transformers.loss.loss_utils import ForMaskedLMLoss\n" + model(body)
    text = changed_lines(rewritten(tmp_path, source, SCHEDULE))
    assert f"masked_lm_loss(logits, labels, {told.format('self.head.full_out_features')})" in text
    unpacked = source.replace(told.format(size), f"**{{'vocab_size': {size}}}")
    assert "write `vocab_size=` in the call" in refused(tmp_path, unpacked, SCHEDULE, "SR305")


CASES = {
    "bert": ("transformers.models.bert.modeling_bert", "bert"),
    "llama": ("transformers.models.llama.modeling_llama", "llama"),
    "t5": ("transformers.models.t5.modeling_t5", "t5"),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, made) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    for name, (source, schedule) in CASES.items():
        settings = ["ckpt_ratio=0.5"]
        write(folder / f"{name}_parallel", made(source, schedule, settings).files)
    return folder


def check_models(folder: str) -> None:
    """Losses, gradients accumulated over two batches; logits without labels, and in eval mode."""
    from slapo_rewrite.schedule.load import ScheduleFile

    sys.path.insert(0, folder)
    for name, (source, schedule) in CASES.items():
        build = ScheduleFile.load(schedule).module.verify_model
        torch.manual_seed(0)
        original = build(importlib.import_module(source)).double().train()
        package = f"{name}_parallel"
        loading = importlib.import_module(f"{package}.loading")
        rewritten = build(importlib.import_module(f"{package}.modeling_{name}")).double().train()
        rewritten.load_state_dict(original.state_dict())
        ids = torch.randint(2, 203, (4, 9), generator=torch.Generator().manual_seed(1))
        labels = ids.masked_fill(ids % 3 == 0, -100)
        counted = {"num_items_in_batch": 11} if name == "llama" else {}
        losses, decoding = [], name == "t5"
        for model in (original, rewritten):
            for rows in (slice(0, 1), slice(1, 4)):
                extra = {"decoder_input_ids": ids[rows]} if decoding else counted
                loss = model(input_ids=ids[rows], labels=labels[rows], **extra).loss
                loss.backward()
                losses.append(loss.detach())
        torch.testing.assert_close(losses[:2], losses[2:], rtol=1e-6, atol=1e-6)
        want = {n: p.grad for n, p in original.named_parameters()}
        got = loading.to_full(rewritten, {n: p.grad for n, p in rewritten.named_parameters()})
        assert want.keys() == got.keys()
        for key, gradient in want.items():
            torch.testing.assert_close(got[key], gradient, rtol=1e-5, atol=1e-6, msg=key)
        extra = {"decoder_input_ids": ids} if decoding else {}
        for given in ({}, {"labels": labels}):
            with torch.no_grad():
                logits = [m(input_ids=ids, **given, **extra).logits for m in (original, rewritten)]
            torch.testing.assert_close(logits[1], logits[0], rtol=1e-6, atol=1e-6)
            original.eval(), rewritten.eval()


@pytest.mark.processes
@pytest.mark.parametrize("world", [long(1), 2, long(4)])
def test_models_of_transformers(outputs, world):
    run(check_models, world, str(outputs))


@pytest.mark.processes
def test_verification_looks_at_outputs_without_labels(tmp_path):
    settings = ["parallel_loss=true"]
    output = rewrite("tests/models/gpt.py", "tests/models/gpt_schedule.py", settings)
    gather = "            logits = whole_logits(logits, self.lm_head)\n"
    text = output.files["gpt.py"]
    write(tmp_path / "out", {**output.files, "gpt.py": text.replace(gather, "", 1)})
    report = verify(tmp_path / "out", [2])
    assert {row.name for row in report.rows if not row.ok} == {"outputs without targets"}
