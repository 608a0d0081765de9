"""Imports point one way: from the command line down to the errors, and never back up."""

import ast
import graphlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import slapo_rewrite

PACKAGE = Path(slapo_rewrite.__file__).parent
# From top to bottom; what shares a line does not import one another. `runtime` is written for the
# outputs, and stands for itself.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"commands"},
    {"parsers"},
    {"review"},
    {"auto", "plan", "tune"},
    {"verify", "emit"},
    {"project"},
    {"stages"},
    {"schedule"},
    {"primitives"},
    {"fusion"},
    {"lowering"},
    {"changes"},
    {"simulate"},
    {"precision"},
    {"sharding"},
    {"model"},
    {"patterns"},
    {"code"},
    {"bundle", "examples", "garbage", "groups", "operations", "hugging_face"},
    {"treatments"},
    {"directive"},
    {"errors"},
    {"runtime"},
)
MAY_IMPORT_TORCH = {
    *("auto", "model", "plan", "precision", "review", "runtime", "sharding", "stages", "tune"),
    "verify",
}
HEAVY = {"torch", "transformers"}


@dataclass(frozen=True)
class Import:
    """One imported name, absolute.

    Attributes:
        file: The file that imports, relative to the package.
        line: Where.
        name: What.
        at_start: Whether it is imported with the file; not inside a function or for types alone.
    """

    file: Path
    line: int
    name: str
    at_start: bool

    @property
    def part(self) -> str:
        """The part of the package that the file belongs to."""
        return self.file.parts[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"


def imports_of(path: Path) -> Iterator[Import]:
    file = path.relative_to(PACKAGE)
    package = ["slapo_rewrite", *file.parts[:-1]]

    def walk(node: ast.AST, at_start: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, at_start)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, child.module] if child.module else base)
                for alias in child.names:
                    yield Import(file, child.lineno, f"{module}.{alias.name}", at_start)
            else:
                later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from walk(child, at_start and not later and not for_types)

    yield from walk(ast.parse(path.read_text()), True)


def part_of(name: str) -> str | None:
    """The part of the package that a dotted name lies in; None for other packages and the root."""
    segments = name.split(".")
    if segments[0] != "slapo_rewrite" or len(segments) < 2:
        return None
    return segments[1] if any(segments[1] in layer for layer in LAYERS) else None


def depth(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_part_of_the_package_has_its_layer():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert parts - {"__init__"} <= set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    wrong = [
        str(found)
        for found in imports_of(path)
        if (part := part_of(found.name))
        and found.part not in ("__init__", part)
        and depth(part) <= depth(found.part)
    ]
    assert not wrong


def test_no_file_imports_itself_through_others():
    relative = {path: path.relative_to(PACKAGE.parent).with_suffix("") for path in FILES}
    names = {".".join(parts.parts): path for path, parts in relative.items()}
    imported = {name: {found.name for found in imports_of(path)} for name, path in names.items()}
    known = {
        name: {m for each in own for m in (each, each.rpartition(".")[0]) if m in names} - {name}
        for name, own in imported.items()
    }
    assert len(list(graphlib.TopologicalSorter(known).static_order())) == len(FILES)


def test_no_two_files_of_the_engine_have_one_name():
    """What outputs hold is named for those who read outputs."""
    names = Counter(path.name for path in FILES if path.relative_to(PACKAGE).parts[0] != "runtime")
    assert [name for name, count in names.items() if count > 1] == ["__init__.py"]


def test_what_outputs_are_made_of_needs_nothing_of_the_tool():
    names = [
        found
        for path in sorted((PACKAGE / "runtime").rglob("*.py"))
        for found in imports_of(path)
        if found.name.startswith("slapo_rewrite.") and part_of(found.name) != "runtime"
    ]
    assert not [str(found) for found in names]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_is_imported_where_it_may_be(path):
    wrong = [
        str(found)
        for found in imports_of(path)
        if found.at_start
        and found.name.split(".")[0] in HEAVY
        and found.part not in MAY_IMPORT_TORCH
    ]
    assert not wrong


def test_libcst_is_known_where_source_is_changed_alone():
    """Decisions are made on `ast`; a change says where, and what stands there then."""
    files = {
        path.relative_to(PACKAGE)
        for path in FILES
        for found in imports_of(path)
        if found.name.split(".")[0] == "libcst"
    }
    assert {str(f) for f in files if f.parts[0] != "changes"} == {"code/build.py", "code/edit.py"}


def test_characters_of_source_are_counted_in_one_folder():
    """Other folders name the node that changes, and its replacement."""
    wrong = []
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in ("code", "runtime"):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        edits = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == "slapo_rewrite.code.splice"
            for alias in node.names
            if alias.name == "Edit"
        }
        called = ((node, ast.unparse(node.func)) for node in nodes if isinstance(node, ast.Call))
        wrong += [
            f"{path.relative_to(PACKAGE)}:{node.lineno}"
            for node, name in called
            if name in edits or name.endswith(".offset")
        ]
    assert not wrong


def test_source_is_not_compared_as_text():
    """`ast.unparse(call.func) == "self.up"` misses `act = self.up`; `code/names.py` does not."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(
            isinstance(side, ast.Call) and ast.unparse(side.func).endswith("unparse")
            for side in (node.left, *node.comparators)
        )
    ]
    assert not wrong


def test_the_reading_of_imports_sees_them_all(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_architecture.PACKAGE", tmp_path)
    (tmp_path / "lowering").mkdir()
    path = tmp_path / "lowering" / "a.py"
    path.write_text(
        "import torch\n"
        "from ..emit import record\n"
        "from . import b\n"
        "def f():\n    from slapo_rewrite.cli import main\n"
        "if TYPE_CHECKING:\n    from torch import nn\n"
    )
    assert [(found.name, found.at_start) for found in imports_of(path)] == [
        ("torch", True),
        ("slapo_rewrite.emit.record", True),
        ("slapo_rewrite.lowering.b", True),
        ("slapo_rewrite.cli.main", False),
        ("torch.nn", False),
    ]
