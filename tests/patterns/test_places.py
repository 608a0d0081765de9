"""The code that a call replaces, and the operands that it gets there."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.finding import forward, selection

INIT = "self.fc = nn.Linear(4, 4)\nself.act = nn.GELU()\nself.bias = nn.Parameter(torch.ones(4))"


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def chosen(x, bias):
    return F.gelu(x + bias if bias is not None else x)


def summed(x, y):
    return F.gelu(x) + y


def both(x, y):
    return F.gelu(x) + F.relu(y)


# Body, pattern, the text replaced, the text before the call, lines removed, operands.
CASES = [
    ("return F.gelu(x + y)", bias_gelu, "F.gelu(x + y)", "", [], ("x", "y")),
    ("return F.gelu(self.fc(x) + y)", bias_gelu, "F.gelu(self.fc(x) + y)", "", [],
     ("y", "self.fc(x)")),
    ("a = x + y\nb = z\nreturn self.act(a)", bias_gelu, "self.act(a)", "", ["a = x + y"],
     ("x", "y")),
    ("x = x + y\nx = F.gelu(x)\nreturn x", bias_gelu, "F.gelu(x)", "", ["x = x + y"], ("x", "y")),
    ("x = self.fc(x)\nx = x + self.bias\nx = F.gelu(x)\nreturn x", bias_gelu, "F.gelu(x)", "",
     ["x = x + self.bias"], ("x", "self.bias")),
    ("t = x\na = t + y\nx = z\nreturn F.gelu(a)", bias_gelu, "F.gelu(a)", "", ["a = t + y"],
     ("t", "y")),
    ("a = self.fc(x)\na += y\nreturn F.gelu(a)", bias_gelu, "F.gelu(a)", "", ["a += y"],
     ("y", "a")),
    ("a = F.gelu(x)\na += y\nreturn a", summed, "a += y", "a = ", ["a = F.gelu(x)"], ("x", "y")),
    ("if y is not None:\n    x = x + y\nreturn F.gelu(x)", chosen, "F.gelu(x)", "",
     ["if y is not None:"], ("x", "y")),
    ("if y is not None:\n    a = x + y\nelse:\n    a = x\nreturn F.gelu(a)", chosen, "F.gelu(a)",
     "", ["if y is not None:"], ("x", "y")),
    ("return F.gelu(x + y if y is not None else x)", chosen,
     "F.gelu(x + y if y is not None else x)", "", [], ("x", "y")),
    ("a, b = F.gelu(x), F.relu(y)\nreturn a + b", both, "a + b", "",
     ["a, b = F.gelu(x), F.relu(y)"], ("x", "y")),
    ("with torch.no_grad():\n    a: torch.Tensor = x + y\n    z = F.gelu(a)\nreturn z", bias_gelu,
     "F.gelu(a)", "", ["a: torch.Tensor = x + y"], ("x", "y")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_replaced(tmp_path, case):
    body, pattern, text, before, removed, operands = case
    (match,) = selection(tmp_path, forward(body, init=INIT)).find(pattern)
    place = match.replaced
    assert match.file.segment(place.node) == text and place.target == before
    assert [match.file.segment(s).splitlines()[0] for s in place.removed] == removed
    assert place.whole and tuple(match.operands.values()) == operands


@pytest.mark.parametrize(
    "body",
    [
        "a, b = x + y, z\nreturn F.gelu(a) + b",
        "a = b = x + y\nreturn F.gelu(b)",
    ],
)
def test_a_statement_that_does_more_stays(tmp_path, body):
    """Found all the same; but one call cannot stand for it."""
    (match,) = selection(tmp_path, forward(body, init=INIT)).find(bias_gelu)
    assert not match.replaced.whole and len(match.replaced.kept) == 1


def test_what_a_match_says(tmp_path):
    body = "a = self.fc(x) + y\n\nb = self.act(a)  # why\nreturn b"
    (match,) = selection(tmp_path, forward(body, init=INIT)).find(bias_gelu)
    text = match.file.text
    assert [text[a:b] for a, b in match.spans] == ["self.fc(x) + y", "self.act(a)"]
    first = text[: match.spans[0][0]].count("\n") + 1
    assert match.lines == [first, first + 2] and match.place.line == first + 2
    assert match.function == "forward" and match.path == ""
    assert str(match) == f"the model, forward, line {first}-{first + 2}: x = y, bias = self.fc(x)"


def test_methods_and_functions_of_the_file(tmp_path):
    source = """
    def helper(x, y):
        z = x + y
        return F.gelu(z), z.sum()


    class Base(nn.Module):
        def forward(self, x, y):
            return self.both(x, y)[0]


    class Model(Base):
        def both(self, x, y):
            return helper(x, y), F.gelu(x + y)
    """
    found = selection(tmp_path, source).find(bias_gelu)
    assert [match.function for match in found] == ["both"]
    assert "helper" in found[0].file.functions
