"""Changing one call, and one statement's layout."""

from __future__ import annotations

import pytest

from slapo_rewrite.edit.expressions import formatted, parenthesised, replace_call
from slapo_rewrite.edit.text import condition


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nn.Linear(a, b)", "New(a, b, k=1)"),
        ("nn.Linear( a,b )  ", "New( a,b, k=1 )"),
        ("nn.Linear(a, bias=False,)", "New(a, bias=False, k=1,)"),
        ("nn.Linear()", "New(k=1)"),
        ("nn.Linear(*a, **b)", "New(*a, **b, k=1)"),
        ("nn.Linear(\n    a,  # in\n    b,  # out\n)", "New(\n    a,  # in\n    b, k=1,  # out\n)"),
    ],
)
def test_replace_call(before, after):
    assert replace_call(before.strip(), "New", [("k", "1")]) == after.strip()


def test_other_arguments():
    assert replace_call("nn.Linear(a, b)", "New", arguments="c, d=e") == "New(c, d=e)"


@pytest.mark.parametrize(
    ("text", "result"),
    [("a + b", "(a + b)"), ("f(a)", "f(a)"), ("a if b else c", "(a if b else c)"), ("(a)", "(a)")],
)
def test_parenthesised(text, result):
    assert parenthesised(text) == result


def test_formatted_keeps_quotes_and_indents_what_follows():
    text = "self.x = f('a', aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb)"
    assert formatted(text, 8, 88) == (
        "self.x = f(\n"
        "            'a', aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\n"
        "        )"
    )


@pytest.mark.parametrize(
    ("indices", "total", "text"),
    [
        ([0], 4, "i == 0"),
        ([0, 1, 2], 6, "i < 3"),
        ([4, 5], 6, "i >= 4"),
        ([2, 3], 6, "2 <= i < 4"),
        ([0, 2, 4], 6, "i % 2 == 0"),
        ([1, 4, 7], 9, "i % 3 == 1"),
        ([0, 2, 4], 12, "i in (0, 2, 4)"),
        ([0, 1, 5], 6, "i in (0, 1, 5)"),
    ],
)
def test_condition(indices, total, text):
    assert condition("i", indices, total) == text
    assert [i for i in range(total) if eval(text)] == indices
