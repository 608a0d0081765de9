"""Lines before and after statements, also if several are on one line."""

import ast
import textwrap
from pathlib import Path

import pytest

from slapo_rewrite import errors
from slapo_rewrite.code.edit import Edit, Put
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.lines import Line, Lines, written
from slapo_rewrite.code.splice import apply_edits


def changed(body: str, name: str, put: str | None = None, **lines: object) -> str:
    """A method's body, where a statement that binds a name changes so.

    It binds the name to what is `put` there, if anything is.
    """
    text = "class A:\n    def f(self, x):\n" + textwrap.indent(textwrap.dedent(body), " " * 8)
    file = SourceFile(Path("a.py"), "a", text, ast.parse(text))
    [statement] = (
        s for s in file.statements if isinstance(s, ast.Assign) and ast.unparse(s.targets) == name
    )
    if put is not None:
        lines["inside"] = [(Edit(statement.value, Put(put)), (), "")]
    after, _ = apply_edits(text, written(file, {statement: Lines(**lines)}))
    ast.parse(after)
    return textwrap.dedent(after.split("\n", 2)[2])


NEW = [Line("new = 1", (), "")]


@pytest.mark.parametrize(
    ("body", "before", "after"),
    [
        ("y = x\n", "new = 1\ny = x\n", "y = x\nnew = 1\n"),
        ("y = x  # why\n", "new = 1\ny = x  # why\n", "y = x  # why\nnew = 1\n"),
        ("a = x; y = x\n", "a = x\nnew = 1\ny = x\n", "a = x\ny = x\nnew = 1\n"),
        ("y = x; a = x\n", "new = 1\ny = x\na = x\n", "y = x\nnew = 1\na = x\n"),
        (
            "a = x ;y = x; b = (\n    x\n); c = x\nd = x; e = x\n",
            "a = x\nnew = 1\ny = x\nb = (\n    x\n)\nc = x\nd = x; e = x\n",
            "a = x\ny = x\nnew = 1\nb = (\n    x\n)\nc = x\nd = x; e = x\n",
        ),
        (
            "if x: y = x\nreturn x\n",
            "if x:\n    new = 1\n    y = x\nreturn x\n",
            "if x:\n    y = x\n    new = 1\nreturn x\n",
        ),
        (
            "if x: pass\nelif not x: y = x; a = x\n",
            "if x: pass\nelif not x:\n    new = 1\n    y = x\n    a = x\n",
            "if x: pass\nelif not x:\n    y = x\n    new = 1\n    a = x\n",
        ),
        (
            "for i in (x,\n          x): a = i; y = i\n",
            "for i in (x,\n          x):\n    a = i\n    new = 1\n    y = i\n",
            "for i in (x,\n          x):\n    a = i\n    y = i\n    new = 1\n",
        ),
        (
            "match x:\n    case 1: y = x\n",
            "match x:\n    case 1:\n        new = 1\n        y = x\n",
            "match x:\n    case 1:\n        y = x\n        new = 1\n",
        ),
        (
            "try: pass\nexcept E: y = x\n",
            "try: pass\nexcept E:\n    new = 1\n    y = x\n",
            "try: pass\nexcept E:\n    y = x\n    new = 1\n",
        ),
    ],
)
def test_lines_beside_statements(body, before, after):
    assert changed(body, "y", before=NEW) == before
    assert changed(body, "y", after=NEW) == after


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ("a = x; y = x\n", "a = x; y = {new}\n"),  # it fits
        ("a = {x}; y = x\n", "a = {x}\ny = {new}\n"),
        ("y = x; a = {x}; b = x\nc = x\n", "y = {new}\na = {x}\nb = x\nc = x\n"),
        ("if x: a = {x}; y = x\n", "if x:\n    a = {x}\n    y = {new}\n"),
    ],
)
def test_statements_that_no_longer_fit_their_line(body, after):
    x, new = "x" * 60, "n" * 40
    assert changed(body.format(x=x), "y", put=new) == after.format(x=x, new=new)


@pytest.mark.parametrize("body", ["a = x; y = x\n", "y = x; a = x\n", "if x: y = x\n"])
def test_what_goes_has_lines_of_its_own(body):
    with pytest.raises(errors.Unsupported, match="shares its line with another") as caught:
        changed(body, "y", gone=((), "gone"))
    assert caught.value.hint == "write each statement on a separate line"
