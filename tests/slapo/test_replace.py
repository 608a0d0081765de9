"""What Slapo's own tests of whole-module replacement hold, on source."""

from __future__ import annotations

from tests.rewriting import changed_lines, rewritten

MODEL = """\
import torch
from torch import nn


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.activation(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.inner = Inner()
        self.items = nn.ModuleList([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)])
        self.seq = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        x = self.inner(self.act(self.fc(x)))
        for item in self.items:
            x = item(x)
        return self.seq(x)
"""

SCHEDULE = """\
import torch
from torch import nn


def activated(features, outputs):
    return nn.Sequential(nn.Linear(features, outputs), nn.ReLU())


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.sum()


def schedule(s):
"""


def test_one_module(tmp_path):
    text = changed_lines(rewritten(tmp_path, MODEL, SCHEDULE + '    s["act"].replace(nn.GELU)\n'))
    assert text == "-        self.act = nn.ReLU()\n+        self.act = nn.GELU()\n"


def test_all_of_a_type_below_too(tmp_path):
    text = changed_lines(
        rewritten(tmp_path, MODEL, SCHEDULE + "    s.replace_all(nn.ReLU, nn.GELU)\n")
    )
    assert text.count("+") == text.count("nn.GELU()") == 4


def test_by_a_function_that_gives_a_sequential(tmp_path):
    weights = '{"0.weight": "weight", "0.bias": "bias"}'
    lines = f'    s["fc"].replace(activated, weights={weights})\n    assert "fc.0" in s\n'
    output = rewritten(tmp_path, MODEL, SCHEDULE + lines)
    assert "+            lambda: activated(8, 8),\n" in changed_lines(output)
    assert "def activated(features, outputs):" in output.files["modules.py"]


def test_in_lists(tmp_path):
    lines = '    s["{items,seq}"].replace_all(nn.ReLU, nn.GELU)\n'
    text = changed_lines(rewritten(tmp_path, MODEL, SCHEDULE + lines))
    assert "[nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]" in text
    assert "nn.Sequential(nn.Linear(8, 8), nn.GELU())" in text
