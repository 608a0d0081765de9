"""One module that replaces several with the same operand."""

from __future__ import annotations

import pytest

from tests.rewriting import refused

PACKED = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = Attention(width)
        self.apply(self.initialise)

    def initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.bias)

    def forward(self, x):
        return self.attention(x)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.key = nn.Linear(width, width)
        self.query = nn.Linear(width, width)

    def forward(self, x):
        return torch.sigmoid(self.query(x)) * self.key(x)
"""


SCHEDULE = """\
from torch import nn


def model(m):
    return m.Net(8)


def schedule(s):
    s["attention"].replace(nn.Linear, "query|key", name="both")
"""
READ_OUTSIDE = """\
        if isinstance(module, Attention):
            nn.init.zeros_(module.key.weight)
        if isinstance(module, nn.Linear)"""
READ_INSIDE = """\
    def norm(self):
        return self.key.weight.norm()

    def forward(self, x):
        return torch"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        if isinstance(module, nn.Linear)", READ_OUTSIDE),
        ("    def forward(self, x):\n        return torch", READ_INSIDE),
    ],
    ids=["outside", "inside"],
)
def test_what_is_read_elsewhere_is_not_packed(tmp_path, old, new):
    text = refused(tmp_path, PACKED.replace(old, new), SCHEDULE, "SR305")
    assert "key` is read here" in text
