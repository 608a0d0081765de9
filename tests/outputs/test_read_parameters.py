"""Whole parameters that are used on parts, and read by another module than their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marks import long
from tests.numbers import Case, compare, prepare
from tests.outputs.test_sequence_parallel import GPT, SCHEDULE, switched_on
from tests.processes import run
from tests.rewriting import SPLITTING, refused, rewritten

ROOT = Path(__file__).resolve().parents[2]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """The text with some of it written otherwise."""
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


# Of a block's second norm the parameters are read, under another name for the module too; the first
# one is called and read. Its like are read in a loop of the model.
READING = replaced(
    GPT,
    (
        "        x = x + self.mlp(self.ln_2(x))\n",
        """\
        norm = self.ln_2
        if norm.weight.dtype != x.dtype and isinstance(norm.weight, nn.Parameter):
            x = x.to(norm.weight.dtype)
        scale = norm.weight if hasattr(norm, "weight") else None
        x = x + self.mlp(F.layer_norm(x, norm.normalized_shape, scale, self.ln_2.bias))
        x = x * self.ln_1.weight.exp()
""",
    ),
    (
        "            x = block(x)\n",
        "            x = block(x) + (block.ln_1.bias + block.ln_2.bias)\n",
    ),
)
PATTERNS = '''
import torch.nn.functional as F
from torch import Tensor


def norm_of_sum(x, residual, shape, weight, bias, eps):
    return F.layer_norm(x + residual, shape, weight, bias, eps)


def norm(x, shape, weight, bias, eps):
    return F.layer_norm(x, shape, weight, bias, eps)


def normed(x: Tensor, residual: Tensor, shape, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The norm of a sum."""
    return F.layer_norm(x + residual, shape, weight, bias, eps)


def normed_alone(x: Tensor, shape, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The norm."""
    return F.layer_norm(x, shape, weight, bias, eps)


def model('''


def case(name: str, line: str) -> Case:
    """A model of transformers, all of its schedule switched on, and something replaced first."""
    text = switched_on((ROOT / f"rules/schedules/{name}.py").read_text())
    before, start, body = text.partition('    """Splits')
    text = replaced(before, ("\ndef model(", PATTERNS)) + f"    {line}\n" + start + body
    # LlamaRMSNorm and the loss of causal models compute in float32.
    limit = 1e-10 if name == "bert" else 1e-6
    return Case(f"transformers.models.{name}.modeling_{name}", text, limit)


LOOP = """\
        for row in self.ln_2.weight[None]:
            x = x + self.mlp(x * row)"""
CASES = {
    "reading": Case(READING, switched_on(SCHEDULE)),
    "gpt2": case("gpt2", 's["transformer.h.*"].replace(normed_alone, norm)'),
    "bert": case(
        "bert", 's["bert.encoder.layer.*.{attention.output,output}"].replace(normed, norm_of_sum)'
    ),
    "llama": case("llama", 's.apply("residual_rms_norm")'),
    "at the head of a loop": Case(
        replaced(GPT, ("        x = x + self.mlp(self.ln_2(x))", LOOP)), switched_on(SCHEDULE)
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("read")
    prepare(path, CASES)
    return path


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "names"), [long(1, ["reading"]), (2, CASES), long(4, ["reading", "llama"])]
)
def test_numbers(folder, world, names):
    run(compare, world, folder, {name: CASES[name] for name in names})


def test_a_class_that_is_called_no_more_is_left_as_it_is(folder):
    """Where a norm is not called, no layer of ours takes its place."""
    text = (folder / "gpt2_out/modeling_gpt2.py").read_text()
    assert text.count("ReplicatedLayerNorm(") == 1 and "self.ln_f = ReplicatedLayerNorm(" in text
    text = (folder / "bert_out/modeling_bert.py").read_text()
    assert "Replicated" not in text and text.count("all_reduce_gradient(self.LayerNorm.bias)") == 2
    text = (folder / "llama_out/modeling_llama.py").read_text()
    assert "class ReplicatedLlamaRMSNorm" not in text  # one text serves both
    assert text.count("all_reduce_gradient(self.post_attention_layernorm.weight)") == 1


def test_the_text_stays_readable(folder):
    text = (folder / "reading_out/reading_original.py").read_text()
    assert "if norm.weight.dtype != x.dtype and isinstance(norm.weight, nn.Parameter):" in text
    assert 'scale = all_reduce_gradient(norm.weight) if hasattr(norm, "weight") else None' in text
    assert "self.ln_1 = ReplicatedLayerNorm(config.n_embd)" in text
    assert "self.ln_2 = nn.LayerNorm(config.n_embd)" in text
    assert "all_reduce_gradient(block.ln_1.bias) + all_reduce_gradient(block.ln_2.bias)" in text


@pytest.mark.parametrize(
    ("pairs", "words", "line"),
    [
        (  # in a function beside the class
            (
                (
                    "class Block(",
                    "def norm(x, layer):\n"
                    "    return F.layer_norm(x, layer.normalized_shape, layer.weight)\n\n\n"
                    "class Block(",
                ),
                ("self.mlp(self.ln_2(x))", "self.mlp(norm(x, self.ln_2))"),
            ),
            "this is not a statement of a module's method",
            "layer.weight",
        ),
        (  # without its name
            (("self.mlp(self.ln_2(x))", 'self.mlp(x) * getattr(self.ln_2, "weight")'),),
            "this is not a statement of a module's method",
            "getattr(self.ln_2",
        ),
        (  # two at one place
            (
                (
                    "        x = self.transformer.drop(",
                    "        norms = (self.transformer.ln_f, self.extra)\n"
                    "        scale = [norm.weight for norm in norms]\n"
                    "        x = self.transformer.drop(",
                ),
                (
                    "self.lm_head(self.transformer.ln_f(x))",
                    "self.lm_head(self.transformer.ln_f(x * scale[0])) * scale[1].sum()",
                ),
                (
                    "        self.lm_head = nn",
                    "        self.extra = nn.LayerNorm(3)\n        self.lm_head = nn",
                ),
            ),
            "but those of `extra.weight`, also read here, must not be",
            "scale = [norm.weight for norm in",
        ),
    ],
)
def test_what_cannot_be_added_up_is_refused(pairs, words, line, tmp_path):
    whole = ("parallel_loss=false",)
    text = refused(tmp_path, replaced(GPT, *pairs), switched_on(SCHEDULE), "SR305", whole)
    assert words in text and line in text
    assert "source_0.py:" in text and "s.py:" in text


def test_a_parameter_on_parts_and_on_whole_values_is_refused(tmp_path):
    source = replaced(
        GPT,
        (
            "self.transformer.wte(idx) + self.transformer.wpe(positions)",
            "self.transformer.wte(idx) * self.transformer.ln_f.weight",
        ),
    )
    text = refused(tmp_path, source, switched_on(SCHEDULE), "SR104")
    assert "a parameter of `transformer.ln_f` is used on a whole value here" in text
    assert "self.transformer.wte(idx) * self.transformer.ln_f.weight" in text and "s.py:" in text


PENALTY = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))) * READ
"""


@pytest.mark.parametrize(
    "read", ["norm()", "abs().mean()", "square().sum()", "pow(2).mean(1).sum()"]
)
def test_a_split_layers_weight_that_is_read_whole_is_the_reason(read, tmp_path):
    """No collective at the layer's border would make it whole."""
    lines = '    s["up"].shard(["weight", "bias"], axis=0)\n    s.infer_sync()\n'
    source = PENALTY.replace("READ", f"self.up.weight.{read}")
    text = refused(tmp_path, source, SPLITTING + lines, "SR104")
    assert "`up.weight` is read outside of its layer's call" in text
    assert "leave `up` whole" in text and "self.up.weight" in text.split("|")[2]


TIED = replaced(
    GPT,
    (
        "        self.ln_2 = nn.LayerNorm(config.n_embd)\n",
        "        self.ln_2 = nn.LayerNorm(config.n_embd)\n"
        "        self.ln_2.weight = self.ln_1.weight\n",
    ),
)


def test_a_tied_parameter_is_added_up_by_each_of_its_names(tmp_path):
    output = rewritten(tmp_path, TIED, switched_on(SCHEDULE))
    text = output.files[output.model_file]
    assert text.count("self.ln_1 = ReplicatedLayerNorm(") == 1
    assert text.count("self.ln_2 = ReplicatedLayerNorm(") == 1
