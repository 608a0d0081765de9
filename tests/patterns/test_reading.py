"""Equal modules are read once; modules that differ are read separately."""

from __future__ import annotations

from tests.rewriting import rewritten

MODEL = """\
from torch import nn


class Gate(nn.Module):
    def __init__(self, width, number, dim, slope):
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.number = number
        self.softmax = nn.Softmax(dim=dim)
        self.act = nn.LeakyReLU(slope)

    def forward(self, x):
        return self.act(self.softmax(self.gate(x))) + 0 * self.number


class Gates(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gates = nn.ModuleList(
            Gate(width, i, 1 if i == 1 else 0, 0.2 if i == 2 else 0.1) for i in range(5)
        )

    def forward(self, x):
        for gate in self.gates:
            x = gate(x)
        return x
"""
SCHEDULE = """\
import torch
from torch.nn import functional as F


def model(m):
    return m.Gates(8)


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def gated(x):
    return F.leaky_relu(F.softmax(x, dim=DIM), 0.1)


def schedule(s):
    print([match.path for match in s["gates.*"].find(gated)])
"""


def test_differences_count(tmp_path, capsys):
    rewritten(tmp_path, MODEL, SCHEDULE.replace("DIM", "0"))
    assert capsys.readouterr().out == "['gates.0', 'gates.3', 'gates.4']\n"


def test_what_differs_may_be_what_matches(tmp_path, capsys):
    rewritten(tmp_path, MODEL, SCHEDULE.replace("DIM", "1"))
    assert capsys.readouterr().out == "['gates.1']\n"
