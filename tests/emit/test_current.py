"""An output is rewritten only if something that it depends on may have changed."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from slapo_rewrite.cli import main
from slapo_rewrite.emit import diff_cache
from slapo_rewrite.emit import rewrite as module
from slapo_rewrite.emit.current import changed_modules
from slapo_rewrite.emit.inputs import may_change
from slapo_rewrite.emit.new_record import without_folder
from slapo_rewrite.primitives.shard import MLP, MODEL

SCHEDULE = """\
def schedule(s, both: bool = True):
    if SPLIT and both:
        s["down"].shard("weight", axis=1)
        s["down"].sync("fwd_post", "all_reduce")
        s["up"].shard(["weight", "bias"], axis=0)
        s["up"].sync("bwd_post", "all_reduce")
"""
REWRITE = ["net.py", "--schedule", "s.py"]


@pytest.fixture(autouse=True)
def _inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLAPO_REWRITE_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = {"net.py": MLP, "s.py": "from knobs_of_mine import SPLIT\n" + MODEL + SCHEDULE}
    for name, text in {**texts, "knobs_of_mine.py": "SPLIT = True\n"}.items():
        write(tmp_path / name, text)


@pytest.fixture
def said(capsys, monkeypatch):
    """What a command says on stdout and stderr, and whether it rewrote anything."""
    made, original, path = [], module.rewrite, [*sys.path]
    monkeypatch.setattr(module, "rewrite", lambda *a, **k: made.append(1) or original(*a, **k))

    def run(*arguments: str, code: int = 0) -> tuple[str, str, bool]:
        made.clear()
        sys.path[:] = path  # as a new process has it
        sys.modules.pop("knobs_of_mine", None)
        capsys.readouterr()
        assert main([*REWRITE, *arguments]) == code
        shown = capsys.readouterr()
        return shown.out, shown.err, bool(made)

    return run


def write(path, text):
    """As a user who wrote it a while ago, not while the tool was at work."""
    path.write_text(text)
    os.utime(path, (time.time() - 60,) * 2)


def test_an_output_that_is_current_is_left_alone(said, tmp_path):
    assert said("-o", "out")[2]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    for options in ((), ("--merge",), ("--force",)):
        assert said("-o", "out", *options) == ("out is up to date\n", "", False)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("net.py", "# of mine\n" + MLP),
        ("s.py", "SPLIT = False\n" + MODEL + SCHEDULE),
        ("knobs_of_mine.py", "SPLIT = False\n"),
        ("out/rewrite.diff", None),
    ],
)
def test_what_changed_is_rewritten(name, text, said, tmp_path):
    said("-o", "out")
    diff = said("--diff")
    if text is None:
        (tmp_path / name).unlink()
    else:
        write(tmp_path / name, text)
    out, _, made = said("-o", "out")
    assert made and out.startswith("wrote out: ")
    if text is not None and "SPLIT" in text:
        assert diff[0] and said("--diff")[0] == ""
    assert said("-o", "out") == ("out is up to date\n", "", False)


def test_what_is_asked_for_otherwise_is_rewritten(said):
    said("-o", "out")
    for options in (
        ("--set", "both=false"),
        ("--set", "both=true"),
        ("--with", "load_pretrained"),
        ("--single-file",),
    ):
        assert said("-o", "out", *options)[2], options
        assert not said("-o", "out", *options)[2], options
    assert said("-o", "out", "--set", "both", code=2)[0] == "", "and is refused as ever"


def test_hand_edits_are_never_up_to_date(said, tmp_path):
    said("-o", "out")
    path = tmp_path / "out" / "net.py"
    edited = path.read_text().replace("return self.down", "# of my own\n        return self.down")
    path.write_text(edited)
    assert "--merge carries them over" in said("-o", "out", code=2)[1]
    assert said("-o", "out", "--merge")[2]
    assert path.read_text() == edited
    assert said("-o", "out", "--merge")[2]
    assert "--merge carries them over" in said("-o", "out", code=2)[1]


def test_warnings_are_said_again(said, tmp_path):
    layers = MODEL.replace("m.MLP(8)", "m.Stack(8)")
    write(
        tmp_path / "net.py",
        MLP + "\n\nclass Stack(nn.Module):\n    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(MLP(width) for _ in range(2))\n\n"
        "    def forward(self, x):\n        for layer in self.layers:\n"
        "            x = layer(x)\n        return x\n",
    )
    write(
        tmp_path / "s.py",
        layers + 'def schedule(s):\n    s["layers"][:0.1].checkpoint()\n',
    )
    first, again = said("-o", "out"), said("-o", "out")
    assert first[1].startswith("warning: ") and "takes none of 2 modules" in first[1]
    assert again[2] is False and "takes none of 2 modules" in again[1]
    shown = said("--diff")
    assert (shown[1], shown[2]) == (first[1], False)


def test_a_record_holds_no_folder_of_one_machine():
    for path in ("/home/me/my models/net.py", "a/net.py", r"c\net.py", "net.py"):
        assert without_folder(f"{path}:3: of `a/b.c`: it") == "net.py:3: of `a/b.c`: it"
    assert without_folder("the model does not run: a/b.py: no") == (
        "the model does not run: a/b.py: no"
    )


def test_a_diff_is_made_once(said, tmp_path):
    first = said("--diff")
    assert first[2] and "+        self.up = ColumnParallelLinear(" in first[0]
    assert said("--diff") == (*first[:2], False)
    assert said("-o", "out", "--diff") == (*first[:2], False)
    [kept] = (tmp_path / "cache" / "slapo-rewrite").iterdir()
    for text in ("", "{}", kept.read_text()[:-9], '{"record": 1, "diff": "", "warnings": []}'):
        kept.write_text(text)
        assert said("--diff") == (*first[:2], True), text
    assert said("--diff")[2] is False


def test_only_the_diff_of_the_same_is_taken(said, tmp_path, monkeypatch):
    said("--diff")
    monkeypatch.setenv("TRANSFORMERS_SOMETHING", "1")
    assert said("--diff")[2]
    assert not said("--diff")[2]
    assert said("-o", "out", "--single-file", "--diff")[2]
    write(tmp_path / "torch.py", "# beside the schedule, and found first\n")
    assert said("--diff")[2] and said("--diff")[2]


def test_without_a_place_for_it_the_diff_is_made_anew(said, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for value in (str(tmp_path / "file"), "/proc/nowhere"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert said("--diff")[1:] == said("--diff")[1:] == ("", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SLAPO_REWRITE_CACHE", "0")
    assert said("--diff")[2] and said("--diff")[2]
    assert not (tmp_path / "cache").exists()


def test_few_diffs_are_kept(said, tmp_path, monkeypatch):
    monkeypatch.setattr(diff_cache, "MOST_FILES", 2)
    for value in ("true", "false", "yes", "true"):
        said("--diff", "--set", f"both={value}")
    assert len(list((tmp_path / "cache" / "slapo-rewrite").iterdir())) == 2
    assert not said("--diff", "--set", "both=true")[2], "the latest is one of them"
    assert said("--diff", "--set", "both=false")[2]


STEADY = [
    "import torch\nfrom torch import nn\nimport math, functools\nfrom mine import x\n",
    "from . import y\n",
    "class A:\n    def forward(self, input):\n        return input.view(-1)\n",
    "@torch.compile\ndef f(x):\n    return x\n",
]
CHANGING = [
    "open('knobs.json')",
    "print('found')",
    "import os",
    "import time",
    "from pathlib import Path",
    "import importlib",
    "def f():\n    import json\n",
    "config = BertConfig.from_pretrained('x')",
    "torch.load('x')",
    "torch.cuda.is_available()",
    "torch.cuda.device_count()",
    "numpy.loads",
    "from torch import load as it",
    "exec('x')",
    "__import__('os')",
    "import unknown_package",
    "def broken(:",
]


@pytest.mark.parametrize("text", [*STEADY, *CHANGING])
def test_code_that_may_find_something_else(text, tmp_path):
    (tmp_path / "code.py").write_text(text)
    assert may_change(tmp_path / "code.py", ["torch", "mine.x"]) == (text in CHANGING)


def test_a_schedule_that_reads_a_file_is_run(said, tmp_path):
    reading = "import json\nwith open('split.json') as f:\n    SPLIT = json.load(f)\n"
    write(tmp_path / "knobs_of_mine.py", reading)
    for value in (True, False):
        (tmp_path / "split.json").write_text(json.dumps(value))
        assert said("-o", "out")[2] and said("-o", "out")[2]
        assert ("ColumnParallel" in (tmp_path / "out" / "net.py").read_text()) == value
        diff, _, made = said("--diff")
        assert made and bool(diff) == value
    assert not (tmp_path / "cache").exists()


def test_what_is_written_while_it_is_read_is_not_known(said, tmp_path):
    path = tmp_path / "knobs_of_mine.py"
    os.utime(path, (time.time() + 60,) * 2)
    assert said("-o", "out")[2] and said("-o", "out")[2]
    assert said("--diff")[2] and said("--diff")[2]
    write(path, path.read_text())
    assert said("-o", "out")[2]
    assert not said("-o", "out")[2]


def test_of_many_changed_modules_of_one_package_it_is_said_how_many_there_are():
    modules = ["mine", "yours.a", "yours.b", *(f"transformers.utils.m{n}" for n in range(9))]
    assert changed_modules(modules) == [
        "mine has changed",
        "yours.a has changed",
        "yours.b has changed",
        "9 modules of transformers have changed, transformers.utils.m0 among them",
    ]
