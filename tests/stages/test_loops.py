"""Loops over layers: what their rounds read like in each stage."""

import ast

import pytest

from slapo_rewrite.stages.loops import loop_over, sliced


@pytest.mark.parametrize(
    ("head", "first", "second"),
    [
        ("for x in self.a:", "for x in self.a[:2]:", "for x in self.a[2:]:"),
        ("for x in self.a[1:]:", "for x in self.a[1:2]:", "for x in self.a[2:]:"),
        ("for x in self.a[: self.n]:", "for x in self.a[:2]:", "for x in self.a[2:self.n]:"),
        ("for i, x in enumerate(self.a):", "for x in self.a[:2]:", "for x in self.a[2:]:"),
        (
            "for x, y in zip(self.a, self.b):",
            "for x, y in zip(self.a[:2], self.b[:2]):",
            "for x, y in zip(self.a[2:], self.b[2:]):",
        ),
        (
            "for i, (x, y) in enumerate(zip(self.a, self.b)):",
            "for (x, y) in zip(self.a[:2], self.b[:2]):",
            "for (x, y) in zip(self.a[2:], self.b[2:]):",
        ),
    ],
)
def test_rounds(head, first, second):
    text = f"{head}\n    z = x(z)"
    assert sliced(text, 0, 2) == f"{first}\n    z = x(z)"
    assert sliced(text, 2, None) == f"{second}\n    z = x(z)"


@pytest.mark.parametrize(
    ("head", "second"),
    [
        ("for i, x in enumerate(self.a):", "for i, x in enumerate(self.a[2:], start=2):"),
        ("for i, x in enumerate(self.a, 1):", "for i, x in enumerate(self.a[2:], start=3):"),
        ("for i, x in enumerate(self.a[1:]):", "for i, x in enumerate(self.a[2:], start=1):"),
        (
            "for i, x in enumerate(zip(self.a, self.b)):",
            "for i, x in enumerate(zip(self.a[2:], self.b[2:]), start=2):",
        ),
    ],
)
def test_rounds_that_are_counted(head, second):
    assert sliced(f"{head}\n    z = x(z, i)", 2, None) == f"{second}\n    z = x(z, i)"


def test_layers_by_their_number():
    text = "for i in range(len(self.blocks)):\n    z = self.blocks[i](z)"
    assert sliced(text, 2, None) == "for block in self.blocks[2:]:\n    z = block(z)"
    text = "for i in range(len(self.h)):\n    z = self.h[i](z) * i"
    assert (
        sliced(text, 2, None)
        == "for i, h_layer in enumerate(self.h[2:], start=2):\n    z = h_layer(z) * i"
    )


@pytest.mark.parametrize(
    "text",
    [
        "for x in reversed(self.a):\n    pass",
        "for x in self.a[::2]:\n    pass",
        "for x in self.a[-2:]:\n    pass",
        "for x, y in zip(self.a, y):\n    pass",
        "for x, y in zip(self.a[1:], self.b):\n    pass",
        "for i, x in enumerate(self.a, n):\n    pass",
        "for i in range(len(self.a)):\n    self.a[i](self.a[i - 1])",
        "for i in range(self.n):\n    self.a[i]()",
        "x = self.a",
    ],
)
def test_no_loop_over_layers(text):
    assert loop_over(ast.parse(text).body[0]) is None
