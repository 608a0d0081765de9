"""Patterns with several results, as methods and as separate compiled functions."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch
import torch.nn.functional as F

from tests.finding import HEAD, forward
from tests.patterns.test_several import CASES, INIT
from tests.rewriting import changed_lines, imported, refused, rewritten, written

SCHEDULE = """\
import torch
from torch.nn import functional as F


def model(m):
    return m.Model()


def inputs(model):
    return {{"x": torch.randn(4, 4), "y": torch.randn(4, 4), "z": torch.randn(4, 4)}}


def loss(outputs):
    return sum(output.square().mean() for output in outputs)


{pattern}

def schedule(s):
    s.fuse({asked})
"""


def schedule(pattern, more: str = "") -> str:
    text = textwrap.dedent(inspect.getsource(pattern))
    return SCHEDULE.format(pattern=text, asked=pattern.__name__ + more)


def model(body: str) -> str:
    return HEAD + forward(body, init=INIT)


@pytest.mark.parametrize("compiler", [None, "inductor"])
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_numbers(case, compiler, tmp_path, monkeypatch):
    body, pattern = case[:2]
    asked = schedule(pattern, f", compiler={compiler!r}, name='both_of_them'")
    if ":=" in body:
        assert "keeps no name" in refused(tmp_path, model(body), asked, "SR309")
        return
    output = rewritten(tmp_path, model(body), asked)
    assert "both_of_them" in changed_lines(output)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    original = imported(next(tmp_path.glob("source_*.py"))).Model().double().eval()
    changed = imported(written(tmp_path, output)).Model().double().eval()
    changed.load_state_dict(original.state_dict())
    given = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    one, two = ([*torch.atleast_1d(m(*given))] for m in (original, changed))
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


def sum_first(x, residual, shape, weight, bias, eps):
    total = residual + x
    return total, F.layer_norm(total, shape, weight, bias, eps)


def test_a_kernel_gives_its_results_by_its_own_pattern(tmp_path):
    body = "x = x + y\nr = x\nx = self.norm(x)\nreturn self.fc(x) + r"
    asked = schedule(sum_first, ', compiler="triton"')
    lines = changed_lines(rewritten(tmp_path, model(body), asked))
    assert "+        x, r = residual_layer_norm(" in lines
