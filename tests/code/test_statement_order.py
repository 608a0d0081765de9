"""Which statements may be swapped, and the allowed orders."""

from __future__ import annotations

import ast

import pytest

from slapo_rewrite.code.statement_order import Callee, orders, reordered
from tests.code.test_dead_values import read

PURE = {"exp", "sum", "cat", "view"}
LAYERS = {"a", "b", "c"}


def found(body: str) -> list[str]:
    """The other orders, by the names that the statements of the run bind."""
    file, function = read("import torch\n" + body)
    file.imports["torch"] = "torch"

    def known(callee: Callee) -> bool:
        return callee.path in LAYERS if callee.is_called else callee.path == "k"

    def apart(one: str, other: str) -> bool:
        return one != other and {one, other} != {"b", "c"}  # which are tied

    result = []
    for _, others in orders(file, function, PURE.__contains__, known, apart):
        for order in others:
            targets = [s.targets[0] for s in order if isinstance(s, ast.Assign)]
            result.append("".join(t.id for t in targets if isinstance(t, ast.Name)))
    return result


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("m = x.exp()\nn = y.sum()\nreturn m, n", ["nm"]),
        ("m = x.exp()\nn = y.exp()\no = m.sum()\nreturn n, o", ["mon", "nmo"]),
        ("m = self.a(x)\nn = self.b(y)\nreturn m, n", ["nm"]),
        ("if y:\n    m = x.exp()\n    n = y.sum()\n    return m, n\nreturn x", ["nm"]),
        # What one of them needs of the other, or both of a third.
        ("m = x.exp()\nn = m.sum()\nreturn m, n", []),
        ("m = x.exp()\nn = x.sum()\nreturn m, n", []),
        ("m = x.exp()\nx = y.sum()\nreturn m, x", []),
        ("m = x.exp()\nm = y.sum()\nreturn m", []),
        ("m = self.a(x)\nn = self.a(y)\nreturn m, n", []),
        ("m = self.b(x)\nn = self.c(y)\nreturn m, n", []),
        # What may do more than give a value.
        ("m = x.exp()\nn = y.add_(1)\nreturn m, n", []),
        ("m = x.exp()\nn = torch.rand(3)\nreturn m, n", []),
        ("m = x.exp()\nn = self.other(y)\nreturn m, n", []),
        ("m = x.exp()\nn = self.z.exp()\nreturn m, n", []),
        ("m = x.exp()\nn = f(y)\nreturn m, n", []),
        ("m = x.exp()\nn = [y for _ in y]\nreturn m, n", []),
        ("m = x.exp()\nn = y.z\nreturn m, n", []),
        ("m = x.exp()\nself.n = y.sum()\nreturn m", []),
        ("m = x.exp()\nn += y.sum()\nreturn m, n", []),
        # What does not stand next to it, or is told about.
        ("m = x.exp()\n\nn = y.sum()\nreturn m, n", []),
        ("m = x.exp()\n# Why.\nn = y.sum()\nreturn m, n", []),
        ("try:\n    m = x.exp()\n    n = y.sum()\nexcept ValueError:\n    pass\nreturn x", []),
        ("def g(p, q):\n    m = p.exp()\n    n = q.sum()\n    return m, n\nreturn g(x, y)", []),
        ("\n".join(f"m{i} = n{i}.exp()" for i in range(7)) + "\nreturn 1", []),
    ],
)
def test_orders(body: str, expected: list[str]):
    assert found(body) == expected


def test_reordered():
    _, function = read("if y:\n    m = x.exp()\n    n = y.sum()\nreturn m")
    branch = function.body[0]
    assert isinstance(branch, ast.If)
    run = tuple(branch.body)
    made = reordered(function, run, run[::-1])
    assert ast.unparse(made.body[0]) == "if y:\n    n = y.sum()\n    m = x.exp()"
    assert tuple(branch.body) == run
