"""`apply_all` applies every rule where it can, and reports why not elsewhere."""

from tests.rewriting import changed_lines, rewritten

SOURCE = """\
from torch import nn
from torch.nn import functional as F


class Gated(nn.Module):
    def __init__(self, dim, is_plain=False):
        super().__init__()
        self.up, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.is_plain = is_plain

    def forward(self, x):
        gate = F.silu(self.gate(x))
        if self.is_plain:
            return gate
        return gate * self.up(x)


class Last(Gated):
    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


class Model(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.blocks = nn.ModuleList()
        while len(self.blocks) < 3:
            self.blocks.append(Gated(dim, len(self.blocks) == 1))
        self.last = Last(dim)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 4, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply_all()
"""


def test_what_cannot_be_written_is_left_and_told(tmp_path):
    """No place tells the elements of the list apart; the other match stands elsewhere."""
    output = rewritten(tmp_path, SOURCE, SCHEDULE)
    assert "+        return swiglu(self.gate(x), self.up(x))\n" in changed_lines(output)
    assert "nothing counts them where they are constructed" in output.files["rewrite.json"]


def test_nothing_is_changed_where_nothing_can_be(tmp_path):
    source = SOURCE.replace("F.silu(self.gate(x)) * self.up(x)", "self.gate(x) * self.up(x)")
    output = rewritten(tmp_path, source, SCHEDULE)
    assert output.files[output.model_file] == source
