"""The transform: nodes found by their place, changes composed, nothing else touched."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from slapo_rewrite.code import build, edit
from slapo_rewrite.code.file import SourceFile
from tests.marks import all_but

WRAPPED = [
    ("y = f(x)", "x", "y = f(new(x))"),
    ("return a, b", "(a, b)", "return new((a, b))"),
    ("return (a, b)", "(a, b)", "return new((a, b))"),
    ("return (a + b)", "a + b", "return new(a + b)"),
    ("y = (a + b) * c", "a + b", "y = new(a + b) * c"),
    ("y = a if b else c", "b", "y = a if new(b) else c"),
    ("y = f(x for x in xs)", "(x for x in xs)", "y = f(new((x for x in xs)))"),
    ("y = f(i for i in (1, 2))", "(1, 2)", "y = f(i for i in new((1, 2)))"),
    ("y = x[a:b, 0]", "a", "y = x[new(a):b, 0]"),
    ("y = {**x, 'a': b}", "b", "y = {**x, 'a': new(b)}"),
    ("y = not x", "x", "y = not new(x)"),
    ("y = x.z", "x", "y = new(x).z"),
    ("y = -x ** 2", "x ** 2", "y = -new(x ** 2)"),
    ("y = f(*x)", "x", "y = f(*new(x))"),
    ("y = f(\n    x,  # the input\n)", "x", "y = f(\n    new(x),  # the input\n)"),
    ("y = 'ä' + x", "x", "y = 'ä' + new(x)"),
    ("y = a + \\\n    x", "x", "y = a + \\\n    new(x)"),
    ("y = lambda x=z: x", "z", "y = lambda x=new(z): x"),
    ("y = [x async for x in z]", "z", "y = [x async for x in new(z)]"),
    ("y = (yield x)", "(yield x)", "y = new((yield x))"),
    ("f(x := 3)", "3", "f(x := new(3))"),
    ("y = (  # one\n    a, b,  # two\n)", "(a, b)", "y = new((  # one\n    a, b,  # two\n))"),
    ("y = 'a' 'b'", "'ab'", "y = new('a' 'b')"),
]


@pytest.mark.parametrize(("before", "node", "after"), WRAPPED)
def test_a_node_goes_into_a_call(tmp_path, before, node, after):
    file = written(tmp_path, before)
    (statement,) = file.tree.body
    assert changed(file, statement, node) == after


@pytest.mark.parametrize(
    ("before", "node", "after"),
    [
        ("for a in b:\n    # all\n\n    c = b", "b", "for a in new(b):"),
        ("if a and b:\n    pass\nelif c:\n    pass", "b", "if a and new(b):"),
        ("def f(a=b):\n    return b", "b", "def f(a=new(b)):"),
        ("class A(b):\n    '''Doc.'''", "b", "class A(new(b)):"),
        ("with b as a:\n    pass", "b", "with new(b) as a:"),
        ("while b: a = 1", "b", "while new(b): a = 1"),
    ],
)
def test_of_a_compound_statement_the_header_alone_is_printed(tmp_path, before, node, after):
    file = written(tmp_path, before)
    assert changed(file, file.tree.body[0], node) == after


def test_an_elif_stays_one(tmp_path):
    file = written(tmp_path, "if a:\n    pass\nelif b:\n    pass\n")
    outer = file.tree.body[0]
    assert isinstance(outer, ast.If)
    start, end, text = edited(file, outer.orelse[0], [wrapping(file, outer.orelse[0], "b")])
    assert file.text[:start] + text + file.text[end:] == "if a:\n    pass\nelif new(b):\n    pass\n"


def test_a_decorated_method_is_printed_as_it_stands(tmp_path):
    text = (
        "class A:\n    @one(\n        1\n    )\n    @two\n"
        "    def f(\n        self, a=b\n    ):\n        return 1\n"
    )
    file = written(tmp_path, text)
    cls = file.tree.body[0]
    assert isinstance(cls, ast.ClassDef)
    start, end, new = edited(file, cls.body[0], [wrapping(file, cls.body[0], "b")])
    assert file.text[:start] + new + file.text[end:] == text.replace("a=b", "a=new(b)")


def test_changes_of_one_statement_are_composed_inner_ones_first(tmp_path):
    file = written(tmp_path, "return self.down(self.up(x), x)")
    (statement,) = file.tree.body
    assert isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call)
    call = statement.value
    edits = [
        edit.Edit(call, lambda n: build.call("last", n), outer=True),
        edit.Edit(call, lambda n: build.call("first", n)),
        edit.Edit(call.args[0], lambda n: build.expression("{n} + 1", n=n)),
        edit.Edit(call.args[1], lambda n: build.call("other", n)),
    ]
    text = edited(file, statement, edits)[2]
    assert text == "return last(first(self.down(self.up(x) + 1, other(x))))"


def test_what_is_printed_is_parsed_back(tmp_path):
    file = written(tmp_path, "y = a * b")
    (statement,) = file.tree.body
    assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp)
    wrong = build.parsed("a + b")

    def make(node):  # an operand without the parentheses that it needs
        return node.with_changes(left=wrong)

    with pytest.raises(AssertionError, match="printed differently"):
        edited(file, statement, [edit.Edit(statement.value, make)])


def test_inside_an_f_string_there_is_no_place(tmp_path):
    file = written(tmp_path, "y = f'{x:{z}}'")
    (statement,) = file.tree.body
    names = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == "x"]
    if file.segment(names[0]) != "x":  # Python 3.11 tells no places there
        with pytest.raises(edit.NoPlaceError):
            edited(file, statement, [edit.Edit(names[0], lambda n: n)])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_tabs_marks_and_form_feeds(tmp_path, end):
    text = "\ufeffif a:\n\ty = f(x)  # ä\n\n\x0c\ndef f(x):\n\treturn x\n".replace("\n", end)
    path = tmp_path / "m.py"
    path.write_bytes(text.encode())
    file = SourceFile.read(path)
    for statement in ast.walk(file.tree):
        if isinstance(statement, (ast.Assign, ast.Return)) and statement.value is not None:
            start, stop, new = edited(file, statement, [wrapping(file, statement, "x")])
            result = file.as_stored(file.text[:start] + new + file.text[stop:])
            assert result == text.replace(
                file.segment(statement), file.segment(statement).replace("x", "new(x)")
            )


def modeling_files() -> list[Path]:
    """The model files of the installed transformers; nothing of it is imported."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    models = Path(spec.submodule_search_locations[0]) / "models"
    return sorted(models.glob("*/modeling_*.py"))


FILES = modeling_files()[::40]


@pytest.mark.parametrize("path", all_but(FILES[::3], FILES), ids=lambda path: path.stem)
def test_both_trees_are_joined_by_place(path):
    """Every expression of the file is found, and says the same in both trees.

    `python -m tests.code.test_edit` does so for all files.
    """
    assert list(apart(path)) == []


def apart(path: Path) -> Iterator[str]:
    """The expressions of a file that are not found in the libcst tree, or say something else."""
    file = SourceFile.read(path)
    for statement in ast.walk(file.tree):
        if not isinstance(statement, ast.stmt) or isinstance(statement, ast.Try):
            continue
        part = edit._Part(file, statement)
        trees = edit._Trees([part])
        for node in expressions(statement):
            text = file.segment(node)
            try:
                found = build.code(trees.node_of(part, node)).strip()
            except edit.NoPlaceError:
                yield f"{path.name}:{node.lineno}: {text}"
                continue
            if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
                continue
            if ast.dump(ast.parse(f"({found}\n)", mode="eval").body) != ast.dump(node):
                yield f"{path.name}:{node.lineno}: {text} is {found}"


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a statement itself that stand for themselves in both trees.

    An index of several (`x[a, b]`), a star and what is inside of an f-string do not.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            continue
        is_index = isinstance(node, ast.Subscript) and isinstance(child, ast.Tuple)
        if isinstance(child, ast.expr) and not (
            is_index or isinstance(child, (ast.Slice, ast.Starred))
        ):
            yield child
        if not isinstance(child, ast.JoinedStr):
            yield from expressions(child)


def written(folder: Path, text: str) -> SourceFile:
    path = folder / "m.py"
    path.write_text(text)
    return SourceFile.read(path)


def wrapping(file: SourceFile, statement: ast.stmt, node: str) -> edit.Edit:
    """The edit that puts `new(...)` around the last expression of a statement that says so."""
    wanted = ast.dump(ast.parse(f"({node})", mode="eval").body)
    found = [n for n in expressions(statement) if ast.dump(n) == wanted]
    return edit.Edit(found[-1], lambda n: build.call("new", n))


def edited(file: SourceFile, statement: ast.stmt, edits: list[edit.Edit]) -> edit.Written:
    return edit.edited(file, {statement: edits})[statement]


def changed(file: SourceFile, statement: ast.stmt, node: str) -> str:
    return edited(file, statement, [wrapping(file, statement, node)])[2]


if __name__ == "__main__":
    files = modeling_files()
    wrong = [each for path in files for each in apart(path)]
    print(*wrong, f"{len(files)} files, {len(wrong)} expressions apart", sep="\n")
    raise SystemExit(bool(wrong))
