"""Side effects of calls and statements prevent a match."""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.nn.functional as F

from tests.finding import forward, selection

INIT = """
self.drop = nn.Dropout(0.5)
self.fc = nn.Linear(4, 4)
self.scale = 2.0
self.cache = Cache()
self.doubles = Doubles()
"""
BEFORE = """\
import torch.distributed as dist
from torch.distributed import broadcast


class Cache:
    state = 0


class Doubles(nn.Module):
    def forward(self, u):
        u.mul_(2)
        return u


def double(u):
    u.mul_(2)


def deeply(u):
    double(u)


def noisy(u):
    return noise(u)


def noise(u):
    return u * torch.rand(1)


"""


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def linear_gelu(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def dropped(x, p, training, r):
    return F.dropout(x, p, training) + r


STOPPED = [
    # Memory is written to where the text of `forward` does not say so.
    (bias_gelu, "a = x + y\ndouble(x)\nreturn F.gelu(a)", "overwritten"),
    (bias_gelu, "a = x + y\ndeeply(x)\nreturn F.gelu(a)", "overwritten"),
    (bias_gelu, "a = x + y\nb = self.doubles(x)\nreturn F.gelu(a) + b", "overwritten"),
    (bias_gelu, "a = x + y\ndist.all_reduce(x)\nreturn F.gelu(a)", "overwritten"),
    (bias_gelu, "a = x + y\nbroadcast(x, 0)\nreturn F.gelu(a)", "overwritten"),
    (bias_gelu, "a = x + y\nf = lambda: x.mul_(2)\nf()\nreturn F.gelu(a)", "overwritten"),
    (bias_gelu, "a = x + y\nb = [t.mul_(2) for t in (x, y)]\nreturn F.gelu(a)", "overwritten"),
    (bias_gelu, "a = x + y\nx.data.copy_(z)\nreturn F.gelu(a)", "overwritten"),
    (bias_gelu, "a = x + y\nx.unsqueeze(0)[0] = 0\nreturn F.gelu(a)", "overwritten"),
    # An attribute, or what an operand is read from, holds something else.
    (bias_gelu, "a = y + self.scale\nsetattr(self, 'scale', 3.0)\nreturn F.gelu(a)", "bound again"),
    (bias_gelu, "a = y + self.scale\nself.scale += 3.0\nreturn F.gelu(a)", "bound again"),
    (bias_gelu, "a = y + self.scale\nself.rescale()\nreturn F.gelu(a)", "bound again"),
    (bias_gelu, "a = y + self.computed\nself.rescale()\nreturn F.gelu(a)", "may be changed"),
    (linear_gelu, "h = self.fc(x)\nself.fc = z\nreturn F.gelu(h)", "`self.fc` is bound again"),
    (bias_gelu, "a = x.state + y\nb = x.update(z)\nreturn F.gelu(a) + b", "may be changed"),
    (bias_gelu, "a = x.pop() + y\nb = x.pop()\nreturn F.gelu(a) + b", "may be changed"),
    (bias_gelu, "a = self.cache.state + y\nself.cache.update(z)\nreturn F.gelu(a)", "overwritten"),
    (bias_gelu, "a = self.cache.state + y\nb = self.cache.update(z)\nreturn F.gelu(a) + b",
     "may be changed"),
    # An operand would be computed twice, or a name is bound in what goes.
    (bias_gelu, "a = self.drop(x)\nb = a + y\na = a * 2\nreturn F.gelu(b) + a", "bound again"),
    (bias_gelu, "a = self.fc(x)\nb = a + y\na = z\nreturn F.gelu(b) + a", "bound again"),
    (bias_gelu, "return F.gelu((a := self.fc(x)) + y) + a", "is bound inside, but read elsewhere"),
    # Random numbers are drawn on one branch only, or in another order.
    (dropped, "a = self.drop(x)\nif z is None:\n    return x\nreturn a + y", "in one branch only"),
    (dropped, "for i in z:\n    a = self.drop(x)\n    if i: break\n    y = a + y\nreturn y",
     "in one branch only"),
    (dropped, "a = self.drop(x)\ntorch.manual_seed(0)\nreturn a + y", "random numbers"),
    (dropped, "a = self.drop(x)\nb = noisy(z)\nreturn a + y * b", "random numbers"),
    # Gradients are turned off.
    (bias_gelu, "a = x + y\ntorch.set_grad_enabled(False)\nreturn F.gelu(a)", "later statements"),
]  # fmt: skip
METHODS = """
    def rescale(self):
        self.scale = 3.0
        self._scale = 3.0

    @property
    def computed(self):
        return self._scale
"""


@pytest.mark.parametrize(("pattern", "body", "reason"), STOPPED, ids=[b for _, b, _ in STOPPED])
def test_stopped(tmp_path, pattern, body, reason):
    source = BEFORE + forward(body, init=INIT) + METHODS
    found = selection(tmp_path, source).find(pattern)
    assert not found, str(found)
    assert reason in str(found), str(found)


FOUND = [
    ("w = (a := self.fc(x)) * 2\nreturn w + F.gelu(a + y)", ("y", "a"), []),
    ("return (a := self.fc(x)).sum() + F.gelu(a + y)", ("y", "a"), []),
    ("a = x + y\nb = a\nreturn F.gelu(b)", ("x", "y"), ["a = x + y", "b = a"]),
    ("a = x + y\nx, y = y, x\nreturn F.gelu(a) + x", ("y", "x"), ["a = x + y"]),
    ("a = x + y\nprint(x.shape)\nreturn F.gelu(a)", ("x", "y"), ["a = x + y"]),
    ("a = x + y\nif z is None:\n    return x\nreturn F.gelu(a)", ("x", "y"), ["a = x + y"]),
]


@pytest.mark.parametrize(("body", "operands", "removed"), FOUND, ids=[body for body, _, _ in FOUND])
def test_found(tmp_path, body, operands, removed):
    (match,) = selection(tmp_path, BEFORE + forward(body, init=INIT)).find(bias_gelu)
    assert tuple(match.operands.values()) == operands and match.replaced.whole
    assert [match.file.segment(s) for s in match.replaced.removed] == removed


# Calls that are more than the value they give: nothing is found where they are called.
HELPERS = {
    "a context": "def helper(u, v):\n    with torch.no_grad():\n        return F.gelu(u + v)",
    "computed in one": (
        "def helper(u, v):\n    with torch.no_grad():\n        w = F.gelu(u + v)\n    return w"
    ),
    "one branch only": "def helper(u, v):\n    if v is not None:\n        return F.gelu(u + v)",
    "a decorator": "@torch.no_grad()\ndef helper(u, v):\n    return F.gelu(u + v)",
    "a statement": "def helper(u, v):\n    print(u)\n    return F.gelu(u + v)",
    "a draw": "def helper(u, v):\n    w = torch.rand(3)\n    return F.gelu(u + v)",
    "a global": "def helper(u, v):\n    global n\n    n = 3\n    return F.gelu(u + v)",
    "a generator": "def helper(u, v):\n    yield u\n    return F.gelu(u + v)",
    "a check": "def helper(u, v):\n    assert u.sum() > 0\n    return F.gelu(u + v)",
    "a write": "def helper(u, v):\n    u.mul_(2)\n    return F.gelu(u + v)",
    "a store": """
        class Helper(nn.Module):
            def forward(self, u, v):
                self.last = u
                return F.gelu(u + v)


        helper = Helper()
    """,
    "a call of its own": """
        class Helper(nn.Module):
            def forward(self, u, v):
                return F.gelu(u + v)

            def __call__(self, u, v):
                return super().__call__(u, v) * 2


        helper = Helper()
    """,
    "another forward": """
        class Helper(nn.Module):
            def forward(self, u, v):
                return F.gelu(u + v)


        helper = Helper()
        helper.forward = lambda u, v: u
    """,
    "a hook": """
        class Helper(nn.Module):
            def forward(self, u, v):
                return F.gelu(u + v)


        helper = Helper()
        helper.register_forward_hook(lambda m, i, o: o * 2)
    """,
}


@pytest.mark.parametrize("helper", HELPERS.values(), ids=HELPERS)
def test_a_call_that_is_more_than_its_value(tmp_path, helper):
    text = textwrap.dedent(helper)
    module = "class" in text
    call = "self.helper(x, y)" if module else "helper(x, y)"
    source = f"{text}\n\n\n" + forward(
        f"return {call}", init="self.helper = helper" if module else "pass"
    )
    found = selection(tmp_path, source).find(bias_gelu)
    assert [match for match in found if match.function == "forward"] == []


def test_a_call_that_is_its_value(tmp_path):
    text = (
        '@torch.jit.script\ndef helper(u, v):\n    """Sum."""\n    w = u + v\n    return F.gelu(w)'
    )
    source = f"{text.partition(chr(10))[2]}\n\n\n" + forward("return helper(x, y)")
    assert "forward" in {m.function for m in selection(tmp_path, source).find(bias_gelu)}


def test_a_constant_of_another_function_is_no_operand(tmp_path):
    text = "BIAS = 2.0\n\n\ndef helper(u):\n    return F.gelu(u + BIAS)\n\n\n"
    found = selection(tmp_path, text + forward("return helper(x)")).find(bias_gelu)
    assert [match.function for match in found] == ["helper"]


NORM = """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps = 1e-6

    def forward(self, hidden):
        dtype = hidden.dtype
        hidden = hidden.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * hidden.to(dtype)


"""


def rms_norm(x, weight, eps):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def residual_rms_norm(x, residual, weight, eps):
    total = x + residual
    return rms_norm(total, weight, eps), total


def test_a_module_whose_forward_is_part_of_the_pattern(tmp_path):
    body = "x = x + y\nr = x\nx = self.norm(x)\nreturn x * r"
    s = selection(tmp_path, NORM + forward(body, init="self.norm = Norm()"))
    (match,) = s.find(residual_rms_norm)
    assert match.replaced.target == "x, r = " and match.calls == ["norm"]
    assert match.operands == {
        "x": "x", "residual": "y", "weight": "self.norm.weight", "eps": "self.norm.eps",
    }  # fmt: skip


def test_what_one_module_computes_is_found_in_it(tmp_path):
    s = selection(tmp_path, NORM + forward("return self.norm(x)", init="self.norm = Norm()"))
    found = s.find(rms_norm)
    assert not found
    assert "all of it is computed in the call of `norm`" in str(found)
    assert "select that module" in str(found)
    (match,) = s["norm"].find(rms_norm)
    assert match.operands == {"x": "hidden", "weight": "self.weight", "eps": "self.eps"}
