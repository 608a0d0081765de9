"""Patterns that return several values: the position of their call, and its results' names."""

from __future__ import annotations

import textwrap

import pytest
import torch.nn.functional as F

from slapo_rewrite.code.lines import Lines, written
from slapo_rewrite.code.splice import apply_edits
from slapo_rewrite.directive import Directive
from slapo_rewrite.fusion.replacements import Writing, replacements
from tests.finding import forward, selection

INIT = "self.norm = nn.LayerNorm(4)\nself.fc = nn.Linear(4, 4)\nself.drop = nn.Dropout(0.1)"


def both(x, y):
    h = x + y
    normed = F.gelu(h)
    return normed, h


def nameless(x, y):
    h = x + y
    return F.gelu(h), h


def residual_norm(x, residual, shape, weight, bias, eps):
    residual = residual + x
    return F.layer_norm(residual, shape, weight, bias, eps), residual


def turned(q, k, cos):
    return q * cos, k * cos


def three(x, q, k, v):
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


# Body, pattern, the text replaced, the text before the call, statements removed, whether the call
# stands above, what becomes a name.
CASES = [
    ("h = x + y\nr = h\nh = F.gelu(h)\nreturn self.fc(h) + r", both,
     "h = F.gelu(h)", "h, r = ", ["h = x + y", "r = h"], False, {}),
    ("x = x + y\nr = x\nx = self.norm(x)\nreturn self.fc(x) + r", residual_norm,
     "x = self.norm(x)", "x, r = ", ["x = x + y", "r = x"], False, {}),
    ("h = x + y\nn = F.gelu(h)\nreturn n, h", both,
     "n, h", "", ["h = x + y", "n = F.gelu(h)"], False, {}),
    ("h = x + y\nn = F.gelu(h)\nreturn h, n", both,
     "n = F.gelu(h)", "n, h = ", ["h = x + y"], False, {}),
    ("h = x + y\nreturn h, F.gelu(h)", both,
     "return h, F.gelu(h)", "normed, h = ", ["h = x + y"], True, {"F.gelu(h)": "normed"}),
    # A part of a larger expression gets a name, and one that is free.
    ("x = x + y\nx = x + self.fc(F.gelu(x))\nreturn x", both,
     "x = x + self.fc(F.gelu(x))", "normed, x = ", ["x = x + y"], True, {"F.gelu(x)": "normed"}),
    ("normed = z\nx = x + y\nx = x + self.fc(F.gelu(x))\nreturn x + normed", both,
     "x = x + self.fc(F.gelu(x))", "normed_2, x = ", ["x = x + y"], True,
     {"F.gelu(x)": "normed_2"}),
    ("x = x + y\nx = x + self.fc(F.gelu(x))\nreturn x", nameless,
     "x = x + self.fc(F.gelu(x))", "nameless_0, x = ", ["x = x + y"], True,
     {"F.gelu(x)": "nameless_0"}),
    ("return self.fc(F.gelu(h := x + y)) + h", both,
     "return self.fc(F.gelu(h := x + y)) + h", "normed, h = ", [], True,
     {"F.gelu(h := x + y)": "normed"}),
    ("n = F.gelu(h := x + y)\nreturn n + h", both,
     "n = F.gelu(h := x + y)", "n, h = ", [], False, {}),
    # Before the first use, where that is above the last result.
    ("h = x + y\nb = h * 2\nn = F.gelu(h)\nreturn n + h + b", both,
     "h = x + y", "n, h = ", ["n = F.gelu(h)"], False, {}),
    ("n = h = x + y\nb = n * 2\nn = F.gelu(h)\nreturn n + h + b", both,
     "n = h = x + y", "normed, h_2 = ", [], True, {"x + y": "h_2", "F.gelu(h)": "normed"}),
    ("a = x + y\nb = a\nc = F.gelu(b)\nreturn a + b + c", both,
     "a = x + y", "c, a = ", ["c = F.gelu(b)"], False, {}),
    # Side by side.
    ("a = x * z\nb = y * z\nreturn a + b", turned,
     "b = y * z", "a, b = ", ["a = x * z"], False, {}),
    ("a, b = x * z, y * z\nreturn a + b", turned, "x * z, y * z", "", [], False, {}),
    ("return x * z, y * z", turned, "x * z, y * z", "", [], False, {}),
    ("for i in range(2):\n    a = x * z\n    b = y * z\n    x = a + b\nreturn x", turned,
     "b = y * z", "a, b = ", ["a = x * z"], False, {}),
    ("a = F.linear(x, y)\nb = F.linear(x, z)\nc = F.linear(x, y + z)\nreturn a, c, b", three,
     "c = F.linear(x, y + z)", "a, b, c = ", ["a = F.linear(x, y)", "b = F.linear(x, z)"],
     False, {}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_where_the_call_stands(tmp_path, case):
    body, pattern, text, before, removed, above, reads = case
    (match,) = selection(tmp_path, forward(body, init=INIT)).find(pattern)
    place, segment = match.replaced, match.file.segment
    assert (segment(place.node), place.target, place.above) == (text, before, above)
    assert [segment(s) for s in place.removed] == removed
    assert {segment(node): name for node, name in place.reads} == reads
    assert place.whole


def test_results_are_in_the_order_of_the_pattern(tmp_path):
    body = "h = x + y\nr = h\nh = F.gelu(h)\nreturn h + r"
    (match,) = selection(tmp_path, forward(body)).find(both)
    assert [result.operation for result in match.results] == ["gelu", "add"]
    assert match.operands == {"x": "x", "y": "y"} and match.root is match.results[0]


STOPPED = [
    # Of what the pattern returns, others may be used; of what is inside, not.
    (both, "h = x + y\nb = h * 2\nx = b\nn = F.gelu(h)\nreturn n + h + x", ""),
    (turned, "a = x * z\nc = self.fc(a)\nb = c * z\nreturn a + b", "used before all results"),
    (turned, "a = x * z\nx.mul_(2)\nb = y * z\nreturn a + b", "overwritten"),
    (turned, "a = x * z\na.mul_(2)\nb = y * z\nreturn a + b", "overwritten"),
    (turned, "a = x * z\nz = y\nb = y * z\nreturn a + b", "two different values"),
    (turned, "a = x * z\nif y:\n    b = y * z\nreturn a + b", "a branch is in between"),
    (turned, "a = x * z\nreturn a, y and y * z", "a branch is in between"),
    (both, "return self.fc(F.gelu(x + y))", "but not used"),
    (both, "h = x + y\nn = F.gelu(h)\nreturn n", "but not used"),
    (turned, "a = x * z\nreturn a", "the rest of the pattern is found, but no `mul`"),
    (both, "h = x + y\nif z:\n    h = self.fc(h)\nn = F.gelu(h)\nreturn n, h", "a branch is"),
    (both, "h = self.drop(x) + y\nb = self.drop(h)\nn = F.gelu(h)\nreturn n, h, b", ""),
]


@pytest.mark.parametrize(("pattern", "body", "reason"), STOPPED, ids=[b for _, b, _ in STOPPED])
def test_stopped(tmp_path, pattern, body, reason):
    found = selection(tmp_path, forward(body, init=INIT)).find(pattern)
    if not reason:
        assert found and found[0].replaced.whole
        return
    assert not found, str(found)
    assert reason in str(found)


WRITTEN = [
    ("x = x + y  # sum\nx = x + self.fc(F.gelu(x))\nreturn x",
     "# sum\nnormed, x = both(x, y)\nx = x + self.fc(normed)\nreturn x"),
    ("h = x + y\nr = h\nh = F.gelu(h)\nreturn self.fc(h) + r",
     "h, r = both(x, y)\nreturn self.fc(h) + r"),
    ("n = h = x + y\nb = n * 2\nn = self.fc(F.gelu(h))\nreturn n + h + b",
     "normed, h_2 = both(x, y)\nn = h = h_2\nb = n * 2\nn = self.fc(normed)\nreturn n + h + b"),
    ("h = x + y\nreturn F.gelu(h), h", "return both(x, y)"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), WRITTEN, ids=[body for body, _ in WRITTEN])
def test_how_it_is_written(tmp_path, body, expected):
    s = selection(tmp_path, forward(body, init=INIT))
    (match,) = s.find(both)
    changes = replacements(match.file, [Writing(match.replaced, "both(x, y)", "both")])
    lines = {statement: Lines() for statement in changes}
    for statement, change in changes.items():
        change.add_to(lines[statement], (Directive(0, "apply", None, "", ()),))
    text, _ = apply_edits(match.file.text, written(match.file, lines))
    function = text[text.index("z):") + len("z):") :]
    assert textwrap.dedent(function).strip() == expected
