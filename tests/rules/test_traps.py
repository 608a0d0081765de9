"""Models that resemble what a rule matches, but differ: the numbers stay the same."""

from __future__ import annotations

import pytest
import torch
from slapo_rewrite.rules.fusions import sdpa

from slapo_rewrite.schedule.load import ScheduleFile
from tests.rewriting import imported, rewritten, written

NORM = """\
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention, self.norm = nn.Linear(width, width), Norm(width)
        self.after = True

    def forward(self, x):
        residual = x
        x = self.attention(x)
        x = x + residual
        if self.after:
            residual = x
        x = self.norm(x)
        return x + residual
"""
BLOCK = """\
import torch


def model(m):
    return m.Block(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.pow(3).mean()


def schedule(s):
    s.apply("residual_rms_norm")
"""
TRIANGLE = "torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)"
SEEN = f'self.register_buffer("seen", {TRIANGLE})'
WIDER = SEEN.replace("torch.ones(16, 16)", "torch.ones(16, 16), diagonal=1")
MASKS = {
    "shifted by a keyword": WIDER,
    "written to": f"{SEEN}\n        self.seen[..., :2] = 1",
    "written to in place": f"{SEEN}\n        self.seen.fill_(1)",
    "replaced": f"{SEEN}\n        self.seen = torch.ones_like(self.seen)",
    "one of two": f"if heads == 1:\n            {SEEN}\n        else:\n            {WIDER}",
    "in another shape": SEEN.replace("ones(16, 16)", "ones(32, 8)"),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
def test_a_mask_that_is_not_causal(mask: str, tmp_path):
    assert SEEN in sdpa.MODEL
    text = compare(tmp_path, sdpa.MODEL.replace(SEEN, mask), sdpa.SCHEDULE)
    assert "is_causal" not in text


def test_a_result_that_takes_the_name_of_another_which_is_read_in_between(tmp_path):
    """`x` is the sum in one line and the normalised sum below it."""
    text = compare(tmp_path, NORM, BLOCK)
    assert "normed, x = residual_rms_norm(" in text and "x = normed" in text


def compare(folder, source: str, schedule: str, **tolerance: float) -> str:
    """Rewrites, holds outputs and gradients against the original's, gives the model's text."""
    output = rewritten(folder, source, schedule)
    given = ScheduleFile.load(str(folder / "s.py")).module
    found = []
    for path in (next(folder.glob("source_*.py")), written(folder, output)):
        torch.manual_seed(0)
        model = given.model(imported(path))
        outputs = model(**given.inputs(model))
        given.loss(outputs).backward()
        found.append([outputs, *(p.grad for p in model.parameters() if p.grad is not None)])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, **tolerance)
    return output.files[output.model_file]


def test_the_original_is_still_what_its_name_stands_for(tmp_path):
    output = rewritten(tmp_path, NORM, BLOCK)
    text = (tmp_path / "source_0.py").read_text()
    assert text != output.files[output.model_file]
    block = imported(tmp_path / "source_0.py").Block
    assert block.forward.__code__.co_names.count("residual_rms_norm") == 0
