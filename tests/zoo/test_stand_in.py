"""Models that do not run on the meta device: their small twin is traced instead."""

from __future__ import annotations

import pytest

from slapo_rewrite.model.rehearsal import Rehearsed
from tests.numbers import Case
from tests.rewriting import changed_lines, refused, rewritten

SOURCE = """\
import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (
            t.view(B, T, self.num_heads, self.head_dim).transpose(1, 2) for t in (q, k, v)
        )
        y = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    def __init__(self, width, num_heads, experts):
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleDict({f"e{i}": Expert(width) for i in range(experts)})

    def forward(self, x):
        x = x + self.attention(x)
        chosen = self.router(x).argmax(-1)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        added = torch.zeros_like(x)
        for number, count in enumerate(counts):
            if count:
                where = (chosen == number).nonzero(as_tuple=True)
                added[where] = self.experts[f"e{number}"](x[where])
        return x + added


class Model(nn.Module):
    def __init__(self, layers=6, width=16, num_heads=4, experts=4):
        super().__init__()
        self.layers = nn.ModuleList([Layer(width, num_heads, experts) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Model(SIZES)


def verify_model(m):
    torch.manual_seed(3)
    return m.Model(layers=2, experts=3)


def inputs(model):
    return {"x": torch.randn(3, 5, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s, reduced: bool = True, covered: bool = True):
    layer = s["layers.*"]
    layer["attention.qkv"].shard(["weight", "bias"], axis=0, parts=3)
    layer["attention.qkv"].sync("bwd_post", "all_reduce")
    layer["attention.out"].shard("weight", axis=1)
    layer["attention.out"].sync("fwd_post", "all_reduce")
    layer["experts.*.up"].shard(["weight", "bias"], axis=0)
    if covered:
        layer["experts.*.up"].sync("bwd_post", "all_reduce")
    layer["experts.*.down"].shard("weight", axis=1)
    if reduced:
        layer["experts.*.down"].sync("fwd_post", "all_reduce")
"""
INFERRED = """\
def schedule(s):
    s["layers.*.attention.qkv"].shard(["weight", "bias"], axis=0, parts=3)
    s["layers.*.attention.out"].shard("weight", axis=1)
    s["layers.*.experts.*.up"].shard(["weight", "bias"], axis=0)
    s["layers.*.experts.*.down"].shard("weight", axis=1)
    s.infer_sync()
"""
# Torch gives each module with a parametrization a class of its own.
PARAMETRIZED = SOURCE.replace(
    "self.router = nn.Linear(width, experts)",
    "self.router = nn.utils.parametrizations.weight_norm(nn.Linear(width, experts))",
)
CASES = {
    "parametrized": Case(PARAMETRIZED, SCHEDULE.replace("SIZES", "")),
    "routed": Case(SOURCE, SCHEDULE.replace("SIZES", "")),
    "routed_inferred": Case(
        SOURCE, SCHEDULE.replace("SIZES", "")[: SCHEDULE.index("def schedule") - 5] + INFERRED
    ),
}


@pytest.mark.parametrize("listed", ["nn.ModuleList([", "nn.Sequential(*["])
def test_the_small_twin_tells_what_follows(listed, tmp_path):
    source = SOURCE.replace("nn.ModuleList([", listed)
    output = rewritten(tmp_path, source, CASES["routed"].schedule)
    assert not output.warnings
    assert "+        self.num_heads = part_size(self.num_heads)\n" in changed_lines(output)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("reduced", "`layers.0.experts.e0.down` gives a partial sum"),
        ("covered", "the value's gradient is a partial sum on each rank"),
    ],
)
def test_a_missing_sync_is_refused(missing, words, tmp_path):
    text = refused(
        tmp_path, SOURCE, CASES["routed"].schedule, "SR104", settings=(f"{missing}=False",)
    )
    assert words in text and "found in the small model that verification runs" in text


def test_a_path_is_the_models_own(tmp_path):
    """The small model's second layer represents the layer that is scheduled differently."""
    schedule = CASES["routed"].schedule
    schedule += '    s["layers"][:5]["experts.*.down"].sync("fwd_post", "all_reduce")\n'
    text = refused(tmp_path, SOURCE, schedule, "SR104", settings=("reduced=False",))
    assert "`layers.5.experts.e0.down`" in text and "`layers.1" not in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("layers=2, experts=3", "layers=1", "no element like `layers.5`"),
        ("m.Model(layers=2, experts=3)", "m.Layer(16, 4, 3)", "is a Model in the model and a"),
        ("torch.manual_seed(3)", "raise ValueError('none')", "ValueError: none"),
        ("parts=3", "parts=[16, 16, 16]", ""),
    ],
)
def test_a_twin_that_cannot_stand_for_the_model_is_warned_of(
    old, new, words, tmp_path, monkeypatch
):
    # What is not followed is wrong here, and refused when it is run.
    monkeypatch.setattr("slapo_rewrite.emit.construct.rehearse", lambda *_: Rehearsed())
    schedule = CASES["routed"].schedule.replace(old, new)
    schedule += '    s["layers.5.attention.out"].annotate("weight", "tag", 1)\n'
    (warning, *_) = rewritten(tmp_path, SOURCE, schedule).warnings or [""]
    assert words in warning and bool(warning) == bool(words)


SHARED = """\
class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads, self.few = num_heads, 2
        self.head_dim = width // num_heads
        self.qkv = nn.Linear(width, (num_heads + 2 * self.few) * self.head_dim)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        B, T, _ = x.shape
        few = self.few * self.head_dim
        q, k, v = self.qkv(x).split([self.num_heads * self.head_dim, few, few], dim=-1)
        q = q.view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = k.view(B, T, self.few, self.head_dim).transpose(1, 2)
        v = v.view(B, T, self.few, self.head_dim).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))
"""
START, END = SOURCE.index("class Attention"), SOURCE.index("\n\nclass Layer")
QUERIES = SOURCE[:START] + SHARED + SOURCE[END:]


@pytest.mark.parametrize(
    ("small", "parts", "words"),
    [
        # As many queries as keys there, and four times as many here.
        ("num_heads=2", "3", "does not show that the model has the same blocks"),
        ("num_heads=2", "[16, 4, 4]", "is cut into pieces of [16, 16, 16] here"),
        ("num_heads=8", "[16, 4, 4]", ""),
    ],
)
def test_blocks_are_in_the_models_own_ratio(small, parts, words, tmp_path):
    schedule = (
        CASES["routed_inferred"]
        .schedule.replace("experts=3", f"experts=3, {small}")
        .replace("m.Model()", "m.Model(num_heads=8)")
        .replace("axis=0, parts=3", f"axis=0, parts={parts}")
    )
    if words:
        assert words in refused(tmp_path, QUERIES, schedule, "SR104")
    else:
        output = rewritten(tmp_path, QUERIES, schedule)
        assert "parts=Packed((num_heads, self.few, self.few))" in changed_lines(output)
