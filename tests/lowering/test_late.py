"""Layers that are split in units of an attribute that the constructor sets later."""

from __future__ import annotations

import pytest

from tests.numbers import Case, compare, prepare
from tests.rewriting import refused, rewritten

SOURCE = """import torch.nn.functional as F
from torch import nn

HEADS = 4


class Attention(nn.Module):
    def __init__(self, dim, heads=HEADS, sinks=True):
        super().__init__()
        self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        LATER

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, self.hd)) for f in (self.q, self.k, self.v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
"""
REGROUPED = """    def regrouped(self, z):
        shape = (*z.shape[:-1], -1, self.c.hd)
        return z.view(shape)

    def regrouped_anew(self, z):
        shape = (*z.shape[:-1], -1, 2)
        shape = (*shape[:-1], self.c.hd)
        return z.view(shape)

    def regrouped_as(self, z, shape):
        z = z.view(shape)
        shape = (*z.shape[:-1], -1, self.c.heads)
        return z

"""
SCHEDULE = """import torch


def model(m):
    return m.Attention(16)


def inputs(model):
    return {"x": torch.randn(2, 5, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["{q,k,v}"].shard(["weight", "bias"], axis=0)
    s["o"].shard("weight", axis=1)
    s.infer_sync()
"""


@pytest.mark.parametrize(
    ("later", "unit"),
    [
        ("self.hd = dim // heads", "dim // heads"),
        ("self.heads, self.hd = heads, dim // heads", "dim // heads"),
        ("self.heads = heads; self.hd = dim // self.heads", "dim // heads"),
        ("n = max(heads, 1); self.hd = dim // n", "dim // max(heads, 1)"),
        ("self.hd = self.find(dim)", None),
        ("self.hd = dim // heads if sinks else 1; self.hd *= 1", None),
        ("heads = heads // 1; self.hd = dim // heads", None),
    ],
)
def test_what_a_later_attribute_is_worth(later, unit, tmp_path):
    source = SOURCE.replace("LATER", "\n        ".join(later.split("; ")))
    source += "\n    def find(self, dim):\n        return dim // 4\n"
    if unit is None:
        words = refused(tmp_path, source, SCHEDULE, "SR103")
        assert "must be split in multiples of `self.hd`, which is set later" in words
        assert "set `self.hd` above `self.q`" in words
        return
    text = rewritten(tmp_path, source, SCHEDULE).files["source_0.py"]
    assert text.count(f"multiple_of={unit}") == 3


@pytest.mark.parametrize(
    ("before", "view", "after", "unit"),
    [
        ("self.c = C()", "z.unflatten(-1, (self.c.heads, self.c.hd))", "", "self.c.hd"),
        ('self.c = {"hd": 4}', 'z.unflatten(-1, (-1, self.c["hd"]))', "", "self.c['hd']"),
        ("", "z.view(*x.shape[:2], -1, 4)", "", "4"),
        ("", "z.view(x.size(0), x.size(1), HEADS, 4)", "", "4"),
        ("", "z.view(x.size(0), x.size(1), -1, HEADS)", "", "HEADS"),
        ("", "z.unflatten(-1, (-1, self.c.hd))", "self.c = C()", "4"),
        ("self.c = C()", "heads_of(z, self.c.hd)", "", "4"),
        ("self.c = C()", "z.view(((*x.shape[:-1], -1, self.c.hd)))", "", "self.c.hd"),
        ("self.c = C()", "self.regrouped(z)", "", "self.c.hd"),
        ("self.c = C()", "self.regrouped_anew(z)", "", "4"),
        ("self.c = C()", "self.regrouped_as(z, (*z.shape[:-1], -1, 4))", "", "4"),
    ],
)
def test_a_size_of_heads_that_is_no_attribute(before, view, after, unit, tmp_path):
    """Heads that would be cut are refused where the layer is made, and never rounded."""
    source = SOURCE.replace("LATER", after).replace(
        "for f in (self.q, self.k, self.v))", "for z in (self.q(x), self.k(x), self.v(x)))"
    )
    source = source.replace("f(x).unflatten(-1, (-1, self.hd))", view)
    source = source.replace("super().__init__()\n", f"super().__init__()\n        {before}\n")
    source = source.replace("    def forward", f"{REGROUPED}    def forward")
    source += (
        "\n\nclass C:\n    heads, hd = 4, 4\n"
        "\n\ndef heads_of(z, hd):\n    return z.view(*z.shape[:-1], z.shape[-1] // hd, hd)\n"
    )
    text = rewritten(tmp_path, source, SCHEDULE).files["source_0.py"]
    assert text.count(f"multiple_of={unit}") == 3


def test_the_numbers_are_right(tmp_path):
    case = {"late": Case(SOURCE.replace("LATER", "self.hd = dim // heads"), SCHEDULE)}
    prepare(tmp_path, case)
    compare(tmp_path, case)


MAYBE = """from torch import nn
import torch


class Block(nn.Module):
    def __init__(self, dim, scaled):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.scale = nn.Parameter(torch.ones(4 * dim)) if scaled else None

    def forward(self, x):
        h = self.up(x).relu()
        if self.scale is not None:
            h = h * self.scale
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, i == 1) for i in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""


def test_a_parameter_that_some_instances_lack(tmp_path):
    schedule = SCHEDULE.replace("Attention(16)", "Model(16)").replace("{q,k,v}", "blocks.*.up")
    schedule = schedule.replace('"o"', '"blocks.*.down"')
    schedule = schedule.replace(
        "    s.infer", '    s["blocks.1"].shard("scale", axis=0)\n    s.infer'
    )
    text = rewritten(tmp_path, MAYBE, schedule).files["source_0.py"]
    assert 'if self.scale is not None:\n            shard_parameter(self, "scale"' in text


@pytest.mark.parametrize(
    ("made", "checked"),
    [
        ("self.hd = 4; self.q = LINEAR; self.k = LINEAR; self.v = LINEAR", 1),
        ("self.hd = 4; self.q = LINEAR; self.v = LINEAR; self.k = nn.Linear(dim, 16)", 2),
        ("self.hd = 4; self.q = LINEAR; self.k = LINEAR; self.act = nn.ReLU(); self.v = LINEAR", 1),
        ("self.hd = 4; self.q = LINEAR; self.k = LINEAR; self.dim = dim; self.v = LINEAR", 2),
        ("self.hd = 4; self.q = LINEAR; self.k = LINEAR; dim = max(dim, 8); self.v = LINEAR", 2),
    ],
)
def test_layers_of_one_size_are_checked_once(made, checked, tmp_path):
    made = made.replace("LINEAR", "nn.Linear(dim, dim)")
    layers = "self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim)\n"
    layers += "        self.v = nn.Linear(dim, dim)\n"
    assert layers in SOURCE
    source = SOURCE.replace(layers, made.replace("; ", "\n        ") + "\n").replace("LATER", "")
    text = rewritten(tmp_path, source, SCHEDULE).files["source_0.py"]
    assert text.count("ColumnParallelLinear(") == 3
    assert text.count("multiple_of=self.hd") == checked
    assert text.index("multiple_of") < text.index("self.k =")
