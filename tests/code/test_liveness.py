"""The inputs and outputs of a run of statements, by liveness."""

from __future__ import annotations

import ast
import textwrap

import pytest

from slapo_rewrite.code.blocks import statements
from slapo_rewrite.code.liveness import Part, part_of


def part(body: str, signature: str = "self, x, y=None, *args, **kwargs") -> Part:
    """The part between the lines `...` and `...` of a function."""
    text = f"def f({signature}):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    for owner in (function, *statements(function.body)):
        for name in ("body", "orelse"):
            block = getattr(owner, name, [])
            marks = [n for n, s in enumerate(block) if ast.unparse(s) == "..."]
            if len(marks) == 2:
                run = block[marks[0] + 1 : marks[1]]
                block[:] = [s for s in block if ast.unparse(s) != "..."]
                return part_of(function, run)
    raise AssertionError("no marks")


@pytest.mark.parametrize(
    ("body", "inputs", "outputs", "unsure"),
    [
        # Straight on.
        ("a = x\n...\nb = a + y\nc = b * a\n...\nreturn c", "a y", "c", ""),
        ("...\nx = self.f(x)\n...\nreturn x", "self x", "x", ""),
        ("...\nz, (x, *w) = self.f(y)\n...\nreturn w, z", "self y", "z w", ""),
        ("...\nx += y\n...\nreturn x", "x y", "x", ""),
        ("...\nx[0] = y\nx.a = y\n...\nreturn x", "y x", "", ""),
        ("...\nz: int = x\n...\nreturn z", "x", "z", ""),
        ("...\na = g(b, n=x, **kwargs)\n...\nb = 1\nreturn a", "x kwargs", "a", ""),
        # Scopes of their own.
        ("...\na = [i * x for i in y if i]\n...\nreturn a", "y x", "a", ""),
        ("...\na = sum(x := i for i in y)\n...\nreturn a + x", "y x", "x a", ""),
        ("...\na = lambda x, z=y: x + z + b\n...\nb = 1\nreturn a()", "y", "a", ""),
        ("...\ndef a(x):\n    return x + y\n...\nreturn a(1)", "y", "a", ""),
        ("g = lambda: x\n...\nx = 1\n...\nreturn g()", "", "x", ""),
        # Branches: a value that may stay what it was is needed.
        ("...\nif y:\n    x = 1\n...\nreturn x", "y x", "x", ""),
        ("...\nif y:\n    x = 1\nelse:\n    x = 2\n...\nreturn x", "y", "x", ""),
        ("...\nif y:\n    z = 1\n...\nif y:\n    return z", "y", "z", "z"),
        ("...\nif y:\n    z = 1\nelse:\n    raise x\n...\nreturn z", "y x", "z", ""),
        ("if x:\n    z = 1\n...\na = z\n...\nreturn a", "z", "a", "z"),
        ("...\nif y:\n    z = 1\n    x = z\n...\nreturn x", "y x", "x", ""),
        ("...\nif (z := x) and z > y:\n    x = z\n...\nreturn x", "x y", "x", ""),
        ("...\na = y and (z := x)\n...\nreturn z", "y x", "z", "z"),
        # Loops: what the next turn reads is needed.
        ("for i in y:\n    ...\n    a = i\n    x = x + a\n    ...\nreturn 1", "i x", "x", ""),
        ("for i in y:\n    ...\n    x = i\n    ...\nreturn x", "i", "x", ""),
        ("for i in y:\n    ...\n    a = i\n    ...\n    if a:\n        continue", "i", "a", ""),
        ("while x:\n    ...\n    x = y\n    ...", "y", "x", ""),
        ("...\nfor i in y:\n    x = x + i\n...\nreturn x", "y x", "x", ""),
        ("...\nfor i in y:\n    z = i\n...\nreturn z", "y", "z", "z"),
        ("...\nwhile y:\n    y = y.next\n...\nreturn 1", "y", "", ""),
        # The rest.
        ("...\nwith x as a:\n    b = a\n...\nreturn b", "x", "b", ""),
        ("try:\n    ...\n    x = 1\n    y = x()\n    ...\nexcept E:\n    return x", "", "x", "x"),
        ("...\ntry:\n    z = x()\nexcept E as e:\n    z = e\n...\nreturn z", "x", "z", ""),
        ("...\ntry:\n    z = x()\nfinally:\n    y()\n...\nreturn z", "x y", "z", ""),
        ("...\nmatch x:\n    case [a, *b]:\n        y = a\n...\nreturn y", "x y", "y", ""),
        ("...\nimport a.b as c\nx = c.d\n...\nreturn x", "", "x", ""),
        ("...\ndel x\n...\nreturn 1", "x", "", ""),
        ("...\nx = y\n...", "y", "", ""),
    ],
)
def test_parts(body, inputs, outputs, unsure):
    found = part(body)
    assert (found.inputs, found.outputs) == (tuple(inputs.split()), tuple(outputs.split()))
    assert found.unsure == tuple(unsure.split())
