"""Hand edits in an output are carried over into a new one."""

from __future__ import annotations

import base64
import bz2
import contextlib
import json
import shutil
from pathlib import Path

import pytest

from slapo_rewrite import errors
from slapo_rewrite.cli import main
from slapo_rewrite.commands import rewrite_command
from slapo_rewrite.emit import record
from slapo_rewrite.emit.merge import merged, three_way
from slapo_rewrite.emit.rewrite import Output, rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.primitives.shard import MLP, MODEL
from tests.marks import all_but

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


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> tuple[Path, Output]:
    """A folder with a model, a schedule and the output of both, and that output."""
    folder = tmp_path_factory.mktemp("before")
    (folder / "net.py").write_text(MLP)
    (folder / "s.py").write_text(MODEL + BOTH)
    with contextlib.chdir(folder):
        output = rewrite("net.py", "s.py")
        write(Path("out"), output.files)
    return folder, output


@pytest.fixture
def command(before, tmp_path, monkeypatch) -> list[str]:
    shutil.copytree(before[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return ["net.py", "--schedule", "s.py", "-o", "out"]


@pytest.fixture
def unchanged(before, monkeypatch) -> None:
    """Neither source nor schedule is: what is to be written is known."""
    monkeypatch.setattr(rewrite_command, "_rewritten", lambda request: before[1])


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
    assert main([*command, "--check"]) == 1
    for again in (command, [*command, "--merge"]):
        assert main(again) == 2, "they are still there"
    shown = capsys.readouterr()
    assert "holds conflicts that are not resolved" in shown.err and "wrote" not in shown.out
    assert path.read_text() == text


def test_an_edit_that_was_carried_over_is_current(command, tmp_path, capsys):
    path = tmp_path / "out" / "net.py"
    path.write_text(
        path.read_text().replace("return self.down", "# mine\n        return self.down")
    )
    assert main([*command, "--check"]) == 1, "not before it is"
    assert main([*command, "--merge"]) == 0
    assert main([*command, "--check"]) == 0
    (tmp_path / "net.py").touch()
    (tmp_path / "s.py").write_text((tmp_path / "s.py").read_text() + "\n")
    assert main([*command, "--check"]) == 1, "nor after the schedule changed"
    assert main([*command, "--merge"]) == 0
    path.write_text(path.read_text() + "# more\n")
    assert main([*command, "--check"]) == 1, "nor with another edit"
    capsys.readouterr()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_stay_as_the_edit_has_them(command, tmp_path, end):
    path = tmp_path / "out" / "net.py"
    text = path.read_text().replace("return self.down", "# mine\n        return self.down")
    path.write_text(text, newline=end)
    (tmp_path / "net.py").write_text(MLP.replace("import torch\n", "import math\n\nimport torch\n"))
    assert main([*command, "--merge"]) == 0
    data = path.read_bytes()
    assert b"import math" in data and b"# mine" in data
    assert data.count(b"\n") == data.count(end.encode())
    assert (b"\r" in data) == (end == "\r\n")


def test_an_edit_that_is_not_utf8_is_refused(command, tmp_path, capsys):
    path = tmp_path / "out" / "net.py"
    path.write_bytes(path.read_bytes() + "# gr\xf6\xdfer\n".encode("latin-1"))
    assert main([*command, "--merge"]) == 2
    assert "byte 0xf6 is not UTF-8" in capsys.readouterr().err
    assert main(["explain", "out", "net.py:1"]) == 0


SPOILT = {
    "not JSON": b"{",
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "files: null": {"files": None},
    "files: a list": {"files": ["net.py"]},
    "source: a text": {"source": "x"},
    "source: a number in it": {"source": {"name": 1, "file": "net.py", "sha256": ""}},
    "a file elsewhere": {"files": {"../s.py": ""}},
    "a file of this name": {"files": {"..": ""}},
    "a model file elsewhere": {"source": {"name": "net.py", "file": "../net.py", "sha256": ""}},
    "schedule": {"schedule": []},
    "directives": {"directives": {"a": 1}},
    "a directive": {"directives": [{"line": "x"}]},
    "no directive": {"directives": []},
    "changes": {"changes": [1]},
    "lines": {"changes": [{"file": "net.py", "lines": [1], "directives": [0], "why": ""}]},
    "rules": {"rules": [{"rule": "x", "directive": 99}]},
    "written: a number": {"written": {"net.py": 1}},
    "tool": {"tool": "x"},
    "set": {"set": []},
    "depends": {"depends": {"net": 1}},
    "copies": {"copies": {"net.py": "x"}},
}


@pytest.mark.parametrize(
    "name", all_but(["not JSON", "a file elsewhere", "written: a number"], SPOILT)
)
@pytest.mark.usefixtures("unchanged")
def test_a_record_of_another_shape(command, tmp_path, capsys, name):
    path, spoilt = tmp_path / "out" / "rewrite.json", SPOILT[name]
    content = json.loads(path.read_text())
    path.write_bytes(
        spoilt if isinstance(spoilt, bytes) else json.dumps({**content, **spoilt}).encode()
    )
    before = path.read_bytes()
    (tmp_path / "out" / "net.py").write_text("mine\n")
    for more in ([], ["--merge"], ["--force"]):
        assert main([*command, *more]) == 2
    assert main(["explain", "out"]) == 2
    assert main(["verify", "out"]) == 2
    assert "rewrite.json" in capsys.readouterr().err
    assert main([*command, "--check"]) == 1
    assert path.read_bytes() == before
    assert (tmp_path / "out" / "net.py").read_text() == "mine\n"


@pytest.mark.parametrize(
    "packed",
    [
        "!",
        "\u00e4",
        base64.b85encode(b"no bzip2").decode(),
        base64.b85encode(bz2.compress(b"\xff")).decode(),
        base64.b85encode(bz2.compress(b"0" * 1000)[:-9]).decode(),
        base64.b85encode(bz2.compress(bytes(record.MOST_BYTES + 1))).decode(),
    ],
    ids=["base 85", "no ASCII", "bzip2", "UTF-8", "cut off", "too long"],
)
def test_a_written_form_that_is_spoilt(command, tmp_path, capsys, packed):
    path = tmp_path / "out" / "rewrite.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "written": {"net.py": packed}}))
    (tmp_path / "out" / "net.py").write_text("mine\n")
    assert main([*command, "--merge"]) == 2
    assert "its copy of the written files cannot be read" in capsys.readouterr().err
    assert (tmp_path / "out" / "net.py").read_text() == "mine\n"


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
