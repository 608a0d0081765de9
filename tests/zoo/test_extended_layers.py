"""Classes that extend a torch layer, and code that reads a split layer's size."""

from __future__ import annotations

import pytest

from slapo_rewrite.model.rehearsal import Rehearsed
from tests.rewriting import changed_lines, refused, rewritten

SOURCE = """\
import torch
from torch import nn


class Scaled(nn.Embedding):
    def __init__(self, count, width, scale=2.0):
        super().__init__(count, width)
        self.scale = scale

    def forward(self, ids):
        return FORWARD


class Model(nn.Module):
    def __init__(self, count=40, width=8):
        super().__init__()
        self.table = Scaled(count, width)
        self.other = Scaled(count, width)
        self.head = nn.Linear(width, self.table.num_embeddings, bias=False)

    def forward(self, ids):
        if torch.rand([]) < 0.1:
            return self.head(self.table(ids))
        return self.head(self.table(ids) + self.other(ids))
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"ids": torch.zeros(2, 5, dtype=torch.long)}


def loss(outputs):
    return outputs.square().mean()


def split(table):
    table.shard("weight", axis=0)
    table.sync("fwd_post", "all_reduce")


def split_head(head):
    head.shard("weight", axis=0)
    head.sync("bwd_post", "all_reduce")
    head.sync("fwd_post", "all_gather", axis=-1)


def schedule(s):
"""
EXTENDED = SOURCE.replace("FORWARD", "super().forward(ids) * self.scale")


def test_the_base_of_a_class_that_extends_a_layer_is_split(tmp_path):
    schedule = SCHEDULE + '    split(s["{table,other}"])\n'
    output = rewritten(tmp_path, EXTENDED, schedule)
    assert not output.warnings, "a coin that is tossed in `forward` can be followed"
    text = changed_lines(output)
    assert "-class Scaled(nn.Embedding):\n+class Scaled(VocabParallelEmbedding):\n" in text


@pytest.mark.parametrize(
    ("coin", "warned"), [("random.random()", True), ("np.random.uniform()", False)]
)
def test_runs_that_are_compared_draw_the_same_numbers(coin, warned, tmp_path):
    source = "import random\n\nimport numpy as np\n" + EXTENDED.replace("torch.rand([])", coin)
    output = rewritten(tmp_path, source, SCHEDULE + '    split(s["{table,other}"])\n')
    assert any("random numbers decide" in words for words in output.warnings) == warned


def test_whoever_reads_its_size_means_the_whole(tmp_path):
    lines = '    split(s["{table,other}"])\n    split_head(s["head"])\n'
    text = changed_lines(rewritten(tmp_path, EXTENDED, SCHEDULE + lines))
    assert "width, self.table.full_num_embeddings, bias=False" in text


def test_a_size_that_the_layer_does_not_keep_is_refused_in_a_constructor(tmp_path):
    source = EXTENDED.replace(
        "\n    def forward(self, ids):\n        if",
        "        self.count = self.head.out_features\n\n    def forward(self, ids):\n        if",
    )
    assert source != EXTENDED
    text = refused(tmp_path, source, SCHEDULE + '    split_head(s["head"])\n', "SR104")
    assert "its `out_features`, read here, is this rank's share" in text


def test_a_share_that_forward_computes_with_is_refused(tmp_path):
    source = EXTENDED.replace(
        "return self.head(self", "return self.head.out_features * self.head(self"
    )
    text = refused(tmp_path, source, SCHEDULE + '    split_head(s["head"])\n', "SR104")
    assert "this computes with 20 on a rank, and with 40 without sharding" in text


def test_half_of_its_instances_are_refused(tmp_path):
    text = refused(tmp_path, EXTENDED, SCHEDULE + '    split(s["table"])\n', "SR305")
    assert "a class has one base" in text


PUT_THERE = EXTENDED.replace("super().forward(ids)", "ids").replace(
    "\n    def forward(self, ids):\n        return ids * self.scale\n", ""
)
BY_ITSELF = "\n\nScaled.forward = lambda self, ids: self.weight[ids] * self.scale\n"


@pytest.mark.parametrize(
    "source",
    [SOURCE.replace("FORWARD", "self.weight[ids] * self.scale"), PUT_THERE + BY_ITSELF],
    ids=["in its text", "below it"],
)
def test_a_class_that_computes_by_itself_is_followed(source, tmp_path):
    """Nothing in it looks up whether a token is in this rank's part of the vocabulary."""
    text = refused(tmp_path, source, SCHEDULE + '    split(s["{table,other}"])\n', "SR104")
    assert "gather the value first" in text and "self.weight[ids] * self.scale" in text


OWN = """\
import torch
from torch import nn
from torch.nn import functional as F


class Own(nn.Linear):
    def forward(self, x):
        COMPUTED


class MLP(nn.Module):
    def __init__(self, width, is_gated):
        super().__init__()
        self.up = Own(width, 4 * width)
        self.gate = Own(width, 4 * width, bias=False) if is_gated else None
        self.down = Own(4 * width, width)

    def forward(self, x):
        h = self.up(x).relu()
        return self.down(h if self.gate is None else h * self.gate(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([MLP(12, i > 0) for i in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x
"""
OWN_FORMS = {
    "casting": "return F.linear(x, self.weight.to(dtype=x.dtype), self.bias)",
    "transposed": "y = x @ self.weight.T\n        return y if self.bias is None else y + self.bias",
    "by letters": "y = torch.einsum('bi,oi->bo', x, self.weight)\n"
    "        return y if self.bias is None else y + self.bias",
}


@pytest.mark.parametrize("form", OWN_FORMS)
def test_a_linear_layer_that_computes_by_itself_is_split(form, tmp_path):
    """Its bias, which meets partial sums, is added by one rank; some instances have no gate."""
    schedule = SCHEDULE[: SCHEDULE.index("def split")].replace(
        '{"ids": torch.zeros(2, 5, dtype=torch.long)}', '{"x": torch.randn(2, 12)}'
    )
    lines = """\
def schedule(s):
    s["layers.*.up"].shard(["weight", "bias"], axis=0)
    s["layers.1.gate"].shard("weight", axis=0)
    s["layers.*.down"].shard("weight", axis=1)
    s.infer_sync()
"""
    output = rewritten(tmp_path, OWN.replace("COMPUTED", OWN_FORMS[form]), schedule + lines)
    text = changed_lines(output)
    assert '+        shard_parameter(self.up, "bias", axis=0)\n' in text
    assert '+            shard_parameter(self.gate, "weight", axis=0)\n' in text
    assert '+        add_once(self.down, "bias")\n' in text


@pytest.mark.parametrize(
    ("computed", "words"),
    [
        ("super().forward(ids).softmax(-1)", "`softmax` needs the whole axis"),
        ("super().forward(ids) + self.bias", "`add` combines a part of shape"),
        ("super().forward(ids).relu()", None),
    ],
)
def test_what_it_computes_around_the_layer_is_followed(computed, words, tmp_path, monkeypatch):
    monkeypatch.setattr("slapo_rewrite.emit.construct.rehearse", lambda *_: Rehearsed())
    source = SOURCE.replace("FORWARD", computed).replace(
        "self.scale = scale", 'self.register_buffer("bias", torch.ones(width))'
    )
    lines = '    s["{table,other}"].shard("weight", axis=1)\n'
    lines += '    s["head"].shard("weight", axis=1)\n'
    lines += '    s["head"].sync("fwd_post", "all_reduce")\n'
    if words is None:
        assert not rewritten(tmp_path, source, SCHEDULE + lines).warnings
    else:
        assert words in refused(tmp_path, source, SCHEDULE + lines, "SR104")
