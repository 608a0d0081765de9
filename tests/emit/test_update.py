"""An output is rewritten from its own record of inputs, and differences are shown."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from slapo_rewrite import cli, errors
from slapo_rewrite.emit import record

NET = """\
import torch
from torch import nn

import sizes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(sizes.WIDTH, 64)
        self.down = nn.Linear(64, sizes.WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(sizes.WIDTH, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""
SCHEDULE = """\
import torch

import parts


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 32)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s, ratio: float = 0.5):
    parts.split(s["layers.*"])
    s.infer_sync()
    s["layers"][:ratio].checkpoint()
"""
PARTS = """\
def split(blocks):
    blocks["up"].shard(["weight", "bias"], axis=0)
    blocks["down"].shard("weight", axis=1)
"""
REWRITE = ["net.py", "--schedule", "s.py", "-o", "out"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # before the folders of other tests
    write("net.py", NET)
    write("s.py", SCHEDULE)
    write("parts.py", PARTS)
    write("sizes.py", "WIDTH = 32\n")
    return tmp_path


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


def run(*arguments: str) -> int:
    """A command line, in what imports the user's modules anew, as a process would."""
    for name in ("net", "model_net", "parts", "sizes"):
        sys.modules.pop(name, None)
    return cli.main(arguments)


def rewrite(*options: str) -> None:
    assert run(*REWRITE, *options) == 0


def update(capsys, *options: str, code: int = 0) -> str:
    capsys.readouterr()
    assert run("update", "out", *options) == code
    shown = capsys.readouterr()
    return shown.out if code < 2 else shown.err


def contents(folder: str = "out") -> dict[str, str]:
    """The files, and of the record what is about the output."""
    found = {p.name: p.read_text() for p in Path(folder).iterdir() if p.is_file()}
    return {n: record.comparable(t) if n == record.NAME else t for n, t in found.items()}


def anew(*options: str) -> dict[str, str]:
    """What a rewrite gives that starts from nothing."""
    assert run("net.py", "--schedule", "s.py", "-o", "anew", *options) == 0
    return contents("anew")


def marked(text: str, mark: str) -> list[str]:
    return [line[1:].strip() for line in text.splitlines() if re.match(rf"[{mark}][^+-]", line)]


def test_where_nothing_changed_nothing_is_done(capsys):
    rewrite()
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("*.*")}
    assert update(capsys) == "out is up to date\n"
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("*.*")} == before


def test_another_schedule(capsys):
    rewrite()
    write("s.py", SCHEDULE + '    s["head"].checkpoint()\n')
    shown = update(capsys)
    assert shown.startswith("the schedule s.py has changed\n")
    assert marked(shown, "+")[0] == "class CheckpointedLinear(nn.Linear):"
    assert marked(shown, "-") == ["self.head = nn.Linear(sizes.WIDTH, 8)"]
    assert "CheckpointedBlock" not in shown and "ColumnParallel" not in shown, "that is not new"
    assert shown.endswith("updated out\n")
    assert contents() == anew()


def test_another_source(capsys):
    rewrite()
    changed = NET.replace("import torch\n", "import math\n\nimport torch\n", 1)
    changed = changed.replace("nn.Linear(sizes.WIDTH, 64)", "nn.Linear(sizes.WIDTH, 96)")
    changed = changed.replace("nn.Linear(64, sizes", "nn.Linear(96, sizes")
    changed = changed.replace("return self.head(x)", "return self.head(x) / math.pi")
    write("net.py", changed)
    shown = update(capsys)
    assert shown.startswith("the source net.py has changed\n")
    assert "# net.py: the source has changed in 2 places\n" in shown, "not to be reviewed again"
    assert "math" not in shown
    assert marked(shown, "-")[0] == "self.up = ColumnParallelLinear(sizes.WIDTH, 64)"
    assert marked(shown, "+")[0] == "self.up = ColumnParallelLinear(sizes.WIDTH, 96)"
    assert contents() == anew()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("parts.py", '["weight", "bias"], axis=0', '"weight", axis=0'), ("sizes.py", "32", "32 * 1")],
    ids=["schedule", "source"],
)
def test_an_import_of_either(capsys, name, old, new):
    rewrite()
    text = Path(name).read_text().replace(old, new)
    if name == "parts.py":
        text += '    blocks["up"].shard("bias", axis=0)\n'
    write(name, text)
    shown = update(capsys)
    assert shown.startswith(f"{name.removesuffix('.py')} has changed\n")
    assert "out stays as it is: the output is the same\n" in shown
    assert update(capsys) == "out is up to date\n"


def test_another_tool(capsys, monkeypatch):
    rewrite()
    monkeypatch.setattr(record, "tool_digest", lambda: "another")
    shown = update(capsys)
    assert shown.startswith("slapo-rewrite itself has changed\n")
    assert "the output is the same" in shown
    assert json.loads(Path("out/rewrite.json").read_text())["tool"]["digest"] == "another"
    assert update(capsys) == "out is up to date\n"


def test_another_version_of_a_package(capsys):
    rewrite()
    path = Path("out/rewrite.json")
    content = json.loads(path.read_text())
    content["packages"]["torch"] = "2.11.0"
    path.write_text(record.dumped(content))
    assert re.match(r"torch was 2\.11\.0, and is now 2\S+\n", update(capsys))
    assert contents() == anew()


def test_knobs_and_helpers_stay(capsys):
    options = ["--set", "ratio=0.25", "--with", "build_deferred", "--single-file"]
    rewrite(*options)
    write("net.py", NET.replace("range(4)", "range(8)"))
    update(capsys)
    assert contents() == anew(*options)
    content = json.loads(Path("out/rewrite.json").read_text())
    assert content["set"] == {"ratio": "0.25"} and content["with"] == ["build_deferred"]


def test_a_shared_folder_of_helpers_stays(capsys):
    assert run(*REWRITE[:-1], "models/out", "--support", "models/support") == 0
    write(
        "s.py", SCHEDULE.replace("    parts.split", '    s["head"].checkpoint()\n    parts.split')
    )
    capsys.readouterr()
    assert run("update", "models/out") == 0
    assert run("update", "models/out", "--check") == 0
    assert not Path("models/out/tensor_parallel.py").exists()
    assert Path("models/support/tensor_parallel.py").is_file()
    assert "CheckpointedLinear" in Path("models/out/net.py").read_text()


def test_a_knob_that_is_gone_is_told(capsys):
    rewrite("--set", "ratio=0.25")
    write("s.py", SCHEDULE.replace("ratio", "share"))
    before = contents()
    error = update(capsys, code=2)
    assert "no knob `ratio`" in error
    assert contents() == before


def test_hand_edits_stay(capsys):
    rewrite()
    path = Path("out/net.py")
    path.write_text(path.read_text().replace("return self.head(x)", "return self.head(x)  # mine"))
    write("s.py", SCHEDULE.replace("ratio: float = 0.5", "ratio: float = 1.0"))
    shown = update(capsys)
    assert "hand edits carried over: net.py\n" in shown
    assert "mine" not in shown, "what was edited by hand is not new"
    assert "# mine" in path.read_text() and "// 2" not in path.read_text()
    shown = update(capsys)
    assert "the output is the same" in shown and "# mine" in path.read_text()


def test_edits_that_conflict_are_left_to_be_resolved(capsys):
    rewrite()
    path = Path("out/net.py")
    path.write_text(
        path.read_text().replace("layers // 2", "layers // 3").replace("i < 2", "i < 1")
    )
    write("s.py", SCHEDULE.replace("ratio: float = 0.5", "ratio: float = 0.75"))
    shown = update(capsys, code=1)
    assert "conflicts to resolve by hand: net.py" in shown and "carried over" not in shown
    assert "<<<<<<<" in path.read_text()
    assert "conflicts that are not resolved" in update(capsys, code=2)
    update(capsys, "--force")
    assert contents() == anew()


def test_what_is_missing_is_written_again(capsys):
    rewrite()
    before = contents()
    Path("out/tensor_parallel.py").unlink()
    Path("out/rewrite.diff").unlink()
    update(capsys)
    assert contents() == before


def test_a_check_writes_nothing(capsys):
    rewrite()
    assert update(capsys, "--check") == "out is current\n"
    write("s.py", SCHEDULE.replace("ratio: float = 0.5", "ratio: float = 1.0"))
    before = contents()
    shown = update(capsys, "--check", code=1)
    assert "the schedule s.py has changed" in shown and "not current: net.py" in shown
    assert shown.endswith("\nrun slapo-rewrite update out\n")
    assert contents() == before
    assert "give one" in update(capsys, "--check", "--force", code=2)


def test_what_was_verified_is_to_be_verified_again(capsys):
    rewrite()
    path = Path("out/rewrite.json")
    found = {"verdict": "equal", "worlds": [1], "changed": [], "checks": [], "failures": []}
    path.write_text(record.with_verification(path.read_text(), found))
    write("s.py", SCHEDULE.replace("ratio: float = 0.5", "ratio: float = 1.0"))
    assert "slapo-rewrite verify out\n" in update(capsys)
    assert json.loads(path.read_text())["verification"] is None


def test_what_moved_is_told_where_it_is(capsys, tmp_path):
    rewrite()
    Path("net.py").rename("model_net.py")
    error = update(capsys, code=2)
    assert "net.py" in error and "give --source and --schedule" in error
    Path("model_net.py").rename("net.py")
    Path("s.py").rename("t.py")
    assert "give --source and --schedule" in update(capsys, code=2)
    update(capsys, "--schedule", "t.py")
    assert json.loads(Path("out/rewrite.json").read_text())["schedule"]["name"] == "t.py"


def test_what_is_no_output_of_this_tool_is_refused(capsys):
    error = update(capsys, code=2)
    assert "holds no rewrite.json" in error and "slapo-rewrite SOURCE --schedule S -o out" in error
    with pytest.raises(errors.NotAnOutput, match=r"`net\.py` is a file, not the folder"):
        record.read(Path("net.py"))
    rewrite()
    path = Path("out/rewrite.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "tool": {**content["tool"], "version": "99.0.1"}}))
    error = update(capsys, code=2)
    assert "written by slapo-rewrite 99.0.1, which is newer" in error
    assert "install slapo-rewrite 99.0.1, or" in error
    path.write_text(json.dumps({**content, "source": "net.py"}))
    assert "is not a record of slapo-rewrite: its `source`" in update(capsys, code=2)
