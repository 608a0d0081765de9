"""A schedule runs once, also if some of its lines change the source."""

from __future__ import annotations

from tests.rewriting import SPLITTING, changed_lines, refused, rewritten

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.zeros(4 * width))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x) + self.bias))


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
SCHEDULE = """\
import torch
from torch.nn import functional as F


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def residual(x, y):
    return x + y


def schedule(s):
    blocks = s["blocks.*"]
"""


def test_what_it_prints_comes_once(tmp_path, capsys):
    lines = """\
    print("once")
    blocks.fuse(bias_gelu)
    blocks.fuse(residual)
    print("at the end")
"""
    rewritten(tmp_path, MODEL, SCHEDULE + lines)
    assert capsys.readouterr().out == "once\nat the end\n"


def test_what_is_looked_for_is_found_as_the_source_is_then(tmp_path, capsys):
    lines = """\
    print(len(blocks.find(bias_gelu)))
    blocks.fuse(bias_gelu)
    print(len(blocks.find(residual)))
"""
    rewritten(tmp_path, MODEL, SCHEDULE + lines)
    # The new method adds as well.
    assert capsys.readouterr().out == "4\n8\n"


def test_what_was_selected_before_stands_for_the_same_modules(tmp_path):
    lines = """\
    first = s["blocks"][:2]
    blocks.fuse(bias_gelu)
    for block in first:
        block.checkpoint()
"""
    changes = changed_lines(rewritten(tmp_path, MODEL, SCHEDULE + lines))
    assert "+class CheckpointedBlock(Block):" in changes
    assert "CheckpointedBlock(width) if i < 2 else Block(width)" in changes
    assert "def _bias_gelu(self" in changes


def test_what_was_asked_before_holds_afterwards(tmp_path):
    lines = """\
    blocks["up"].annotate("weight", "tag", "up")
    blocks.fuse(residual)
"""
    changes = changed_lines(rewritten(tmp_path, MODEL, SCHEDULE + lines))
    assert 'annotate(self.up, "weight", tag="up")' in changes
    assert "_residual(" in changes


def test_what_was_replaced_before_is_there_afterwards(tmp_path):
    more = """\
class Wide(torch.nn.Module):
    def __init__(self, *_, **__):
        super().__init__()
        self.inner = torch.nn.Linear(8, 32, bias=False)

    def forward(self, x):
        return self.inner(x)


"""
    lines = """\
    s["blocks.0.up"].replace(Wide, weights={"inner.weight": "weight"})
    blocks.fuse(residual)
    s["blocks.0.up.inner"].annotate("weight", "tag", "inner")
"""
    schedule = SCHEDULE.replace("def schedule", more + "def schedule")
    changes = changed_lines(rewritten(tmp_path, MODEL, schedule + lines))
    assert "Wide" in changes
    assert "_residual(" in changes


def test_what_was_scheduled_cannot_go(tmp_path):
    schedule = SCHEDULE.replace(
        "def schedule", "class Both(torch.nn.Linear): ...\n\n\ndef schedule"
    )
    model = MODEL.replace("self.up(x) + self.bias", "self.up(x) + self.gate(x)").replace(
        "        self.down",
        "        self.gate = nn.Linear(width, 4 * width, bias=False)\n        self.down",
    )
    lines = """\
    blocks["up"].annotate("weight", "tag", "up")
    blocks.replace(Both, pattern="up|gate", args="8, 64, bias=False")
"""
    message = refused(tmp_path, model, schedule + lines, "SR306")
    assert "cannot be replaced after `blocks.0.up` in it was changed" in message


SCRIPTED = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        y = self.up(x)
        y = F.gelu(y)
        return other(half(y))


@torch.jit.script
def half(x):
    return x * 0.5


@torch.jit.script
def other(x):
    return x + 1.0
"""


def test_a_function_that_torchscript_compiles_is_the_one_of_the_text(tmp_path):
    """A statement before it moves it: of the file's lines another one would be compiled."""
    lines = '    s.apply("bias_gelu", backend="eager")\n    s["up"].checkpoint()\n'
    assert "linear_gelu" in rewritten(tmp_path, SCRIPTED, SPLITTING + lines).diff()
