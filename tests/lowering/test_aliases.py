"""A submodule is found by what a name means: aliases, tuples of modules, loops over them."""

from __future__ import annotations

import ast

import pytest
import torch

from slapo_rewrite.code.names import module_paths
from tests.rewriting import changed_lines, imported, refused, rewritten, written

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.gate = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
"""
SCHEDULE = """\
import torch


def model(m):
    return m.MLP(8)


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""
ALIAS = "        act = self.up\n        return self.down(F.gelu(act(x)))\n"
TUPLE = "        up, gate = self.up, self.gate\n        return self.down(up(x) * gate(x))\n"
LOOP = """\
        y = 1.0
        for layer in (self.up, self.gate):
            y = y * layer(x)
        return self.down(y)
"""
SHARD = """\
    s["{up,gate}"].shard(["weight", "bias"], axis=0)
    s["down"].shard("weight", axis=1)
    s.infer_sync()
"""
SYNCED = """\
    s["{up,gate}"].shard(["weight", "bias"], axis=0)
    s["{up,gate}"].sync("fwd_post", "all_gather", axis=-1)
    s["{up,gate}"].sync("bwd_post", "all_reduce")
    s["{up,gate}"].sync("fwd_post", "scatter", axis=0)
    s["{up,gate}"].sync("fwd_post", "all_gather", axis=0)
"""


@pytest.mark.parametrize(
    ("forward", "expr", "paths"),
    [
        ("return self.up(x)", "self.up", ("up",)),
        ("return self.mlp[0].up(x)", "self.mlp[0].up", ("mlp.0.up",)),
        ("act = self.up\nreturn act(x)", "act", ("up",)),
        ("act = self.up\nmore = act\nreturn more(x)", "more", ("up",)),
        ("mlp = self.mlp\nreturn mlp[1](x)", "mlp[1]", ("mlp.1",)),
        ("up, gate = self.up, self.gate\nreturn gate(x)", "gate", ("gate",)),
        ("for f in (self.q, self.k):\n    x = f(x)", "f", ("q", "k")),
        ("for f, g in ((self.q, self.a), (self.k, self.b)):\n    x = g(x)", "g", ("a", "b")),
        ("if x:\n    f = self.a\nelse:\n    f = self.b\nreturn f(x)", "f", ("a", "b")),
        ("if x:\n    f = self.a\nelse:\n    f = h\nreturn f(x)", "f", ()),
        ("f = self.layers[i]\nreturn f(x)", "f", ()),
        ("f = x\nreturn f(x)", "f", ()),
        ("f = f\nreturn f(x)", "f", ()),
    ],
)
def test_what_a_name_means(forward, expr, paths):
    body = "\n".join(f"    {line}" for line in forward.splitlines())
    (function,) = ast.parse(f"def forward(self, x, h, i):\n{body}").body
    assert isinstance(function, ast.FunctionDef)
    assert module_paths(ast.parse(expr, mode="eval").body, function) == paths


@pytest.mark.parametrize(
    ("body", "lines", "shown"),
    [
        (ALIAS, '    s["up"].decompose()\n', "linear_product(x, act) + act.bias"),
        (TUPLE, '    s["gate"].decompose()\n', "up(x) * (linear_product(x, gate) + gate.bias)"),
        (LOOP, '    s["{up,gate}"].decompose()\n', "y * (linear_product(x, layer) + layer.bias)"),
    ],
)
def test_decomposed(tmp_path, body, lines, shown):
    output = rewritten(tmp_path, HEAD + body, SCHEDULE + lines)
    assert shown in changed_lines(output)
    original = imported(tmp_path / "source_0.py").MLP(8).double()
    made = imported(written(tmp_path, output)).MLP(8).double()
    made.load_state_dict(original.state_dict())
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.allclose(made(x), original(x), atol=1e-12)


@pytest.mark.parametrize("body", [ALIAS, TUPLE, LOOP])
def test_sharded(tmp_path, body):
    changes = changed_lines(rewritten(tmp_path, HEAD + body, SCHEDULE + SHARD))
    assert "ColumnParallelLinear" in changes and "RowParallelLinear" in changes


def test_collectives_go_around_a_call_of_several_once(tmp_path):
    changes = changed_lines(rewritten(tmp_path, HEAD + LOOP, SCHEDULE + SYNCED))
    assert changes.count("all_gather(scatter(layer(x), axis=0), axis=0)") == 1


def test_of_a_call_of_several_one_alone_is_not_changed(tmp_path):
    message = refused(tmp_path, HEAD + LOOP, SCHEDULE + '    s["up"].decompose()\n', "SR305")
    assert "this calls both `up` and `gate`" in message
    assert "write a separate call of `up`" in message


INLINED = """\
import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = Scale(width)
        self.second = Scale(width)

    def forward(self, x):
{body}
"""
INLINE = SCHEDULE.replace("MLP", "Net") + '    s.inline("first")\n'


def test_what_is_called_by_another_name_is_inlined(tmp_path):
    body = "        act = self.first\n        y = act(x)\n        return self.second(y)"
    output = rewritten(tmp_path, INLINED.format(body=body), INLINE)
    assert changed_lines(output) == "-        y = act(x)\n+        y = x * self.first.weight\n"


def test_a_call_of_one_of_several_modules_is_not_inlined(tmp_path):
    body = "        for f in (self.first, self.second):\n            x = f(x)\n        return x"
    error = refused(tmp_path, INLINED.format(body=body), INLINE, "SR305")
    assert "this call is one of several modules" in error and "x = f(x)" in error
