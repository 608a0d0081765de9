"""Statements around a branch move into its arms, if a pattern spans the branch."""

from __future__ import annotations

import itertools
import textwrap

import pytest
import torch

from tests.rewriting import changed_lines, imported, refused, rewritten, written

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, width, flag=True):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.flag = flag

    def forward(self, x, other=None):
"""
SCHEDULE = """\
import torch
from torch.nn import functional as F


def model(m):
    return m.Model(4)


def inputs(model):
    return {"x": torch.randn(2, 4)}


def loss(outputs):
    return outputs.square().mean()


def summed(x, y):
    return F.gelu(x + y)


def kept(x, y):
    total = x + y
    return F.gelu(total), total


def schedule(s):
    s.fuse(%s)
"""
NONE = 'concrete_args={"other": None}'
GIVEN = 'concrete_args={"other": True}'


def source(body: str) -> str:
    return HEAD + textwrap.indent(textwrap.dedent(body).strip(), " " * 8) + "\n"


# The body of `forward`, and what `fuse` is told.
OPENED = {
    "before": ("x = x + self.first(x)\nif self.flag:\n    x = F.gelu(x)\nreturn x", "summed"),
    "after": (
        "if self.flag:\n    x = x + self.first(x)\nelse:\n    x = x * 2\nx = F.gelu(x)\nreturn x",
        "summed",
    ),
    "other arm": (
        "x = x + self.first(x)\nif not self.flag:\n    x = x * 2\nelse:\n    x = F.gelu(x)\n"
        "return x",
        "summed",
    ),
    "not taken": (
        "x = x + self.first(x)\nif other is not None:\n    x = x + other\nx = F.gelu(x)\nreturn x",
        f"summed, {NONE}",
    ),
    "taken": (
        "x = x + self.first(x)\nif other is not None:\n    x = F.gelu(x)\nreturn x",
        f"summed, {GIVEN}",
    ),
    "leaving": (
        "x = x + self.first(x)\nif other is not None:\n    return x * 2\nx = F.gelu(x)\nreturn x",
        f"summed, {NONE}",
    ),
    "through names": (
        "flag = self.flag and other is None\nx = x + self.first(x)\nif flag:\n    x = F.gelu(x)\n"
        "return x",
        f"summed, {NONE}",
    ),
    "two at once": (
        "if self.flag:\n    x = F.gelu(x + self.first(x)) * 2\n    x = x + 1\nx = F.gelu(x)\n"
        "return x",
        "summed",
    ),
}


@pytest.mark.parametrize("name", OPENED)
def test_what_is_written_is_right_whichever_way_the_branch_goes(name, tmp_path):
    body, asked = OPENED[name]
    output = rewritten(tmp_path, source(body), SCHEDULE % asked)
    assert "_summed" in output.files[output.model_file]
    original = imported(next(tmp_path.glob("source_*.py")))
    changed = imported(written(tmp_path, output))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for flag, other in itertools.product((True, False), (None, torch.ones(4))):
        one, two = original.Model(4, flag).double(), changed.Model(4, flag).double()
        two.load_state_dict(one.state_dict())
        results = [model(x, other) for model in (one, two)]
        assert torch.equal(*results), (flag, other)
        for result in results:
            result.sum().backward()
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


BOTH = """
x = x + self.first(x)  # the sum

# below
if other is not None:
    x = x * other

# next
kept = x
x = F.gelu(x)
return x + self.second(kept)
"""


def test_both_arms_are_as_one_would_write_them(tmp_path):
    schedule = SCHEDULE % f"summed, {NONE}"
    text = schedule.replace("s.fuse(summed", "s.replace(both, kept").replace(
        "def schedule", "def both(x, y):\n    return F.gelu(x + y), x + y\n\n\ndef schedule"
    )
    output = rewritten(tmp_path, source(BOTH), text)
    assert (
        changed_lines(output)
        == """\
+from .modules import both
-        x = x + self.first(x)  # the sum
+            x = x + self.first(x)  # the sum
-        # next
-        kept = x
-        x = F.gelu(x)
+            # next
+            kept = x
+            x = F.gelu(x)
+        else:
+            # the sum
+            # next
+            x, kept = both(x, self.first(x))
"""
    )


# The body of `forward`, what `fuse` is told, and what it answers.
LEFT = [
    (
        "x = x + self.first(x)\nif other is None:\n    x = F.gelu(x)\nreturn x",
        "summed",
        "name it",
    ),
    (
        "x = x + self.first(x)\nif self.training:\n    x = F.gelu(x)\nreturn x",
        "summed",
        "used elsewhere",
    ),
    (
        "x = x + self.first(x)\nif other is not None:\n    x = x * 2\nelif self.flag:\n"
        "    x = F.gelu(x)\nreturn x",
        f"summed, {NONE}",
        "an `elif`",
    ),
    ("x = x + self.first(x)\nif self.flag: x = F.gelu(x)\nreturn x", "summed", "on one line"),
    (
        "x = x + self.first(x)\nfor _ in range(2):\n    other = x\nif self.flag:\n"
        "    x = F.gelu(x)\nreturn x",
        "summed",
        "",
    ),
    (
        "x = x + self.first(x)\na = x * 2\nb = x * 3\nc = x * 4\nif self.flag:\n    x = F.gelu(a)\n"
        "return x + b + c",
        "lambda x, y: F.gelu((x + y) * 2), name='f'",
        "",
    ),
    (
        "y = x + self.first(x)\nz = x * 2\nv = x * 3\nw = x * 4\nif self.flag:\n    x = F.gelu(y)\n"
        "return x + z + v + w",
        "summed",
        "would have to be in both branches",
    ),
    (
        "y = x + self.first(x)\nother = None\nif other is None:\n    x = F.gelu(y)\nreturn x",
        "summed",
        "its condition reads `other`",
    ),
    (
        "y = x + self.first(x)\nother.zero_()\nif other:\n    x = F.gelu(y)\nreturn x",
        f"summed, {GIVEN}",
        "whose result is not used",
    ),
    (
        "if self.flag:\n    y = x + self.first(x)\n    if other is None:\n        x = x * 2\n"
        "else:\n    y = x\nreturn F.gelu(y)",
        f"summed, {GIVEN}",
        "",
    ),
]


@pytest.mark.parametrize(("body", "asked", "reason"), LEFT)
def test_left_alone(body, asked, reason, tmp_path):
    assert reason in refused(tmp_path, source(body), SCHEDULE % asked, "SR309")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('{"oter": None}', "did you mean `other`"),
        ('{"x": 1, "y": 2}', "no selected module takes an argument `y`"),
        ('["other"]', "`concrete_args` must be a dictionary, not"),
    ],
)
def test_arguments_that_are_none(given, said, tmp_path):
    asked = f"summed, concrete_args={given}"
    assert said in refused(tmp_path, source("return F.gelu(x + x)"), SCHEDULE % asked, "SR206")


@pytest.mark.parametrize(
    "line",
    [
        's.find("first", concrete_args={"other": None})',
        's.find(where=lambda call: True, concrete_args={"other": None})',
        's["first"].replace(torch.nn.Identity, concrete_args={"input": None})',
        's.apply("pack_qkv", concrete_args={"others": None})',
    ],
)
def test_where_they_mean_nothing(line, tmp_path):
    schedule = SCHEDULE.replace("s.fuse(%s)", line)
    assert "`" in refused(tmp_path, source("return F.gelu(x + x)"), schedule, "SR206")


def test_only_modules_with_the_constant_change(tmp_path):
    layers = source(OPENED["before"][0]) + textwrap.dedent(
        """

        class Layers(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.layers = nn.ModuleList([Model(width, n == 1) for n in range(3)])

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x
        """
    )
    schedule = (SCHEDULE % "summed").replace("m.Model(4)", "m.Layers(4)")
    output = rewritten(tmp_path, layers, schedule.replace("s.fuse", 's["layers.*"].fuse'))
    text = output.files[output.model_file]
    assert "FusedModel(width, n == 1) if n == 1 else Model(width, n == 1)" in text
    assert text.count("def _summed") == 1
