"""Sizes of packed blocks that also hold for other configurations than the scheduled one."""

from __future__ import annotations

import ast

import pytest
import torch.distributed as dist

from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify
from tests.numbers import Case, compare, modules, prepare
from tests.processes import run
from tests.rewriting import imported, rewritten, written

SOURCE = """\
import torch
import torch.nn.functional as F
from torch import nn


class Config:
    def __init__(self, dim=64, heads=8, few=8, sinks=True):
        self.dim, self.heads, self.few, self.head_dim = dim, heads, few, dim // heads
        self.sinks = sinks


def packed(config):
    return (config.heads + 2 * config.few) * config.head_dim


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        BEFORE
        self.wqkv = nn.Linear(config.dim, SIZE, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        AFTER

    def forward(self, x):
        B, T, _ = x.shape
        CUT
        q = q.view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k = k.view(B, T, self.few, self.head_dim).transpose(1, 2)
        v = v.view(B, T, self.few, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.few, dim=1)
        v = v.repeat_interleave(self.heads // self.few, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(B, T, self.dim))

    def sizes(self):
        return [self.heads * self.head_dim] + [self.few * self.head_dim] * 2


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = nn.Linear(config.dim, config.dim)
        self.attn = Attention(config)

    def forward(self, x):
        x = self.first(x)
        return x + self.attn(x)
"""
KEPT = (
    "self.heads, self.few = config.heads, config.few; "
    "self.dim, self.head_dim = config.dim, config.head_dim"
)
TERMS = "(config.heads + 2 * config.few) * config.head_dim"
OWN = "(self.heads + 2 * self.few) * self.head_dim"
NAMED = (
    "kv_size = self.few * self.head_dim; "
    "q, k, v = self.wqkv(x).split([self.dim, kv_size, kv_size], dim=-1)"
)
SLICED = (
    "qkv, d, e = self.wqkv(x), self.dim, self.dim + self.few * self.head_dim; "
    "q, k, v = qkv[..., :d], qkv[..., d:e], qkv[..., e:]"
)
IN_THREE = (
    "qkv = self.wqkv(x); n = qkv.shape[-1] // 3; "
    "q, k, v = qkv[..., :n], qkv[..., n : 2 * n], qkv[..., 2 * n :]"
)
SCHEDULE = """\
import torch


def model(m):
    return m.Model(m.Config(few=FEW))


def verify_model(m):
    return m.Model(m.Config(few=SMALL))


def inputs(model):
    return {"x": torch.randn(2, 5, 64)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["attn.wqkv"].shard("weight", axis=0, parts=PARTS)
    s["attn.wo"].shard("weight", axis=1)
    s.infer_sync()
"""


def source(size=TERMS, cut=NAMED, before="", after=KEPT) -> str:
    text = SOURCE
    for name, lines in (("BEFORE", before), ("AFTER", after), ("CUT", cut)):
        text = text.replace(name, "\n        ".join(lines.split("; ")))
    return text.replace("SIZE", size)


def schedule(few=8, parts=None, small=None) -> str:
    parts = parts or [64, 8 * few, 8 * few]
    text = SCHEDULE.replace("SMALL", str(small or few)).replace("FEW", str(few))
    return text.replace("PARTS", str(parts))


def parts_of(text: str) -> str:
    """What the changed layer is given for `parts`."""
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
    (found,) = (k.value for c in calls for k in c.keywords if k.arg == "parts")
    return ast.unparse(found)


HEADS = "Packed((config.heads, config.few, config.few))"
OWN_HEADS = "Packed((self.heads, self.few, self.few))"
SIZES = "Packed((config.dim, config.few * config.head_dim, config.few * config.head_dim))"
REST = SIZES[: SIZES.rindex(",")] + (
    ", config.head_dim * config.heads + config.few * config.head_dim - config.dim))"
)
EQUAL = "PackedSizes((64, 64, 64))"


@pytest.mark.parametrize(
    ("given", "few", "parts", "found"),
    [
        # The summands of the layer's own size, where `forward` cuts there.
        ({}, 8, None, HEADS),
        ({}, 2, None, HEADS),
        ({"before": KEPT, "after": "", "size": OWN}, 8, None, OWN_HEADS),
        ({"before": f"rows = {TERMS}", "size": "rows"}, 8, None, HEADS),
        ({"size": "config.dim + 2 * (config.few * config.head_dim)"}, 8, None, SIZES),
        # A number says that they are equal, and `forward` that they need not be.
        ({}, 8, 3, HEADS),
        # The sizes of `forward`, where the layer's are not known.
        (
            {"size": "packed(config)"},
            8,
            None,
            SIZES,
        ),
        (
            {"size": "packed(config)", "before": KEPT, "after": ""},
            2,
            None,
            SIZES.replace("config", "self"),
        ),
        (
            {"cut": "q, k, v = self.wqkv(x).split(self.widths, dim=-1)", "size": "packed(config)",
             "before": f"{KEPT}; n = self.head_dim; "
             "self.widths = [self.heads * n, self.few * n, self.few * n]", "after": ""},
            8,
            None,
            OWN_HEADS,
        ),
        # Slices are as good as sizes, the last of which is the rest.
        ({"cut": SLICED}, 2, None, REST),
        ({"cut": SLICED}, 8, None, REST),
        ({"cut": SLICED}, 8, 3, REST),
        ({"cut": SLICED.replace("self.dim", "self.heads * self.head_dim")}, 8, 3, HEADS),
        ({"cut": IN_THREE}, 8, 3, "Packed(3)"),
        # Equal by what they are.
        ({"size": "3 * config.dim", "cut": "q, k, v = self.wqkv(x).chunk(3, -1)"}, 8, None,
         "Packed(3)"),
        ({"cut": "q, k, v = self.wqkv(x).split(self.dim, -1)"}, 8, 3, "Packed(3)"),
        ({"cut": "q, k, v = self.wqkv(x).split([self.dim] * 3, -1)"}, 8, None, "Packed(3)"),
        # Nothing is known to be right.
        ({"size": "packed(config)", "cut": SLICED}, 8, None, EQUAL),
        ({"cut": "q, k, v = self.wqkv(x).split(self.sizes(), -1)"}, 8, None, EQUAL),
        ({"cut": "q, k, v = self.wqkv(x).split(self.sizes(), -1)"}, 8, 3, EQUAL),
        ({"after": f"{KEPT}; self.few += 0"}, 8, None, EQUAL),
    ],
)  # fmt: skip
def test_what_is_written(given, few, parts, found, tmp_path):
    output = rewritten(tmp_path, source(**given), schedule(few, parts))
    assert parts_of(output.files["source_0.py"]) == found


OPAQUE = {"size": "packed(config)", "cut": SLICED}
PARAMETER = source().replace(
    "self.wqkv = nn.Linear(config.dim, " + TERMS + ", bias=False)",
    "self.wqkv = nn.Parameter(torch.randn(" + TERMS + ", config.dim) / 8)",
)
PARAMETER = PARAMETER.replace("self.wqkv(x)", "F.linear(x, self.wqkv)")
# Each is scheduled with as many keys as queries, and run with few as well.
CASES = {
    f"{name}_{few}": Case(source(**given), schedule(8, parts, few))
    for name, given, parts in (
        ("terms", {}, None),
        ("number", {}, 3),
        ("own", {"before": KEPT, "after": "", "size": OWN}, None),
        ("sizes", {"size": "packed(config)"}, None),
    )
    for few in (8, 4)
}
CASES["parameter"] = Case(
    PARAMETER,
    schedule(8, None, 4).replace('s["attn.wqkv"].shard("weight"', 's["attn"].shard("wqkv"'),
)
# As many rows as three blocks of 32 have, which are not its blocks; for one rank or two.
FEW = {
    "few": Case(source(), schedule(8, 3, 2)),
    "slices": Case(source(cut=SLICED), schedule(8, 3, 2)),
    "rest": Case(source(cut=SLICED), schedule(8, None, 2)),
}
CASES["fixed"] = Case(source(**OPAQUE), schedule(8))


def check(folder):
    compare(folder, CASES if dist.get_world_size() > 2 else {**CASES, **FEW})
    _, module = modules(folder, "fixed", CASES["fixed"])
    try:
        module.Model(module.Config(few=2))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.processes
def test_other_configurations_compute_the_same(tmp_path):
    prepare(tmp_path, {**CASES, **FEW})
    text = (tmp_path / "parameter_out" / "parameter_original.py").read_text()
    assert f'shard_parameter(self, "wqkv", axis=0, parts={HEADS})' in text.replace("\n", "")
    for world in (2, 4):
        for words in run(check, world, tmp_path):
            assert words.startswith(
                "`parts` has blocks of sizes [64, 64, 64], for an axis of 192, but the axis has 9"
            )


@pytest.mark.processes
def test_a_small_model_may_have_them_in_the_same_ratio(tmp_path):
    """What the tool compares with the original is not refused for its size alone."""
    small = schedule(8).replace(
        "m.Config(few=8))\n\n\ndef inputs", "m.Config(32, 4, 4))\n\n\ndef inputs"
    )
    small = small.replace("5, 64", "5, model.first.in_features")
    output = rewritten(tmp_path, source(**OPAQUE), small)
    assert not output.warnings
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", (2,))
    assert report.ok, report.render()
    module = imported(written(tmp_path, output))
    with pytest.raises(ValueError, match="the axis has 96 in this model"):
        module.Model(module.Config(32, 4, 4))
    module.Model(module.Config())


PACKED = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.dim, self.mlp = dim, 4 * dim
        self.inp = nn.Linear(dim, 3 * dim + self.mlp)
        self.out = nn.Linear(dim + self.mlp, dim)

    def forward(self, x):
        qkv, h = self.inp(x).split([3 * self.dim, self.mlp], -1)
        q, k, v = qkv.chunk(3, -1)
        return self.out(torch.cat([torch.sigmoid(q) * k * v, torch.relu(h)], -1))
"""
OF_PACKED = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.randn(2, 5, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["inp"].shard(["weight", "bias"], axis=0, parts=[16, 16, 16, 64])
    s["out"].shard("weight", axis=1, parts=[16, 64])
    s.infer_sync()
"""


def test_a_name_stands_for_itself(tmp_path):
    """The expression that it is bound to is a sum too, but its terms are not blocks."""
    text = rewritten(tmp_path, PACKED, OF_PACKED).files["source_0.py"]
    assert (
        "parts=Packed((dim, dim, dim, self.mlp))" in text
        and "parts=Packed((dim, self.mlp))" in text
    )
