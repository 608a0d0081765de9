"""Consecutive statements: their text at column 0, and their replacement."""

import ast
import textwrap
from pathlib import Path

import pytest

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.runs import Run, above, apart, behind, compound, in_else, or_else
from slapo_rewrite.code.sinking import Sunk
from slapo_rewrite.code.splice import apply_edits

SOURCE = '''\
class A:
    def f(self, x):
        # what x is
        y = x + 1  # one more
        z = """
  as it is
"""
        if y:
            return z
        elif x:
            return y
        return x


@cached
def g():
    pass
'''


def read(text: str) -> SourceFile:
    return SourceFile(Path("a.py"), "a", text, ast.parse(text))


@pytest.fixture
def file():
    return read(SOURCE)


def method(file: SourceFile) -> ast.FunctionDef:
    found = file.method("A", "f")
    assert found is not None
    return found


def changed(file, *placed):
    return apply_edits(file.text, [each.caused_by((), "") for each in placed])[0]


def test_text_at_the_margin(file):
    first, second, *_ = method(file).body
    run = Run.of(file, [first, second])
    assert run.text() == 'y = x + 1  # one more\nz = """\n  as it is\n"""'
    assert run.with_comments().text().startswith("# what x is\ny = x + 1")


def test_text_with_other_operands(file):
    first, _, branch, _ = method(file).body
    operand = first.value.left
    inner = branch.body[0].value
    assert Run.of(file, [first]).text_with({operand: "a or b"}) == "y = (a or b) + 1  # one more"
    assert Run.of(file, [branch]).text_with({inner: "q"}).startswith("if y:\n    return q\n")


def test_in_their_place(file):
    first, second, *_ = method(file).body
    run = Run.of(file, [first, second])
    text = changed(file, run.replaced(compound("with a():", run.text())))
    assert "        with a():\n            y = x + 1  # one more\n            z = " in text
    assert '"""\n  as it is\n"""\n' in text
    assert "# what x is\n        with" in text


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("with a:", "b"), "with a:\n    b"),
        (("if a:", "b\nc", "else:", "d"), "if a:\n    b\n    c\nelse:\n    d"),
        (("if a:", "if b:\n    c"), "if a:\n    if b:\n        c"),
    ],
)
def test_compound(parts, text):
    assert compound(*parts) == text


def test_a_branch_above_another(file):
    branch = method(file).body[2]
    text = changed(file, or_else(file, branch, "if q:\n    return 0"))
    assert "        if q:\n            return 0\n        elif y:\n" in text


def test_behind_and_above_definitions(file):
    cls, function = file.classes["A"], file.functions["g"]
    text = changed(file, behind(file, method(file), "def h(self):\n    pass", 1))
    assert "        return x\n\n    def h(self):\n        pass\n\n\n@cached" in text
    assert "return x\n\n\nclass B:\n    pass\n" in changed(
        file, behind(file, cls, "class B:\n    pass", 2)
    )
    assert "\n\ndef h():\n    pass\n\n\n@cached\ndef g" in changed(
        file, above(file, function, "def h():\n    pass")
    )


@pytest.mark.parametrize(
    ("between", "added"),
    [("\n", 2), ("\n\n", 1), ("\n\n\n", 0), ("  # end\n# of B\n", 2), ("\n\n\n\n", 0)],
)
def test_blank_lines_behind_a_class_that_is_put_before_another(between, added):
    file = read(f"class A:\n    pass{between}class B:\n    pass\n")
    placed = apart(file, file.classes["A"], 2)
    assert [each.text for each in placed] == ["\n" * added] * bool(added)
    text, _ = apply_edits(file.text, [each.caused_by((), "") for each in placed])
    assert text.endswith(
        "# of B\nclass B:\n    pass\n" if "#" in between else "class B:\n    pass\n"
    )
    assert text.count("\n") == file.text.count("\n") + added
    assert apart(file, file.classes["B"], 2) == []


def test_an_else():
    file = read("if a:\n    b  # so\n")
    branch = file.tree.body[0]
    first = in_else(file, branch, "c")
    second = in_else(file, branch, "d", opened=True)
    assert changed(file, first, second) == "if a:\n    b  # so\nelse:\n    c\n    d\n"


def test_sunk_into_the_arms():
    source = textwrap.dedent(
        """\
        x = 1  # one
        if a:
            b = x
        else:
            return 0

        # two
        c = b
        """
    )
    file = read(source)
    before, branch, after = file.tree.body
    text = changed(file, *Sunk(file, branch, [before], [after]).edits())
    assert text == textwrap.dedent(
        """\
        if a:
            x = 1  # one
            b = x

            # two
            c = b
        else:
            x = 1  # one
            return 0

        """
    )
