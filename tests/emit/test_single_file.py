"""One self-contained module instead of a package."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from slapo_rewrite import errors
from slapo_rewrite.cli import main
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.primitives.shard import MLP, MODEL

ROOT = Path(__file__).parents[2]
GPT2 = ("transformers.models.gpt2.modeling_gpt2", "gpt2", ["ckpt_ratio=0.5"])


def test_is_one_clean_module(tmp_path):
    output = rewrite(*GPT2, single_file=True, further=["load_pretrained"])
    assert set(output.files) == {"modeling_gpt2.py", "rewrite.diff", "rewrite.json"}
    text = output.files["modeling_gpt2.py"]
    tree = ast.parse(text)
    assert not any(isinstance(n, ast.ImportFrom) and n.level for n in ast.walk(tree))
    names = [n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
    assert {"set_group", "full_state_dict", "load_pretrained", "ColumnParallelConv1D"} <= {*names}
    assert len(names) == len(set(names))
    path = tmp_path / "modeling_gpt2.py"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", str(path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    covered = set()
    for change in json.loads(output.files["rewrite.json"])["changes"]:
        covered.update(range(change["lines"][0], change["lines"][1] + 1))
    number = 1 + text.splitlines().index("class ColumnParallelConv1D(Conv1D):")
    assert number in covered


@pytest.mark.processes
def test_is_checked_and_verified(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command = ["tests/models/gpt.py", "--schedule", "tests/models/gpt_schedule.py"]
    command += ["-o", str(tmp_path / "out")]
    assert main([*command, "--single-file", "--verify", "--world", "2"]) == 0
    assert "verified: rewritten equals original" in capsys.readouterr().out
    assert main([*command, "--single-file", "--check"]) == 0
    assert main([*command, "--check"]) == 1


def test_a_name_that_means_something_else(tmp_path):
    (tmp_path / "net.py").write_text(MLP + "\n\ndef world_size():\n    return 3\n")
    schedule = (
        's["up"].shard(["weight", "bias"], axis=0)\n    s["up"].sync("bwd_post", "all_reduce")\n'
    )
    schedule += '    s["up"].sync("fwd_post", "all_gather", axis=-1)\n'
    (tmp_path / "s.py").write_text(f"{MODEL}def schedule(s):\n    {schedule}")
    rewrite(str(tmp_path / "net.py"), str(tmp_path / "s.py"))
    with pytest.raises(errors.NameTaken, match="`world_size`"):
        rewrite(str(tmp_path / "net.py"), str(tmp_path / "s.py"), single_file=True)
