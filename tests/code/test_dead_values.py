"""Where local names may be dropped: a table, before and after."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from slapo_rewrite.code.dead_values import deaths, dropping
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.in_place import in_place


def read(body: str, signature: str = "self, x, y=None") -> tuple[SourceFile, ast.FunctionDef]:
    text = f"def f({signature}):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    file = SourceFile(Path("f.py"), "f", text, ast.parse(text))
    function = file.tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    return file, function


def dropped(body: str) -> str:
    """The body with all that may be dropped, one `del` for each."""
    file, function = read(body)
    behind: dict[ast.stmt, list[ast.stmt]] = {}
    for death in deaths(file, function):
        drop = ast.Delete([ast.Name(death.name, ast.Del())])
        behind.setdefault(death.statement, []).append(drop)
    made = ast.fix_missing_locations(dropping(function, behind))
    return "\n".join(ast.unparse(statement) for statement in made.body)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Straight on: behind the last read, and where a name is bound for nothing.
        ("a = x\nb = a + 1\nreturn b", "a = x\ndel x\nb = a + 1\ndel a\nreturn b"),
        ("a, _ = self.g()\nreturn a", "a, _ = self.g()\ndel _\nreturn a"),
        ("a = self.g()\na = a + 1\nreturn a", "a = self.g()\na = a + 1\nreturn a"),
        ("return x + 1", "return x + 1"),
        # Branches: behind the whole, unless the name is known in one arm alone.
        (
            "a = self.g()\nif y:\n    b = a\nelse:\n    b = y\nreturn b",
            "a = self.g()\nif y:\n    b = a\nelse:\n    b = y\ndel y\ndel a\nreturn b",
        ),
        (
            "if y:\n    a = self.g()\n    b = a\n    self.h()\nelse:\n    b = 1\nreturn b",
            "if y:\n    a = self.g()\n    b = a\n    del a\n    self.h()\nelse:\n    b = 1\n"
            "del y\nreturn b",
        ),
        (
            "if y:\n    a = self.g()\n    return a\nb = y\nreturn b",
            "if y:\n    a = self.g()\n    return a\nb = y\ndel y\nreturn b",
        ),
        (
            "if y:\n    b = 1\nelif x:\n    a = 2\n    b = a\nelse:\n    b = 3\nreturn b",
            "if y:\n    b = 1\nelif x:\n    a = 2\n    b = a\n    del a\nelse:\n    b = 3\n"
            "del y\ndel x\nreturn b",
        ),
        # Loops: what the next round reads is needed, what it binds anew is not.
        (
            "for i in y:\n    a = self.g(i)\n    x = x + a\nreturn x",
            "for i in y:\n    a = self.g(i)\n    del i\n    x = x + a\n    del a\ndel y\nreturn x",
        ),
        (
            "a = 1\nfor i in y:\n    x = self.g(a, x)\n    a = i\nreturn x",
            "a = 1\nfor i in y:\n    x = self.g(a, x)\n    a = i\n    del i\ndel y\nreturn x",
        ),
        (
            "b = self.g()\nfor i in y:\n    if i:\n        b = i\n    x = b\nreturn x",
            "b = self.g()\nfor i in y:\n    if i:\n        b = i\n    del i\n    x = b\n"
            "del y\ndel b\nreturn x",
        ),
        (
            "while y:\n    a = self.g()\n    if a:\n        break\n    y = a\nreturn a",
            "while y:\n    a = self.g()\n    if a:\n        break\n    y = a\ndel y\nreturn a",
        ),
        # A name that is dropped once is not dropped where it may be unbound.
        (
            "a = 1\nself.g(a)\nif y:\n    a = 2\n    self.g(a)\nreturn x",
            "a = 1\nself.g(a)\ndel a\nif y:\n    a = 2\n    self.g(a)\ndel y\nreturn x",
        ),
        # A manager may suppress what is raised.
        (
            "with self.g():\n    a = x\n    b = a\nreturn y",
            "with self.g():\n    a = x\n    b = a\n    del b\n    del a\ndel x\nreturn y",
        ),
    ],
)
def test_dropped(before: str, after: str):
    assert dropped(before) == after


@pytest.mark.parametrize(
    "body",
    [
        "a = self.g()\nself.h(a)\nreturn locals()",
        "a = self.g()\nself.h(a)\nreturn eval('1')",
        "a = self.g()\nyield a\nself.h()",
        "a = self.g()\nb = lambda: a\nself.k = b\nself.h()\nreturn 1",
        "a = self.g()\ndef b():\n    return a\nself.k = b\nself.h()\nreturn 1",
        "a = self.g()\nself.k = (a * i for i in self.z)\nself.h()\nreturn 1",
        "try:\n    a = self.g()\n    self.h(a)\nexcept ValueError:\n    pass\nself.h()\nreturn 1",
        "a = self.g()\ntry:\n    self.h(a)\nfinally:\n    self.h()\nreturn 1",
        "match self.g():\n    case [a]:\n        self.h(a)\nself.h()\nreturn 1",
        "global a\na = self.g()\nself.h(a)\nself.h()\nreturn 1",
        "a = self.g(); self.h(a)\nreturn 1",
        "if self.k: a = self.g()\nself.h()\nreturn 1",
        "a = self.g()\ndel a\nself.h()\nreturn 1",
    ],
)
def test_left_alone(body: str):
    file, function = read(body)
    assert "a" not in {death.name for death in deaths(file, function)}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("a = self.g(x)\nb = x + a\nreturn b", "self.g(x)"),
        ("a = self.g(x)\nb = self.h(a)\nreturn b", "self.g(x)"),
        ("a = self.g(x)\nb = a.sum()\nreturn b", "self.g(x)"),
        ("a = self.g(x)\nb = self.h(y, k=a)\nreturn b", "self.g(x)"),
        # Something else would be computed before it.
        ("a = self.g(x)\nb = self.h(x) + a\nreturn b", None),
        ("a = self.g(x)\nb = self.k + a\nreturn b", None),
        ("a = self.g(x)\nb = a if y else x\nreturn b", None),
        ("a = self.g(x)\nb = [a for _ in y]\nreturn b", None),
        # It is needed again, or not next.
        ("a = self.g(x)\nb = a + a\nreturn b", None),
        ("a = self.g(x)\nb = x + a\nreturn a", None),
        ("a = self.g(x)\nself.h()\nb = x + a\nreturn b", None),
        ("a = self.g(x)\nif y:\n    b = x + a\nreturn y", None),
        # It would be harder to read.
        ("# Why.\na = self.g(x)\nb = x + a\nreturn b", None),
        ("a = self.g(x)  # what\nb = x + a\nreturn b", None),
        ("a = self.g(x)\n\nb = x + a\nreturn b", None),
        ("a = self.g(self.g(x))\nb = self.h(self.h(a))\nreturn b", None),
        (f"a = self.{'g' * 60}(x)\nb = self.{'h' * 60}(a)\nreturn b", None),
        ("a = self.g(\n    x\n)\nb = x + a\nreturn b", None),
    ],
)
def test_in_place(body: str, text: str | None):
    file, function = read(body)
    statements = [s for s in ast.walk(function) if isinstance(s, ast.Assign)]
    reading = next(s for s in statements if isinstance(s.targets[0], ast.Name)
                   and s.targets[0].id == "b")  # fmt: skip
    found = in_place(file, function, reading, "a")
    assert (found.text if found else None) == text
