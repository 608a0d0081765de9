"""What `auto` splits is the best of all that can be split, or near it."""

import textwrap

from benchmark import auto_exhaustive as exhaustive
from benchmark import report

MODELS = report.read(exhaustive.NAME)["models"]
SOURCE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words = nn.Embedding(64, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
"""
STEP = """
import torch


def model(m):
    return m.Model(2048)


def verify_model(m):
    return m.Model(8)


def inputs(model):
    return {"ids": torch.randint(64, (2, 5))}


def loss(outputs):
    return outputs
"""


def test_of_a_small_model_the_best_is_chosen(tmp_path):
    for name, text in (("m.py", SOURCE), ("step.py", STEP)):
        (tmp_path / name).write_text(textwrap.dedent(text))
    case = exhaustive.Case.of(str(tmp_path / "m.py"), str(tmp_path / "step.py"))
    found = exhaustive.outcome(case)
    assert found["units"] == 2
    assert found["legal"] > 1
    assert found["best_seconds"] < 0.9 * found["whole_seconds"]
    assert found["auto_seconds"] <= exhaustive.BAR * found["best_seconds"]


def test_all_models_are_as_near_as_the_bar():
    assert [found["model"] for found in MODELS] == [*exhaustive.MODELS]
    for found in MODELS:
        assert found["auto_seconds"] <= exhaustive.BAR * found["best_seconds"], found["model"]


def test_figures_are_those_of_the_result_file():
    text = exhaustive.table(report.read(exhaustive.NAME))
    assert report.marked(exhaustive.NAME, text) in report.README.read_text()
