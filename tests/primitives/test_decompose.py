"""Biases added at calls of linear layers: numbers, parentheses, and obstacles."""

from __future__ import annotations

import pytest

from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify
from tests.rewriting import changed_lines, refused, rewritten

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.up = Conv1D(4 * width, width)
        self.down = Conv1D(width, 4 * width)
        self.out = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        x = -self.query(x).relu()
        return self.out(x + self.down(F.gelu(self.up(x + 1))))


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def hook(module, inputs, output):
    return output


def schedule(s):
    blocks = s["blocks.*"]
"""
DECOMPOSED = '    blocks["{query,up,down}"].decompose()\n'
SHARDED = """\
    blocks["up"].shard(["weight"], axis=1).shard("bias", axis=0).sync("bwd_post", "all_reduce")
    blocks["down"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
"""


@pytest.mark.parametrize("first", [DECOMPOSED, ""])
def test_a_call_that_became_a_sum_is_not_checkpointed_alone(first, tmp_path):
    """It ended in a traceback; what is advised works."""
    alone = '    blocks.checkpoint(["query"])\n'
    text = refused(tmp_path, MODEL, SCHEDULE + first + alone + (DECOMPOSED * (not first)), "SR306")
    assert "another change writes the call of `self.query` as `linear_product(" in text
    several = alone.replace("query", 'query", "F.gelu')
    rewritten(tmp_path, MODEL, SCHEDULE + DECOMPOSED + several)


def test_sums_keep_to_themselves(tmp_path):
    text = " ".join(changed_lines(rewritten(tmp_path, MODEL, SCHEDULE + DECOMPOSED)).split())
    assert "+ x = -(linear_product(x, self.query) + self.query.bias).relu()" in text
    assert "F.gelu(linear_product(x + 1, self.up) + self.up.bias), self.down" in text
    assert "self.down + ) + + self.down.bias + )" in text  # the sum stands in parentheses


@pytest.mark.processes
def test_numbers(tmp_path):
    output = rewritten(tmp_path, MODEL, SCHEDULE + SHARDED + DECOMPOSED)
    assert "all_reduce_gradient(x + 1) @ self.up.weight + self.up.bias" in changed_lines(output)
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", (1, 2, 4))
    assert report.ok


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('blocks["out.0"].decompose()', "no method of `Block` calls `self.out[0](...)`"),
        ('blocks["out.1"].decompose()', "`blocks.0.out.1` is a GELU, not a linear layer"),
        ('blocks["up"].decompose().sync("fwd_post", hook)', "needs a call of the layer"),
        ('blocks["up"].decompose().checkpoint()', "needs a call of the layer"),
        (
            'blocks["query"].decompose().shard(["weight", "bias"], axis=0)'
            '.sync("fwd_post", "all_gather", axis=-1).sync("bwd_post", "all_reduce")',
            "needs a call of the layer",
        ),
    ],
)
def test_what_stands_against_it(tmp_path, lines, words):
    assert words in refused(tmp_path, MODEL, SCHEDULE + f"    {lines}\n", "SR305")
