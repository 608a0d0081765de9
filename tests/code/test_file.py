"""A source file's index: names, positions, and errors for files that cannot be read."""

import ast
from pathlib import Path

import pytest

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.locate import locate, package_of


def read(tmp_path: Path, text: str | bytes, name: str | None = None) -> SourceFile:
    path = tmp_path / "model.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return SourceFile.read(path, name)


def test_classes_functions_and_imports_of_the_module_level(tmp_path):
    file = read(
        tmp_path,
        "import torch.nn as nn, os.path\n"
        "from torch import nn as again\n"
        "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
        "if os.path:\n    class A(nn.Module):\n        def inner(self): import hidden\n"
        "else:\n    class B: pass\n"
        "def make(): local = 1\n"
        "x, (y, *z) = 1, (2, 3)\n"
        "with open('f') as handle: pass\n"
        "for i in (): pass\n"
        "if (w := 1): pass\n",
        "pkg.model",
    )
    assert list(file.classes) == ["A", "B"]
    assert list(file.functions) == ["make"]
    assert file.imports["nn"] == "torch.nn" and file.imports["again"] == "torch.nn"
    assert file.imports["os"] == "os"
    assert file.names >= {"nn", "fast", "A", "B", "make", "x", "y", "z", "handle", "i", "w"}
    assert not file.names & {"hidden", "local", "inner"}


def test_relative_imports_are_made_absolute(tmp_path):
    for folder in ("pkg", "pkg/sub"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    path = tmp_path / "pkg" / "sub" / "model.py"
    path.write_text(
        "from . import a\nfrom .b import c as d\nfrom ...top import e\nfrom .. import f\n"
    )
    file = SourceFile.read(path)
    assert (file.name, file.package) == ("pkg.sub.model", "pkg.sub")
    assert file.imports["a"] == "pkg.sub.a"
    assert file.imports["d"] == "pkg.sub.b.c"
    assert file.imports["f"] == "pkg.f"
    assert package_of(path) == "pkg.sub.model"
    assert package_of(tmp_path / "pkg" / "__init__.py") == "pkg"
    assert package_of(tmp_path / "alone.py") == ""
    assert SourceFile.read(tmp_path / "pkg" / "__init__.py").package == "pkg"


def test_qualified_names(tmp_path):
    file = read(
        tmp_path, "from torch import nn\nclass nnx: pass\nACT = {}\ndef f(): pass\n", "pkg.model"
    )

    def name(text: str) -> str | None:
        return file.qualified(ast.parse(text, mode="eval").body)

    assert name("nn.Linear") == "torch.nn.Linear"
    assert name("nnx.inner") == "pkg.model.nnx.inner"
    assert name("f") == "pkg.model.f"
    assert name("ACT") == "pkg.model.ACT"
    assert name("unbound") is None
    assert name("f().x") is None
    assert name("ACT['a']") is None


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_offsets_count_characters_not_bytes(tmp_path, end):
    lines = ["# Gruß, 模型 🙂", "größe = f('模型', x)  # x", "", "y = (g(", "    '🙂', z))"]
    text = end.join(lines) + end
    file = read(tmp_path, text.encode())
    assert file.as_stored(file.text) == text and "\r" not in file.text
    text = file.text
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name | ast.Call):
            begin, stop = file.span(node)
            again = ast.unparse(ast.parse(f"({text[begin:stop]})", mode="eval"))
            assert again == ast.unparse(node)
    call = file.tree.body[0].value
    assert file.segment(call) == "f('模型', x)"
    assert file.segment(file.tree.body[1].value) == "g(\n    '🙂', z)"


def test_a_form_feed_or_line_separator_ends_no_line(tmp_path):
    file = read(tmp_path, "a = '\x0c\u2028\x85'\n\x0cbb = 1\n")
    assert file.segment(file.tree.body[1]) == "bb = 1"
    assert file.at(file.tree.body[0]).line == 1


def test_a_byte_order_mark_stays(tmp_path):
    file = read(tmp_path, b"\xef\xbb\xbfx = 1\ny = 2\n")
    assert file.as_stored(file.text).encode() == b"\xef\xbb\xbfx = 1\ny = 2\n"
    assert [file.segment(s) for s in file.tree.body] == ["x = 1", "y = 2"]
    assert file.at(file.tree.body[0]).column == 1


def test_a_place_is_one_based_and_as_wide_as_its_first_line(tmp_path):
    file = read(tmp_path, "größe = f(\n    1)\nclass A: pass\n")
    place = file.at(file.tree.body[0].value, "here")
    assert (place.line, place.column, place.width) == (1, 9, 2)
    assert (place.text, place.note) == ("größe = f(", "here")
    assert file.at(file.tree.body[1]).width == len("class A: pass")


def test_the_method_that_python_calls(tmp_path):
    file = read(
        tmp_path,
        "from typing import overload\n"
        "class A:\n"
        "    @overload\n    def f(self): ...\n"
        "    def f(self, x): ...\n"
        "    @property\n    def p(self): return 1\n"
        "    @p.setter\n    def p(self, v): ...\n"
        "    if True:\n        def g(self): 'first'\n        def g(self): 'second'\n"
        "    def outer(self):\n        def inner(): ...\n",
    )
    assert len(file.method("A", "f").args.args) == 2
    assert len(file.method("A", "p").args.args) == 1
    assert ast.unparse(file.method("A", "g").body[0]) == "'second'"
    assert file.method("A", "inner") is None
    assert file.method("Nothing", "f") is None


@pytest.mark.parametrize(
    ("text", "words", "line", "column"),
    [
        ("x = 1\ny = (\n", "was never closed", 2, 5),
        ("größe = 1 1\n", "invalid syntax", 1, 11),
        ("x = 1\0\n", "null bytes", 1, 6),
        (b"x = 1\ny = '\xff'\n", "not UTF-8", 2, 6),
    ],
)
def test_what_does_not_parse_is_shown_with_its_place(tmp_path, text, words, line, column):
    with pytest.raises(errors.SourceError, match=words) as caught:
        read(tmp_path, text)
    assert caught.value.at is not None
    assert (caught.value.at.line, caught.value.at.column) == (line, column)
    assert caught.value.at.path.endswith("model.py")


def test_python_2_is_refused_in_the_parsers_words(tmp_path):
    with pytest.raises(errors.SourceError, match="Missing parentheses in call to 'print'"):
        read(tmp_path, "print 'a'\n")


def test_another_encoding_is_refused(tmp_path):
    with pytest.raises(errors.SourceError, match="latin-1"):
        read(tmp_path, b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    assert read(tmp_path, b"# -*- coding: utf-8 -*-\nx = 1\n").names == {"x"}


def test_an_invalid_escape_is_the_sources_own_affair(tmp_path):
    assert read(tmp_path, 'x = "\\d"\n').names == {"x"}


def test_a_missing_file_offers_the_nearest(tmp_path):
    (tmp_path / "modeling_bert.py").touch()
    with pytest.raises(errors.SourceError) as caught:
        locate(str(tmp_path / "modelling_bert.py"))
    assert "modeling_bert.py" in (caught.value.hint or "")


def test_locating_a_module_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "heavy" / "model.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path, name = locate("heavy.model")
    assert (path, name) == (tmp_path / "heavy" / "model.py", "heavy.model")
    assert locate(str(path)) == (path, "heavy.model")
    assert locate("heavy")[0].name == "__init__.py"
    with pytest.raises(errors.SourceError, match=r"no module `heavy\.modle`") as caught:
        locate("heavy.modle")
    assert caught.value.hint == "did you mean `heavy.model`?"


def test_modules_that_are_offered_exist(tmp_path, monkeypatch):
    for name in ("bert", "berd"):
        (tmp_path / "zoo" / name).mkdir(parents=True)
        (tmp_path / "zoo" / name / "__init__.py").touch()
    (tmp_path / "zoo" / "__init__.py").touch()
    (tmp_path / "zoo" / "bert" / "modeling_bert.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    hints = []
    for asked in ("zoo.bertt.modeling_bert", "zoo.bertt.modeling_bertt"):
        with pytest.raises(errors.SourceError) as caught:
            locate(asked)
        hints.append(caught.value.hint)
    one, both = "did you mean `zoo.bert.modeling_bert`?", "did you mean `zoo.bert` or `zoo.berd`?"
    assert hints == [one, both]


@pytest.mark.parametrize("source", ["no_such_package.model", "not-a-name", "", "a..b", "sys"])
def test_what_is_no_source_is_refused(source):
    with pytest.raises(errors.SourceError):
        locate(source)
