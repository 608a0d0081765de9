"""Hand edits in an output are carried over into a new one."""

from __future__ import annotations

import json

import pytest

from slapo_rewrite import errors
from slapo_rewrite.cli import main
from slapo_rewrite.emit import record
from slapo_rewrite.emit.merge import merged, three_way
from slapo_rewrite.primitives.shard import MLP, MODEL

BOTH = """\
def schedule(s, both: bool = False):
    s["down"].shard("weight", axis=1)
    s["down"].sync("fwd_post", "all_reduce")
    s["up"].shard(["weight", "bias"], axis=0)
    s["up"].sync("bwd_post", "all_reduce")
"""


def test_three_way():
    assert three_way("a\nb\nc\n", "a\nb\nc\nmine\n", "new\nb\nc\n") == ("new\nb\nc\nmine\n", True)
    text, clean = three_way("a\n", "mine\n", "new\n")
    assert not clean
    assert text.splitlines()[0] == "<<<<<<< edited by hand"
    assert text.splitlines()[-1] == ">>>>>>> slapo-rewrite"


@pytest.fixture
def command(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MLP)
    (tmp_path / "s.py").write_text(MODEL + BOTH)
    command = ["net.py", "--schedule", "s.py", "-o", "out"]
    assert main(command) == 0
    return command


def test_edits_survive_a_new_source(command, tmp_path, capsys):
    path = tmp_path / "out" / "net.py"
    edited = path.read_text().replace("return self.down", "# of my own\n        return self.down")
    path.write_text(edited)
    (tmp_path / "net.py").write_text(MLP.replace("import torch\n", "import math\n\nimport torch\n"))
    assert main(command) == 2
    assert "--merge carries them over" in capsys.readouterr().err
    assert path.read_text() == edited
    assert main([*command, "--merge"]) == 0
    text = path.read_text()
    assert "# of my own" in text and text.startswith("import math\n")
    assert "ColumnParallelLinear" in text
    assert main(command) == 2, "what is merged is still edited by hand"
    assert main([*command, "--merge"]) == 0
    assert path.read_text() == text


def test_conflicts_are_marked_and_said(command, tmp_path, capsys):
    path = tmp_path / "out" / "net.py"
    line = "        self.down = RowParallelLinear(4 * width, width)\n"
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, "        self.down = Mine()\n"))
    (tmp_path / "net.py").write_text(
        MLP.replace(
            "self.down = nn.Linear(4 * width, width)", "self.down = nn.Linear(width * 4, width)"
        )
    )
    assert main([*command, "--merge"]) == 1
    assert "conflicts to resolve by hand: net.py" in capsys.readouterr().out
    text = path.read_text()
    assert "<<<<<<< edited by hand" in text and "Mine()" in text and "width * 4" in text


def test_without_edits_it_is_an_ordinary_rewrite(command, tmp_path):
    before = (tmp_path / "out" / "net.py").read_text()
    assert main([*command, "--merge"]) == 0
    assert (tmp_path / "out" / "net.py").read_text() == before


def test_a_record_without_the_written_files(command, tmp_path):
    out = tmp_path / "out"
    text = record.comparable((out / "rewrite.json").read_text())
    (out / "rewrite.json").write_text(text)
    (out / "net.py").write_text("mine\n")
    assert "written" not in json.loads(text)
    with pytest.raises(errors.OutputEdited, match="its written form is not kept"):
        merged(out, {"net.py": "new\n"})


def test_a_file_of_somebody_else_is_not_merged(command, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "net.py").write_text("mine\n")
    assert main([*command[:-1], "other", "--merge"]) == 2
    assert (tmp_path / "other" / "net.py").read_text() == "mine\n"


def test_merge_and_force_exclude_each_other(command):
    assert main([*command, "--merge", "--force"]) == 2
