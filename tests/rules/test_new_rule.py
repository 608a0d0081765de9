"""A rule is one file with its pattern and its replacement. This is such a file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.fusion import BY_OPERATIONS, Alternative, Example, Numerics, Refusal, Rule
from slapo_rewrite.fusion.registry import rules
from tests.rewriting import changed_lines, refused, rewritten
from tests.rules.test_rules import compare


def written_out(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


def softsign(x: Tensor) -> Tensor:
    return F.softsign(x)


MODEL = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        return y / (torch.abs(y) + 1)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Net(8)


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("softsign")
"""


class Softsign(Rule):
    """Call `F.softsign` where it is written out.

    Rewrite:
        y / (torch.abs(y) + 1)
        -->
        nn.functional.softsign(y)

    Shapes:
        x (...) -> (...)

    Numerics:
        Exact: torch does the same.

    State:
        Unchanged.

    Raises:
        SR309 another constant, or another function.

    Source: torch.nn.functional.softsign.
    """

    name = "softsign"
    numerics = Numerics.EXACT
    conditions = BY_OPERATIONS
    alternatives = (Alternative(written_out, softsign),)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
-import torch
-        return y / (torch.abs(y) + 1)
+        return nn.functional.softsign(y)
""",
        ),
    )
    refusals = (Refusal(MODEL.replace("+ 1)", "+ 2)"), SCHEDULE, "SR309"),)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(rules(), Softsign.name, Softsign())


def test_it_is_written_and_computes_the_same(tmp_path):
    output = rewritten(tmp_path, MODEL, SCHEDULE)
    assert changed_lines(output) == Softsign.examples[0].diff
    compare(rules()["softsign"], tmp_path, output)
    assert torch.equal(written_out(torch.arange(-3.0, 3.0)), softsign(torch.arange(-3.0, 3.0)))


def test_what_is_no_softsign_is_refused(tmp_path):
    (refusal,) = Softsign.refusals
    refused(tmp_path, refusal.source, refusal.schedule, refusal.code)
