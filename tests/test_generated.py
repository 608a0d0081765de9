"""`generated/` matches the current output of the bundled schedules."""

import ast
import json
import subprocess
from collections.abc import Iterable, Iterator

import pytest

from slapo_rewrite.emit import record
from slapo_rewrite.emit.helpers import SURFACE
from tests import golden
from tests.marks import all_but

# Methods that no line names.
CALLED_BY_TORCH = {"forward", "backward", "_should_skip_dynamo"}
# What a `pipeline.py` offers.
PIPELINE = {"build", "batch", "to_full", "load_full", "read_checkpoint", "write_checkpoint"}
PIPELINE |= {"schedule", "step", "eval"}
AGAIN = "run `make generated`, and read what changed"


# One of each kind.
SHORT = {
    "bert/fused",
    "bert/pipeline",
    "bert/tensor_parallel",
    "gpt/sequence_parallel",
    "gpt/tensor_parallel",
    "gpt/whole_logits",
    "gpt2/tensor_parallel_checkpointed",
    "llama/pipeline_torch",
    "llama/tensor_parallel",
    "roberta/tensor_parallel",
    "t5/tensor_parallel",
}
GOLDENS = list(golden.goldens())
each = pytest.mark.parametrize(
    "item",
    all_but([item for item in GOLDENS if item.folder in SHORT], GOLDENS),
    ids=lambda item: item.folder,
)


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


@each
def test_what_is_committed_is_current(made, item):
    """And the record names the model file, which may not be there."""
    output = item.make(made)
    committed = {
        name: text
        for name, text in output.files.items()
        if item.committed_whole or name != output.model_file
    }
    folder = golden.GENERATED / item.folder
    assert all((folder / n).read_bytes() == t.encode() for n, t in committed.items()), AGAIN
    name = output.model_file
    assert record.read(folder)["files"][name] == record.digest(output.files[name]), AGAIN


@pytest.mark.long
def test_the_table_is_current_and_no_file_is_left_from_a_schedule_that_is_gone(files):
    assert (golden.GENERATED / golden.TABLE).read_text("utf-8") == files[golden.TABLE], AGAIN
    assert golden.present() <= files.keys(), AGAIN


@pytest.mark.parametrize("item", GOLDENS, ids=lambda item: item.folder)
def test_a_record_says_nothing_of_the_machine(item):
    text = (golden.GENERATED / item.folder / record.NAME).read_text()
    content = json.loads(text)
    assert (content["source"]["name"], content["schedule"]["name"]) == (item.source, item.schedule)
    assert str(golden.ROOT) not in text
    assert "digest" not in content["tool"]


@pytest.mark.long
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


@each
def test_helper_files_define_nothing_that_the_output_does_not_use(made, item):
    output = item.make(made)
    own = {name: text for name, text in output.files.items() if name.endswith(".py")}
    model = own.pop(output.model_file)
    assert not unused(model, own.values())
    if item.name == "tensor_parallel":
        assert "scatter" not in own["tensor_parallel.py"]


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
