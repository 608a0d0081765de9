"""Replacing modules that are not made by a plain call of their class."""

from __future__ import annotations

from tests.rewriting import changed_lines, refused, rewritten

NET = """\
from torch import nn

ACTIVATIONS = {"relu": nn.ReLU(), "tanh": nn.Tanh()}


class Net(nn.Module):
    def __init__(self, act="relu"):
        super().__init__()
        self.act = ACTIVATIONS[act]

    def forward(self, x):
        return self.act(x)
"""

SCHEDULE = """\
import torch
from torch import nn


def model(m):
    return m.Net()


def schedule(s):
"""


def test_what_a_table_holds_is_replaced_where_arguments_are_given(tmp_path):
    output = rewritten(tmp_path, NET, SCHEDULE + '    s["act"].replace(nn.GELU, args="")\n')
    assert changed_lines(output) == (
        "-        self.act = ACTIVATIONS[act]\n+        self.act = nn.GELU()\n"
    )


def test_what_no_import_shows_is_imported(tmp_path):
    source = "import torch.nn\n" + NET.replace("from torch import nn\n", "").replace(
        "nn.", "torch.nn."
    )
    output = rewritten(tmp_path, source, SCHEDULE + '    s["act"].replace(nn.GELU, args="")\n')
    assert "+from torch.nn import GELU\n" in changed_lines(output)


def test_without_arguments_the_hint_asks_for_them(tmp_path):
    text = refused(tmp_path, NET, SCHEDULE + '    s["act"].replace(nn.GELU)\n', "SR103")
    assert 'replace(..., args="...")' in text and "source_0.py:9" in text


def test_a_schedule_that_exits(tmp_path):
    text = refused(tmp_path, NET, SCHEDULE + "    raise SystemExit(4)\n", "SR201")
    assert "raises SystemExit: 4" in text
