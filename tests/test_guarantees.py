"""The guarantees, held against real transformers files and a file of our own."""

from __future__ import annotations

import ast
import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from slapo_rewrite.cli import main
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.splice import apply_edits
from slapo_rewrite.emit.rewrite import Output, rewrite
from slapo_rewrite.emit.rewritten_text import check_text
from slapo_rewrite.emit.sibling_files import absolute_imports
from tests.marks import all_but, long

ROOT = Path(__file__).parents[1]
MODELS = Path(transformers.__file__).parent / "models"

CASES = [
    ("transformers.models.bert.modeling_bert", "bert"),
    ("transformers.models.gpt2.modeling_gpt2", "gpt2"),
    ("transformers.models.llama.modeling_llama", "llama"),
    ("transformers.models.t5.modeling_t5", "t5"),
    ("tests/models/gpt.py", "tests/models/gpt_schedule.py"),
]


@pytest.fixture(
    scope="module",
    params=all_but([CASES[0], CASES[-1]], CASES),
    ids=lambda case: case[0].rpartition(".")[2],
)
def output(request, made) -> Output:
    source, schedule = request.param
    return made(source, schedule, ["ckpt_ratio=0.5"])


def test_identity_of_a_file_without_relative_imports():
    os.chdir(ROOT)
    output = rewrite(*CASES[-1], ["tensor_parallel=false"])
    assert output.files["gpt.py"] == (ROOT / "tests/models/gpt.py").read_text()
    assert set(output.files) == {"__init__.py", "gpt.py", "rewrite.json"}


EMPTY = """\
from rules.schedules.{} import model


def schedule(s, tensor_parallel=False):
    pass
"""
# Transformers initialises these otherwise outside of its package.
TREATED = [
    "from .pretrained import LibraryModel",
    "PreTrainedModel(LibraryModel, PreTrainedModel):",
]


@pytest.mark.parametrize("case", CASES[:-1], ids=lambda c: c[1])
@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "without effect"])
def test_identity_apart_from_imports(case, is_empty, tmp_path):
    """What is called for starts with the weights of the original, be it a share of no layer."""
    source, schedule = case
    if is_empty:
        file = tmp_path / "s.py"
        file.write_text(EMPTY.format(schedule), encoding="utf-8")
    output = rewrite(source, str(file) if is_empty else schedule, ["tensor_parallel=false"])
    lines = [x for x in output.diff(0).splitlines() if not x.startswith(("---", "+++", "@@"))]
    removed = [x[1:] for x in lines if x.startswith("-")]
    added = [x[1:] for x in lines if x.startswith("+") and x[1:]]
    treated = [x for x in added if x.endswith(tuple(TREATED))]
    assert len(treated) == (0 if is_empty or schedule in ("bert", "llama") else len(TREATED))
    added = [x for x in added if x not in treated]
    removed = [
        x for x in removed if not (treated and x.endswith("PreTrainedModel(PreTrainedModel):"))
    ]
    assert len(removed) == len(added)
    for before, after in zip(removed, added, strict=True):
        assert before.startswith("from ."), before
        assert after.startswith(("from transformers.", "from transformers ")), after
        assert before.partition(" import ")[2] == after.partition(" import ")[2]


@pytest.mark.parametrize(("first", "every"), [(0, 16), long(4, 16), long(8, 16), long(12, 16)])
def test_absolute_imports_of_every_modeling_file(first, every):
    """Nothing but the dots of relative imports changes, in any file of the library."""
    paths = sorted(MODELS.glob("*/modeling_*.py"))
    assert len(paths) > 300
    for path in paths[first::every]:
        file = SourceFile.read(path)
        text, _ = apply_edits(file.text, absolute_imports(file))
        tree = ast.parse(text)
        assert not any(isinstance(n, ast.ImportFrom) and n.level for n in ast.walk(tree)), path
        assert len(text.splitlines()) == len(file.text.splitlines())
        before, after = file.text.splitlines(), text.splitlines()
        for old, new in zip(before, after, strict=True):
            assert old == new or old.lstrip().startswith("from ."), path


def test_every_changed_line_has_a_cause(output: Output):
    record = json.loads(output.files["rewrite.json"])
    covered = set()
    for change in record["changes"]:
        if change["file"] == output.model_file:
            assert change["directives"]
            covered.update(range(change["lines"][0], change["lines"][1] + 1))
    before = output.originals[output.model_file].text.splitlines()
    after = output.files[output.model_file].splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, _, _, first, last in matcher.get_opcodes():
        if tag == "equal":
            continue
        for number in range(first, last):
            line = after[number]
            made_absolute = line.startswith(("from transformers.", "from transformers "))
            assert not line.strip() or made_absolute or number + 1 in covered, (number + 1, line)


def test_original_lines_are_kept(output: Output):
    before = output.originals[output.model_file].text.splitlines()
    after = output.files[output.model_file].splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    kept = sum(block.size for block in matcher.get_matching_blocks())
    # A short file of which most lines are layers cannot keep as much as a long one.
    assert kept / len(before) > (0.9 if len(before) < 600 else 0.975)


def test_no_strings_attached(output: Output):
    for name, text in output.files.items():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    assert all(a.name.split(".")[0] != "slapo_rewrite" for a in node.names)
                if isinstance(node, ast.ImportFrom):
                    assert (node.module or "").split(".")[0] != "slapo_rewrite"


def test_new_files_are_clean(output: Output, tmp_path):
    helpers = {n: t for n, t in output.files.items() if n != output.model_file}
    for name, text in output.files.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / n) for n in helpers if n.endswith(".py")]
    done = subprocess.run(
        [sys.executable, "-m", "black", "--check", *paths], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    paths.append(str(tmp_path / output.model_file))
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", *paths],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_no_line_is_longer_than_the_file_allows(output: Output):
    longest = max(len(x) for x in output.originals[output.model_file].text.splitlines())
    for line in output.files[output.model_file].splitlines():
        assert len(line) <= max(longest, 120), line


@pytest.mark.long
def test_same_bytes_in_another_process(tmp_path, monkeypatch):
    """Whatever order sets and dictionaries have there."""
    monkeypatch.chdir(ROOT)
    source, schedule = CASES[-1]
    command = [source, "--schedule", schedule, "--set", "ckpt_ratio=0.5", "-o"]
    assert main([*command, str(tmp_path / "here")]) == 0
    subprocess.run(
        [sys.executable, "-m", "slapo_rewrite", *command, str(tmp_path / "there")],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    here, there = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())}
        for name in ("here", "there")
    )
    assert here == there


def test_check_and_explain(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    command = [CASES[-1][0], "--schedule", CASES[-1][1], "-o", str(out)]
    assert main(command) == 0
    assert main([*command, "--check"]) == 0
    assert main([*command, "--check", "--set", "ckpt_ratio=0.5"]) == 1
    assert "knobs were" in capsys.readouterr().out
    text = (out / "gpt.py").read_text()
    number = 1 + next(i for i, x in enumerate(text.splitlines()) if "parts=Packed(3)" in x)
    assert main(["explain", str(out), f"gpt.py:{number}"]) == 0
    shown = capsys.readouterr().out
    assert 'blocks["*.attn.c_attn"].shard(["weight", "bias"], axis=0, parts=3)' in shown
    assert "gpt_schedule.py:" in shown
    assert main(["explain", str(out), "gpt.py:1"]) == 0
    assert "as in the original" in capsys.readouterr().out
    number = text.splitlines().index("import torch") + 1
    assert main(["explain", str(out), f"gpt.py:{number}"]) == 0
    assert "as in the original" in capsys.readouterr().out
    for place in ("gpt.py:0", "gpt.py:-1", "gpt.py:\u00b2", "gpt.py:" + "9" * 5000, "gpt.py:x"):
        assert main(["explain", str(out), place]) == 2
    capsys.readouterr()
    (out / "gpt.py").write_text(text + "# mine\n")
    assert main([*command, "--check"]) == 1
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert (out / "gpt.py").read_text().endswith("# mine\n")


def test_the_result_must_define_what_the_original_defines(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("class A:\n    pass\n")
    file = SourceFile.read(path)
    with pytest.raises(AssertionError, match="no longer defines"):
        check_text("class B:\n    pass\n", file)
