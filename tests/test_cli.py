"""The command line in everyday use: what it says where, and which output folders it takes."""

from __future__ import annotations

import re

import pytest

from slapo_rewrite.cli import main

SOURCE = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.down = nn.Linear(32, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 32)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["up"].shard(["weight", "bias"], axis=0)
    s["down"].shard("weight", axis=1)
    s.infer_sync()
"""

REWRITE = ["net.py", "--schedule", "s.py"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(SOURCE)
    (tmp_path / "s.py").write_text(SCHEDULE)


@pytest.mark.processes
def test_a_log_has_a_line_for_each_check(capsys):
    assert main([*REWRITE, "-o", "out"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["verify", "out", "--world", "2"]) == 0
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert all(re.fullmatch(r"world size 2: [\w' ]+: ok", line) for line in lines), lines
    assert {"world size 2: outputs: ok", "world size 2: gradients: ok"} <= set(lines)
    assert "\r" not in shown.err and "\x1b" not in shown.err
    report = shown.out.splitlines()
    assert report[0].startswith("world  check")
    assert "verified: rewritten equals original at world size 2" in report
