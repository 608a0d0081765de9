"""What prevents a match, and that nothing else does."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from slapo_rewrite import call_module
from tests.finding import forward, selection

INIT = """
self.fc = nn.Linear(4, 4)
self.norm = nn.LayerNorm(4)
self.drop = nn.Dropout(0.5)
self.inplace = nn.ReLU(inplace=True)
self.scale = 2.0
"""


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def dropped(x, p, training, r):
    return F.dropout(x, p, training) + r


def two_drops(x, y, p, training):
    return F.dropout(x, p, training) + F.dropout(y, p, training) * 2


STOPPED = [
    # An inner value is used elsewhere.
    ("a = x + y\nreturn F.gelu(a) + a", "used elsewhere"),
    ("a = x + y\nb = F.gelu(a)\nreturn b, a", "used elsewhere"),
    ("a = x + y\nself.kept = a\nreturn F.gelu(a)", "used elsewhere"),
    ("a = x + y\nif a.sum() > 0:\n    x = z\nreturn F.gelu(a) + x", "used elsewhere"),
    ("a = x + y\nf = lambda: a\nreturn F.gelu(a) + f()", "used elsewhere"),
    ("def f():\n    return a\na = x + y\nreturn F.gelu(a) + f()", "used elsewhere"),
    ("a = x + y\nreturn F.gelu(a) + sum(a for _ in range(2))", "used elsewhere"),
    ("a = x + y\nb = F.gelu(a)\nz = a if z is None else z\nreturn b + z", "used elsewhere"),
    ("a = x + y\nz['a'] = a\nreturn F.gelu(a)", "used elsewhere"),
    ("a = x + y\nif z:\n    b = F.gelu(a)\nelse:\n    b = a\nreturn b", "used elsewhere"),
    # A branch, a loop or another block is in between.
    ("a = x + y\nif z:\n    a = z\nreturn F.gelu(a)", "a branch is in between"),
    ("a = x + y\nif z:\n    x = F.gelu(a)\nreturn x", "a branch is in between"),
    ("if z:\n    a = x + y\nelse:\n    a = z\nreturn F.gelu(a)", "a branch is in between"),
    ("if z:\n    a = x + y\nelse:\n    return z\nreturn F.gelu(a)", "a branch is in between"),
    ("a = x + y\nreturn F.gelu(a) if z else x", "a branch is in between"),
    ("a = x + y\nreturn z and F.gelu(a)", "a branch is in between"),
    ("a = x + y\nfor _ in z:\n    x = F.gelu(a)\nreturn x", "a loop is in between"),
    ("a = z\nfor _ in z:\n    b = F.gelu(a)\n    a = x + y\nreturn b", "a loop is in between"),
    ("a = z\nfor _ in z:\n    a = x + y\nreturn F.gelu(a)", "a loop is in between"),
    ("a = x + y\nwhile z:\n    x = F.gelu(a)\nreturn x", "a loop is in between"),
    ("with torch.no_grad():\n    a = x + y\nreturn F.gelu(a)", "a `with` is in between"),
    (
        "try:\n    a = x + y\nexcept ValueError:\n    a = x\nreturn F.gelu(a)",
        "a `try` is in between",
    ),
    ("a = x + y\nmatch z:\n    case 1:\n        a = x\nreturn F.gelu(a)", "a branch is in between"),
    # An operand is overwritten, or something that shares its memory.
    ("a = x + y\nx.mul_(2)\nreturn F.gelu(a) + x", "overwritten"),
    ("a = x + y\nx *= 2\nreturn F.gelu(a) + x", "overwritten"),
    ("a = x + y\nx[0] = 2\nreturn F.gelu(a) + x", "overwritten"),
    ("v = x.view(-1)\na = x + y\nv.zero_()\nreturn F.gelu(a)", "overwritten"),
    ("a = x + y\ntorch.relu_(x)\nreturn F.gelu(a)", "overwritten"),
    ("a = x + y\nz = self.inplace(x)\nreturn F.gelu(a) + z", "overwritten"),
    ("a = x + y\nz = F.relu(x, inplace=True)\nreturn F.gelu(a) + z", "overwritten"),
    ("a = x + y\ntorch.mul(x, 2, out=x)\nreturn F.gelu(a)", "overwritten"),
    ("a = x + y\na.mul_(2)\nreturn F.gelu(a)", "overwritten"),
    # In place, where the memory is not the function's own, or somebody else reads it.
    ("x += y\nreturn F.gelu(x)", "overwritten"),
    ("a = self.fc(x)\nb = a\na += y\nreturn F.gelu(a) + b", "overwritten"),
    ("a = self.fc(x)\nb = a.view(-1)\na += y\nreturn F.gelu(a) + b", "overwritten"),
    # An operand's name holds something else where the result is.
    ("a = x + y\nx = z\nreturn F.gelu(a) + x", "`x` is bound again"),
    ("a = self.fc(x) + y\nx = z\nreturn F.gelu(a) + x", "`x` is bound again"),
    ("a = x + self.scale\nself.scale = z\nreturn F.gelu(a)", "`self.scale` is bound again"),
    # Hidden by what cannot be looked into.
    ("a = x + y\nreturn F.gelu(*a)", "the pattern has `gelu`"),
    ("a = [x + y for _ in z]\nreturn F.gelu(a)", "the pattern has `add`"),
]


@pytest.mark.parametrize(("body", "reason"), STOPPED, ids=[body for body, _ in STOPPED])
def test_stopped(tmp_path, body, reason):
    found = selection(tmp_path, forward(body, init=INIT)).find(bias_gelu)
    assert not found, str(found)
    assert found.nearest is not None and reason in found.nearest.render()


UNRELATED = [
    "a = x + y\nb = z * 2\nreturn F.gelu(a) + b",
    "a = x + y\nif z:\n    b = z * 2\nelse:\n    b = z\nreturn F.gelu(a) + b",
    "a = x + y\nfor _ in range(2):\n    z = z * 2\nreturn F.gelu(a) + z",
    "a = x + y\nif z is None:\n    raise ValueError('no z')\nreturn F.gelu(a)",
    "a = x + y\nif z is None:\n    return x\nreturn F.gelu(a)",
    "a = x + y\nself.last = z\nreturn F.gelu(a)",
    "a = x + y\nz.mul_(2)\nreturn F.gelu(a) + z",
    "a = x + y\nz['k'] = z\nreturn F.gelu(a)",
    "a = x + y\nz = self.drop(z)\nreturn F.gelu(a) + z",
    "a = x + y\nb = [v for v in z]\nreturn F.gelu(a), b",
    "x = x + y\nx = F.gelu(x)\nreturn x",
    "t = x\na = t + y\nx = z\nreturn F.gelu(a) + x",
    "a, b = x + y, z\nreturn F.gelu(a)",
    "if z:\n    a = x + y\n    x = F.gelu(a)\nreturn x",
    "for _ in z:\n    a = x + y\n    x = x * F.gelu(a)\nreturn x",
    "a = self.fc(x)\na += y\nreturn F.gelu(a)",
    "a = x\na = a + y\na = F.gelu(a)\nreturn a",
    "a: torch.Tensor = x + y\nreturn F.gelu(a)",
    "return F.gelu(x + y)",
    "return F.gelu(a := x + y)",
    "a = b = x + y\nreturn F.gelu(b)",
    "with torch.no_grad():\n    a = x + y\n    x = F.gelu(a)\nreturn x",
]


@pytest.mark.parametrize("body", UNRELATED)
def test_not_stopped(tmp_path, body):
    found = selection(tmp_path, forward(body, init=INIT)).find(bias_gelu)
    assert len(found) == 1, str(found)


def test_random_numbers_keep_their_order(tmp_path):
    def find(pattern, body):
        return selection(tmp_path, forward(body, init=INIT)).find(pattern)

    assert find(dropped, "a = self.drop(x)\nb = z * 2\nreturn a + b")
    assert find(dropped, "a = self.drop(x)\nb = self.fc(z)\nreturn a + b")
    for between in ("self.drop(z)", "F.dropout(z, 0.1, self.training)", "torch.rand_like(z)"):
        found = find(dropped, f"a = self.drop(x)\nb = {between}\nreturn a + z * b")
        assert "random numbers" in str(found), between
    assert find(two_drops, "a = self.drop(x)\nb = self.drop(y)\nreturn a + b * 2")
    found = find(two_drops, "b = self.drop(y)\na = self.drop(x)\nreturn a + b * 2")
    assert not found and "another order" in str(found)
    # One draw is not two.
    assert not find(two_drops, "a = self.drop(x)\nreturn a + a * 2")
    # An operand that moves with the match may not draw later than before.
    body = "a = self.drop(x) + y\nb = self.drop(z)\nreturn F.gelu(a) + b"
    assert "random numbers" in str(find(bias_gelu, body))


def test_the_miss_shows_both_lines(tmp_path):
    body = "a = x + y\nif z:\n    a = z\nreturn F.gelu(a)"
    text = str(selection(tmp_path, forward(body)).find(bias_gelu))
    assert "if z:" in text and "return F.gelu(x + bias)" in text
    assert "1 of 2 operations found" in text and __file__ in text


def test_what_is_read_twice_may_be_two_things(tmp_path):
    def twice(x):
        return F.relu(x) + x

    assert selection(tmp_path, forward("return F.relu(x.pop()) + x.pop()")).find(twice).found == ()
    assert len(selection(tmp_path, forward("return F.relu(x[0]) + x[0]")).find(twice)) == 1
    assert len(selection(tmp_path, forward("return F.relu(self.w) + self.w")).find(twice)) == 1


def test_a_hook_is_more_than_the_module(tmp_path):
    def norm(x, shape, weight, bias, eps):
        return F.layer_norm(x, shape, weight, bias, eps)

    init = "self.norm = nn.LayerNorm(4)"
    assert selection(tmp_path, forward("return self.norm(x)", init=init)).find(norm)
    init += "\nself.norm.register_forward_hook(lambda m, x, y: y * 2)"
    assert not selection(tmp_path, forward("return self.norm(x)", init=init)).find(norm)


def test_in_the_test_of_a_loop(tmp_path):
    body = "while F.gelu(x + y).sum() > 0:\n    x = x - 1\nreturn x"
    (match,) = selection(tmp_path, forward(body)).find(bias_gelu)
    assert match.operands == {"x": "y", "bias": "x"}


def test_a_predicate_and_a_path(tmp_path):
    source = """
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(4, 4)
            self.key = nn.Linear(4, 4)

        def forward(self, x):
            return torch.softmax(self.query(x) @ self.key(x).mT, dim=-1)


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Inner()
            self.out = nn.Linear(4, 4)

        def forward(self, x):
            return self.out(self.attention(x))
    """
    s = selection(tmp_path, source)
    assert [m.calls for m in s.find(r"attention\.[qk]")] == [["query"], ["key"]]
    assert [m.path for m in s.find(r"attention\.[qk]")] == ["attention", "attention"]
    assert [m.calls for m in s["attention"].find(r"[qk]")] == [["query"], ["key"]]
    assert not s.find(r"ttention")
    (soft,) = s["attention"].find(where=lambda call: call.operation == "softmax")
    assert (
        soft.operands["dim"] == "-1" and soft.operands["input"] == "self.query(x) @ self.key(x).mT"
    )
    assert len(s["attention"].find(where=lambda call: call.path == "key")) == 1

    def scores(x):
        return call_module("query", x) @ call_module("key", x).mT

    assert len(s["attention"].find(scores)) == 1


def test_a_predicate_sees_modules_without_submodules(tmp_path):
    s = selection(tmp_path, forward("return torch.rsqrt(x) * 2", "self, x"))
    (match,) = s.find(where=lambda call: call.operation == "rsqrt")
    assert match.operands == {"input": "x"}
