"""Slapo's `Verify`, on source: original against rewritten, gradients and training included."""

from __future__ import annotations

import pytest

from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify
from tests.rewriting import refused, rewritten

SOURCE = """\
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(20, 30)
        self.linear2 = nn.Linear(30, 40)

    def forward(self, data):
        out = self.linear1(data)
        return self.linear2(out)
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"data": torch.rand(10, 20)}


def loss(outputs):
    return outputs.square().mean()


def half_of_the_sum(module, args, output):
    return output.detach() * 0 + output


def schedule(s):
    s["linear1"].shard(["weight", "bias"], axis=0)
    s["linear1"].sync("bwd_post", "all_reduce")
    s["linear2"].shard("weight", axis=1)
"""


def test_what_cannot_be_right_is_refused_before_anything_runs(tmp_path):
    """Slapo finds a missing all-reduce by running the model; here nothing is written."""
    words = refused(tmp_path, SOURCE, SCHEDULE, "SR104")
    assert "is a partial sum on each rank" in words and "all_reduce" in words


@pytest.mark.long
@pytest.mark.processes
def test_linear_layers(tmp_path):
    """It passes as scheduled, and fails if a user's function replaces the sum."""
    good = SCHEDULE + '    s["linear2"].sync("fwd_post", "all_reduce")\n'
    write(tmp_path / "good", rewritten(tmp_path, SOURCE, good).files)
    report = verify(tmp_path / "good", [1, 2])
    assert report.ok, report.render()
    assert {"outputs", "gradients", "weights after 3 steps"} <= {row.name for row in report.rows}

    bad = SCHEDULE + '    s["linear2"].sync("fwd_post", half_of_the_sum)\n'
    write(tmp_path / "bad", rewritten(tmp_path, SOURCE, bad).files)
    report = verify(tmp_path / "bad", [1, 2])
    wrong = {(row.world, row.name) for row in report.rows if not row.ok}
    assert (2, "outputs") in wrong and not any(world == 1 for world, _ in wrong)
