"""Import statements: moved, renamed, removed, or followed by new ones."""

import ast
from pathlib import Path

import pytest

from slapo_rewrite.code import import_lines
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.splice import apply_edits


def read(text: str) -> SourceFile:
    return SourceFile(Path("a.py"), "a", text, ast.parse(text))


def changed(file, placed):
    return apply_edits(file.text, [placed.caused_by((), "")])[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from ..a.b import c, d  # so\n", "from x.y import c, d  # so\n"),
        ("from . import (\n    c,\n)\n", "from x.y import (\n    c,\n)\n"),
        ("from .  a import c\n", "from x.y import c\n"),
        ("from \\\n    .a import c\n", "from \\\n    x.y import c\n"),
        ("from fromage import c\n", "from x.y import c\n"),
    ],
)
def test_from_another_module(before, after):
    file = read(before)
    assert changed(file, import_lines.from_module(file, file.tree.body[0], "x.y")) == after


def test_instead_and_without():
    file = read("import a\nif b:\n    import c\n")
    first, branch = file.tree.body
    assert changed(file, import_lines.without(file, first)) == "if b:\n    import c\n".replace(
        "if b", "\nif b"
    ).removeprefix("\n")
    two = import_lines.instead(file, branch.body[0], ["import d", "import e"])
    assert changed(file, two) == "import a\nif b:\n    import d\n    import e\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import a  # so\nb = 1\n", "import a  # so\nimport x\nb = 1\n"),
        ('"""Doc."""\nb = 1\n', '"""Doc."""\n\nimport x\nb = 1\n'),
        ("b = 1\n", "import x\n\nb = 1\n"),
    ],
)
def test_below(before, after):
    file = read(before)
    first = file.tree.body[0]
    statement = first if isinstance(first, ast.Import) else None
    assert changed(file, import_lines.below(file, statement, "\nimport x")) == after


@pytest.mark.parametrize(
    ("text", "remarked"),
    [("import a\n", False), ("import a  # so\n", True), ("import a; b\n", True)],
)
def test_remarks(text, remarked):
    file = read(text)
    assert import_lines.is_remarked(file, file.tree.body[0]) is remarked
