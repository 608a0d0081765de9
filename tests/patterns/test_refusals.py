"""Functions that are not patterns are refused, with their line and the schedule's."""

from __future__ import annotations

import pytest

from slapo_rewrite.primitives.find import MLP, MODEL
from tests.rewriting import refused, rewritten

ASKED = "\n\ndef schedule(s):\n    s.find(wanted)\n"
REFUSED = {
    "def wanted(x):\n    if x > 0:\n        return x\n    return -x": ("a branch", "if x > 0:"),
    "def wanted(x):\n    for _ in x:\n        x = x + x\n    return x": ("a loop", "for _ in x:"),
    "def wanted(x, y):\n    x += y\n    return x": ("in place", "x += y"),
    "def wanted(x, y):\n    return x.add_(y)": ("without writes", "x.add_(y)"),
    "def wanted(x, y):\n    x[0] = y\n    return x": ("a store", "x[0] = y"),
    "def wanted(x):\n    print(x)\n    return -x": ("without a result", "print(x)"),
    "def wanted(x):\n    return x": ("computes nothing", "return x"),
    "def wanted(x):\n    return -x, x": ("returns `x`, which it does not", "return -x, x"),
    "def wanted(x):\n    y = -x\n    return y, y": ("one value as a tuple", "return y, y"),
    "def wanted(x):\n    return (-x,)": ("one value as a tuple", "return (-x,)"),
    "def wanted(x, y):\n    return -x, -y": ("nothing in common", "return -x, -y"),
    "def wanted(x, y):\n    return -x": ("`y` is not used", "def wanted(x, y):"),
    "def wanted(x):\n    y = x * 2\n    return -x": ("does not return it", "y = x * 2"),
    "def wanted(*xs):\n    return sum(xs)": ("any number", "def wanted(*xs):"),
    "def wanted(x):\n    return F.gelu(*x)": ("a star-argument", "return F.gelu(*x)"),
    "def wanted(x):\n    return [v + 1 for v in x]": ("a comprehension", "for v in x"),
    "def wanted(x):\n    return (y := x + 1) * y": ("an assignment inside", "y := x"),
    "def wanted(x):\n    return functional.gelu(x)": (
        "`functional` is not defined",
        "functional.gelu",
    ),
    "def wanted(x):\n    -x": ("without a result", "-x"),
    "wanted = eval('lambda x: -x')": ("is not a file", "s.find(wanted)"),
    "class wanted(torch.nn.Module):\n    def __init__(self, n):\n        super().__init__()": (
        "missing 1 required positional argument",
        "s.find(wanted)",
    ),
    "class wanted(torch.nn.Module):\n    def forward(self, x):\n        while x: pass": (
        "a loop",
        "while x:",
    ),
}


@pytest.mark.parametrize("text", REFUSED, ids=REFUSED)
def test_no_pattern(tmp_path, text):
    words, line = REFUSED[text]
    shown = refused(tmp_path, MLP, MODEL + text + ASKED, "SR210")
    assert words in shown and line in shown and "s.find(wanted)" in shown


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("s.find()", "takes a pattern"),
        ("s.find(abs, where=abs)", "takes a pattern"),
        ("s.find(where=3)", "must be a function"),
        ("s.find('(')", "not a regular expression"),
        ("s.find(3)", "not 3"),
        ("s.find(abs)", "built-in function abs"),
        ("s.find(pattern_=abs)", "did you mean `pattern`"),
    ],
)
def test_no_argument(tmp_path, call, words):
    schedule = MODEL + f"def schedule(s):\n    {call}\n"
    assert words in refused(tmp_path, MLP, schedule, "SR206")


def test_finding_changes_nothing_and_looks_at_what_stands_there_now(tmp_path, capsys):
    new = """
from torch import nn


class Ours(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return torch.relu(x + 1)


def schedule(s):
    print(len(s["act"].find(lambda x: torch.relu(x + 1))))
    s["act"].replace(Ours, args="")
    print(len(s["act"].find(lambda x: torch.relu(x + 1))), s["act"].find(r"any"))
"""
    output = rewritten(tmp_path, MLP, MODEL + new)
    assert capsys.readouterr().out == "0\n1 nothing found\n"
    assert "Ours" in output.files[output.model_file]
    asked_only = rewritten(tmp_path, MLP, MODEL + "def schedule(s):\n    s.find(r'up')\n")
    assert asked_only.diff() == ""
