"""`generated/` is what the bundled schedules give today."""

import ast
import json
import subprocess
from collections.abc import Iterable, Iterator

import pytest

from slapo_rewrite.emit import record
from slapo_rewrite.emit.helpers import SURFACE
from tests import golden

# Methods that no line names.
CALLED_BY_TORCH = {"forward", "backward", "_should_skip_dynamo"}
# What a `pipeline.py` offers.
PIPELINE = {"build", "batch", "to_full", "load_full", "read_checkpoint", "write_checkpoint"}
PIPELINE |= {"schedule", "step", "eval"}
AGAIN = "run `make generated`, and read what changed"


@pytest.fixture(scope="module")
def files(made) -> dict[str, str]:
    return golden.everything(made)


@pytest.fixture(scope="module")
def ignored() -> set[str]:
    """Model files that git leaves out; they need not be there."""
    return {
        f"{item.folder}/modeling_{item.model}.py"
        for item in golden.goldens()
        if not item.committed_whole
    }


def test_every_committed_file_is_current(files, ignored):
    wrong = [
        name
        for name, text in files.items()
        if name not in ignored and (golden.GENERATED / name).read_bytes() != text.encode()
    ]
    assert not wrong, AGAIN


def test_no_file_is_left_from_a_schedule_that_is_gone(files):
    assert golden.present() <= files.keys(), AGAIN


@pytest.mark.parametrize("item", golden.goldens(), ids=lambda item: item.folder)
def test_the_model_file_is_the_one_that_the_record_names(files, item):
    content = record.read(golden.GENERATED / item.folder)
    name = content["source"]["file"]
    assert content["files"][name] == record.digest(files[f"{item.folder}/{name}"]), AGAIN


@pytest.mark.parametrize("item", golden.goldens(), ids=lambda item: item.folder)
def test_a_record_says_nothing_of_the_machine(item):
    text = (golden.GENERATED / item.folder / record.NAME).read_text()
    content = json.loads(text)
    assert (content["source"]["name"], content["schedule"]["name"]) == (item.source, item.schedule)
    assert str(golden.ROOT) not in text
    assert "digest" not in content["tool"]


def test_git_leaves_out_the_model_files_and_nothing_else(files, ignored):
    if not (golden.ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    paths = "\n".join(f"generated/{name}" for name in sorted(files))
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        input=paths,
        capture_output=True,
        text=True,
        cwd=golden.ROOT,
    )
    assert set(found.stdout.split()) == {f"generated/{name}" for name in ignored}


def definitions(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """Names that a file defines, with what each refers to; methods stand for themselves."""
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            methods = [n for n in statement.body if isinstance(n, ast.FunctionDef)]
            known = [m for m in methods if m.name.startswith("__") or m.name in CALLED_BY_TORCH]
            yield statement.name, [n for n in statement.body if n not in methods] + known
            yield statement.name, [*statement.bases, *statement.decorator_list]
            yield from ((m.name, [m]) for m in methods if m not in known)
        elif isinstance(statement, ast.FunctionDef):
            yield statement.name, [statement]
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((ast.unparse(target), [statement]) for target in targets)


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    found = [n for node in nodes for n in ast.walk(node)]
    names = {n.id for n in found if isinstance(n, ast.Name)}
    return names | {n.attr for n in found if isinstance(n, ast.Attribute)}


# What users and transformers call.
OFFERED = {"clip_grad_norm_", "is_custom_code"}


def unused(model: str, helpers: Iterable[str]) -> list[str]:
    """What the helper files define and nothing of the output refers to, but for what it offers."""
    waiting = names_in([ast.parse(model)]) | OFFERED.union(PIPELINE, *SURFACE.values())
    defined = [item for text in helpers for item in definitions(ast.parse(text))]
    used: set[str] = set()
    while waiting:
        used |= waiting
        waiting = names_in(n for name, parts in defined if name in waiting for n in parts) - used
    return sorted({name for name, _ in defined} - used)


@pytest.mark.parametrize("item", golden.goldens(), ids=lambda item: item.folder)
def test_helper_files_define_nothing_that_the_output_does_not_use(files, item):
    own = {n: t for n, t in files.items() if n.startswith(f"{item.folder}/") and n.endswith(".py")}
    name = json.loads(files[f"{item.folder}/{record.NAME}"])["source"]["file"]
    model = own.pop(f"{item.folder}/{name}")
    assert not unused(model, own.values())
    if item.name == "tensor_parallel":
        assert "scatter" not in own[f"{item.folder}/tensor_parallel.py"]


def test_what_is_not_used_is_found():
    helper = (
        "class Layer:\n"
        "    def forward(self):\n        return self.used()\n"
        "    def used(self):\n        return LIMIT\n"
        "    def idle(self):\n        return self.idle() + other()\n"
        "LIMIT = 1\n"
        "def other():\n    return other()\n"
    )
    assert unused("Layer()", [helper]) == ["idle", "other"]
    assert unused("", [helper]) == ["LIMIT", "Layer", "idle", "other", "used"]
