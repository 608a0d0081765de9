"""The command line in everyday use: its output streams, and the output folders it accepts."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from slapo_rewrite.cli import main
from slapo_rewrite.emit.diff_hunks import coloured
from slapo_rewrite.parsers import PARSERS
from slapo_rewrite.verify import run

SOURCE = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.down = nn.Linear(32, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 32)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["up"].shard(["weight", "bias"], axis=0)
    s["down"].shard("weight", axis=1)
    s.infer_sync()
"""

REWRITE = ["net.py", "--schedule", "s.py"]


def test_help_says_what_each_command_does(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name in filter(None, PARSERS):
        does = re.search(rf"^  slapo-rewrite {name} +(\w.*)$", shown, re.M)
        assert does and str(PARSERS[name]().description).startswith(does[1])


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(SOURCE)
    (tmp_path / "s.py").write_text(SCHEDULE)


@pytest.mark.processes
def test_a_log_has_a_line_for_each_check(capsys):
    assert main([*REWRITE, "-o", "out"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["verify", "out", "--world", "2"]) == 0
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert all(re.fullmatch(r"world size 2: [\w' ]+: ok", line) for line in lines), lines
    assert {"world size 2: outputs: ok", "world size 2: gradients: ok"} <= set(lines)
    assert "\r" not in shown.err and "\x1b" not in shown.err
    report = shown.out.splitlines()
    assert report[0].startswith("world  check")
    assert "verified: rewritten equals original at world size 2" in report


@pytest.mark.long
@pytest.mark.processes
def test_a_size_that_does_not_fit_is_told_before_its_ranks_start(capsys, monkeypatch):
    assert main([*REWRITE, "-o", "out"]) == 0
    started, start = [], run.ForkServer.start

    def counted(server, *args):
        started.append(start(server, *args))
        return started[-1]

    monkeypatch.setattr(run.ForkServer, "start", counted)
    capsys.readouterr()
    assert main(["verify", "out", "--world", "2", "64"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "the model cannot be built at world size 64: 32 does not divide over 64" in shown.err
    assert len(started) == 1
    assert main(["verify", "out", "--world", "16"]) == 0
    assert len(started) == 1 + 1 + 16


@pytest.mark.parametrize(
    ("name", "words", "instead"),
    [
        ("my-out", "`my-out` cannot be imported", "`-o my_out`"),
        ("../of it/2 x/", "`2 x` cannot be imported", "`-o ../of it/out_2_x`"),
        ("\ufb01le", "`\ufb01le` cannot be imported", "`-o file`"),  # a ligature
        ("__main__", "`__main__` cannot be imported", "`-o main`"),
        ("class", "`class` cannot be imported", "`-o class_`"),
        ("torch", "called `torch` would hide the module `torch`", "`-o torch_rewritten`"),
        ("sub/transformers", "hide the module `transformers`", "`-o sub/transformers_rewritten`"),
        ("json", "hide the module `json`", "`-o json_rewritten`"),
        ("layers", "hide the module `layers`", "`-o layers_rewritten`"),
        ("knobs", "hide the module `knobs`", "`-o knobs_rewritten`"),
        ("out.py", "`out.py` is the name of a file: an output is a folder", "`-o out`"),
    ],
)
def test_an_output_that_could_not_be_imported(name, words, instead, tmp_path, capsys, monkeypatch):
    (tmp_path / "net.py").write_text("from layers.own import Layer\n" + SOURCE)
    (tmp_path / "s.py").write_text(SCHEDULE + "    import knobs.own\n")

    def never(*args: object, **options: object) -> None:
        raise AssertionError("something is done")

    monkeypatch.setattr("slapo_rewrite.emit.rewrite.rewrite", never)
    monkeypatch.setattr("slapo_rewrite.emit.transaction.tidied", never)
    for option in ([], ["--check"], ["--diff"], ["--verify"]):
        assert main([*REWRITE, "-o", name, *option]) == 2
        shown = capsys.readouterr().err
        assert words in shown and f"= help: give another name, such as {instead}\n" in shown
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "rewrite.json").write_text("{}")
    assert main([*REWRITE, "-o", name]) == 2
    other = instead.replace("-o ", "")
    assert f"rename that folder to {other}, and give {instead}" in (capsys.readouterr().err)


def test_the_current_folder_needs_a_name_too(tmp_path, capsys, monkeypatch):
    (tmp_path / "my-out").mkdir()
    monkeypatch.chdir(tmp_path / "my-out")
    assert main(["../net.py", "--schedule", "../s.py", "-o", "."]) == 2
    assert "`my-out` cannot be imported" in capsys.readouterr().err


@pytest.mark.long
def test_names_that_hide_nothing(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    for name in ("out/", "my-models/net", "models/torch"):
        assert main([*REWRITE, "-o", name]) == 0
    for name in ("my-out", "torch"):
        assert main([*REWRITE, "-o", name, "--single-file"]) == 0
        assert (tmp_path / name / "net.py").is_file()


def test_a_single_file_lies_in_a_folder_too(tmp_path, capsys):
    assert main([*REWRITE, "-o", "x.py", "--single-file"]) == 2
    assert "`x.py` is the name of a file: an output is a folder" in capsys.readouterr().err
    assert not (tmp_path / "x.py").exists()


DIFF = """\
--- original/net.py
+++ rewritten/net.py
@@ -1,3 +1,2 @@
 import torch
--- a comment of SQL
-b
+++ x
@@ -9 +8,0 @@
-c
--- original/other.py
+++ rewritten/other.py
@@ -0,0 +1 @@
+d
\\ No newline at end of file
"""


def test_colours_of_a_diff():
    shown = coloured(DIFF)
    assert re.sub(r"\x1b\[\d*m", "", shown) == DIFF
    names = {"1": "header", "36": "place", "31": "gone", "32": "new"}
    found = [re.match(r"\x1b\[(\d+)m(.*)\x1b\[m$", line) for line in shown.splitlines()]
    assert [names[match[1]] if match else "" for match in found] == [
        *("header", "header", "place", "", "gone", "gone", "new", "place", "gone"),
        *("header", "header", "place", "new", ""),
    ]


def test_a_diff_is_coloured_on_a_terminal_alone(capsys, monkeypatch):
    def shown() -> str:
        assert main([*REWRITE, "--diff"]) == 0
        return capsys.readouterr().out

    output = SimpleNamespace(warnings=[], diff=lambda: DIFF)
    monkeypatch.setattr("slapo_rewrite.emit.rewrite.rewrite", lambda *args, **options: output)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shown() == DIFF
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: stream is sys.stdout)
    assert shown() == coloured(DIFF)
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown() == DIFF
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert shown() == DIFF
