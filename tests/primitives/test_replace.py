"""Replacing whole modules, also those that are not made by a plain call of their class."""

from __future__ import annotations

import pytest

from tests.rewriting import changed_lines, refused, rewritten

MODEL = """\
import torch
from torch import nn


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.activation(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.inner = Inner()
        self.items = nn.ModuleList([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)])
        self.seq = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        x = self.inner(self.act(self.fc(x)))
        for item in self.items:
            x = item(x)
        return self.seq(x)
"""

SCHEDULE = """\
import torch
from torch import nn


def activated(features, outputs):
    return nn.Sequential(nn.Linear(features, outputs), nn.ReLU())


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.sum()


def schedule(s):
"""


def test_one_module(tmp_path):
    text = changed_lines(rewritten(tmp_path, MODEL, SCHEDULE + '    s["act"].replace(nn.GELU)\n'))
    assert text == "-        self.act = nn.ReLU()\n+        self.act = nn.GELU()\n"


def test_all_of_a_type_below_too(tmp_path):
    text = changed_lines(
        rewritten(tmp_path, MODEL, SCHEDULE + "    s.replace_all(nn.ReLU, nn.GELU)\n")
    )
    assert text.count("+") == text.count("nn.GELU()") == 4


def test_by_a_function_that_gives_a_sequential(tmp_path):
    weights = '{"0.weight": "weight", "0.bias": "bias"}'
    lines = f'    s["fc"].replace(activated, weights={weights})\n    assert "fc.0" in s\n'
    output = rewritten(tmp_path, MODEL, SCHEDULE + lines)
    assert "+            lambda: activated(8, 8),\n" in changed_lines(output)
    assert "def activated(features, outputs):" in output.files["modules.py"]


def test_in_lists(tmp_path):
    lines = '    s["{items,seq}"].replace_all(nn.ReLU, nn.GELU)\n'
    text = changed_lines(rewritten(tmp_path, MODEL, SCHEDULE + lines))
    assert "[nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]" in text
    assert "nn.Sequential(nn.Linear(8, 8), nn.GELU())" in text


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

NET_SCHEDULE = """\
import torch
from torch import nn


def model(m):
    return m.Net()


def schedule(s):
"""


def test_what_a_table_holds_is_replaced_where_arguments_are_given(tmp_path):
    output = rewritten(tmp_path, NET, NET_SCHEDULE + '    s["act"].replace(nn.GELU, args="")\n')
    assert changed_lines(output) == (
        "-        self.act = ACTIVATIONS[act]\n+        self.act = nn.GELU()\n"
    )


def test_what_no_import_shows_is_imported(tmp_path):
    source = "import torch.nn\n" + NET.replace("from torch import nn\n", "").replace(
        "nn.", "torch.nn."
    )
    output = rewritten(tmp_path, source, NET_SCHEDULE + '    s["act"].replace(nn.GELU, args="")\n')
    assert "+from torch.nn import GELU\n" in changed_lines(output)


def test_without_arguments_the_hint_asks_for_them(tmp_path):
    text = refused(tmp_path, NET, NET_SCHEDULE + '    s["act"].replace(nn.GELU)\n', "SR103")
    assert 'replace(..., args="...")' in text and "source_0.py:9" in text


@pytest.mark.parametrize("called", ["(nn.ReLU if act == 'relu' else nn.Tanh)", "chosen(act)"])
def test_what_a_call_or_a_condition_chooses_is_refused(called, tmp_path):
    """It may choose another class in another configuration, which would be replaced as well."""
    source = NET.replace("ACTIVATIONS[act]", f"{called}()")
    source += '\n\ndef chosen(act):\n    return {"relu": nn.ReLU, "tanh": nn.Tanh}[act]\n'
    text = refused(tmp_path, source, NET_SCHEDULE + '    s["act"].replace(nn.GELU)\n', "SR103")
    assert "may be of another class" in text and "source_0.py:9" in text


def test_a_schedule_that_exits(tmp_path):
    text = refused(tmp_path, NET, NET_SCHEDULE + "    raise SystemExit(4)\n", "SR201")
    assert "raises SystemExit: 4" in text
