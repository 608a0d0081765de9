"""Loops over layers: the text of their iterations in each stage."""

import ast

import pytest

from slapo_rewrite.emit.write import write
from slapo_rewrite.stages.loops import loop_over, sliced
from slapo_rewrite.verify.rank_layout import Layout
from slapo_rewrite.verify.run import verify
from tests.rewriting import rewritten
from tests.stages.cases import for_torch
from tests.stages.test_text import method


@pytest.mark.parametrize(
    ("head", "first", "second"),
    [
        ("for x in self.a:", "for x in self.a[:2]:", "for x in self.a[2:]:"),
        ("for x in self.a[1:]:", "for x in self.a[1:2]:", "for x in self.a[2:]:"),
        ("for x in self.a[: self.n]:", "for x in self.a[:2]:", "for x in self.a[2:self.n]:"),
        ("for i, x in enumerate(self.a):", "for x in self.a[:2]:", "for x in self.a[2:]:"),
        (
            "for x, y in zip(self.a, self.b):",
            "for x, y in zip(self.a[:2], self.b[:2]):",
            "for x, y in zip(self.a[2:], self.b[2:]):",
        ),
        (
            "for i, (x, y) in enumerate(zip(self.a, self.b)):",
            "for (x, y) in zip(self.a[:2], self.b[:2]):",
            "for (x, y) in zip(self.a[2:], self.b[2:]):",
        ),
    ],
)
def test_rounds(head, first, second):
    text = f"{head}\n    z = x(z)"
    assert sliced(text, 0, 2) == f"{first}\n    z = x(z)"
    assert sliced(text, 2, None) == f"{second}\n    z = x(z)"


@pytest.mark.parametrize(
    ("head", "second"),
    [
        ("for i, x in enumerate(self.a):", "for i, x in enumerate(self.a[2:], start=2):"),
        ("for i, x in enumerate(self.a, 1):", "for i, x in enumerate(self.a[2:], start=3):"),
        ("for i, x in enumerate(self.a[1:]):", "for i, x in enumerate(self.a[2:], start=1):"),
        (
            "for i, x in enumerate(zip(self.a, self.b)):",
            "for i, x in enumerate(zip(self.a[2:], self.b[2:]), start=2):",
        ),
    ],
)
def test_rounds_that_are_counted(head, second):
    assert sliced(f"{head}\n    z = x(z, i)", 2, None) == f"{second}\n    z = x(z, i)"


def test_rounds_that_are_counted_for_what_follows():
    text = "for i, x in enumerate(self.a):\n    z = x(z)"
    assert sliced(text, 0, 2, {"i"}) == "for i, x in enumerate(self.a[:2]):\n    z = x(z)"


def test_layers_by_their_number():
    text = "for i in range(len(self.blocks)):\n    z = self.blocks[i](z)"
    assert sliced(text, 2, None) == "for block in self.blocks[2:]:\n    z = block(z)"
    text = "for i in range(len(self.h)):\n    z = self.h[i](z) * i"
    assert (
        sliced(text, 2, None)
        == "for i, h_layer in enumerate(self.h[2:], start=2):\n    z = h_layer(z) * i"
    )


@pytest.mark.parametrize(
    "text",
    [
        "for x in reversed(self.a):\n    pass",
        "for x in self.a[::2]:\n    pass",
        "for x in self.a[-2:]:\n    pass",
        "for x, y in zip(self.a, y):\n    pass",
        "for x, y in zip(self.a[1:], self.b):\n    pass",
        "for i, x in enumerate(self.a, n):\n    pass",
        "for i in range(len(self.a)):\n    self.a[i](self.a[i - 1])",
        "for i in range(self.n):\n    self.a[i]()",
        "x = self.a",
    ],
)
def test_no_loop_over_layers(text):
    assert loop_over(ast.parse(text).body[0]) is None


# As torchvision writes ResNets: sequences of blocks, called one after the other.
BLOCKS = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x) + x)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.layer1 = self._make_layer(width, 2)
        self.layer2 = self._make_layer(width, 3)
        self.fc = nn.Linear(width, 5)

    def _make_layer(self, width, number):
        return nn.Sequential(*[Block(width) for _ in range(number)])

    def forward(self, image, label):
        x = self.layer2(self.layer1(self.stem(image)))
        return nn.functional.cross_entropy(self.fc(x.mean((2, 3))), label)
"""
OF_BLOCKS = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {{"image": torch.randn(4, 3, 8, 8), "label": torch.randint(5, (4,))}}


def schedule(s):
    {cut}
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("cut", "first", "second"),
    [
        (
            's["layer2.1"].cut_pipeline_stage()',
            """\
    input = self.layer1(self.stem(image))
    for module in self.layer2[:2]:
        input = module(input)
    return input""",
            "    for module in self.layer2[2:]:\n        input = module(input)\n    x = input\n",
        ),
        (
            's.cut_evenly(2, by="layers", target="torch")',
            "    for module in self.layer1:\n        input = module(input)\n    return input",
            "    x = self.layer2(input)\n",
        ),
    ],
)
def test_a_sequence_of_layers(cut, first, second, tmp_path):
    output = rewritten(tmp_path, BLOCKS, for_torch(OF_BLOCKS.format(cut=cut)))
    text = output.files["pipeline.py"]
    assert first in method(text, 0, "forward") and second in method(text, 1, "forward")
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", [Layout(2)])
    assert report.ok, report.render()


@pytest.mark.parametrize(
    "made",
    [
        "nn.Sequential(OrderedDict((f'block{n}', Block(width)) for n in range(number)))",
        "nn.Sequential()\n        for n in range(number):\n"
        "            made.add_module(f'block{n}', Block(width))",
    ],
)
def test_a_sequence_of_layers_with_names(made, tmp_path):
    plain = "return nn.Sequential(*[Block(width) for _ in range(number)])"
    source = BLOCKS.replace(plain, f"made = {made}\n        return made").replace(
        "import torch\n", "from collections import OrderedDict\n\nimport torch\n", 1
    )
    schedule = for_torch(OF_BLOCKS.format(cut='s["layer2.block1"].cut_pipeline_stage()'))
    text = rewritten(tmp_path, source, schedule).files["pipeline.py"]
    assert "    for module in self.layer2[:2]:\n" in method(text, 0, "forward")
    assert "    for module in self.layer2[2:]:\n" in method(text, 1, "forward")
