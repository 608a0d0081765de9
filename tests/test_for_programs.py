"""Output for programs: `--json`, and shell completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from slapo_rewrite import cli
from slapo_rewrite.schedule.load import bundled
from tests.review.test_html_page import NET, SCHEDULE


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "s.py").write_text(SCHEDULE)


@pytest.fixture
def asked(capsys):
    """Runs a command with `--json`, and gives what it prints and exits with."""

    def asked(*arguments: str) -> dict:
        capsys.readouterr()
        code = cli.main([*arguments, "--json"])
        told = json.loads(capsys.readouterr().out)
        assert told["exit"] == code
        return told

    return asked


REWRITE = ("net.py", "--schedule", "s.py", "-o", "out")


def test_rewriting_checking_and_updating(asked, tmp_path):
    told = asked(*REWRITE, "--check")
    assert (told["exit"], told["reason"], told["places"]) == (1, "SR403", [])
    told = asked(*REWRITE)
    assert told["reason"] == "written" and {"net.py", "rewrite.json"} <= set(told["files"])
    assert asked(*REWRITE) == {"exit": 0, "reason": "up to date", "files": []}
    assert asked(*REWRITE, "--check") == {"exit": 0, "reason": "current"}
    (tmp_path / "s.py").write_text(SCHEDULE.replace("= 0.5", "= 1.0"))
    told = asked("update", "out", "--check")
    assert told["exit"] == 1 and told["reason"] == "not current" and "net.py" in told["files"]
    assert any("s.py" in words for words in told["inputs"])
    told = asked("update", "out")
    assert told["reason"] == "updated" and told["diff"] and told["conflicts"] == []
    assert asked("update", "out")["reason"] == "up to date"


def test_the_tree(asked):
    told = asked("tree", "net.py", "--schedule", "s.py")
    paths = [module["path"] for module in told["modules"]]
    assert paths[0] == "" and len(paths) > 3
    made = next(module for module in told["modules"] if module["parameters"])
    assert made["class"].startswith("torch.nn.") and made["made"].startswith("net.py:")


def test_explaining(asked):
    asked(*REWRITE)
    told = asked("explain", "out")
    change = next(change for change in told["changes"] if change["file"] == "net.py")
    assert told["schedule"] == "s.py" and change["why"] and change["directives"][0]["line"]
    one = asked("explain", "out", f"net.py:{change['lines'][0]}")
    assert one["changes"] == [change]
    assert asked("explain", "out", "net.py:1")["changes"] == []
    assert asked("explain", "out", "--markdown")["reason"] == "SR501"


@pytest.mark.processes
def test_verifying(asked):
    asked(*REWRITE)
    told = asked("verify", "out", "--world", "1")
    assert told["verdict"] == "equal" and told["reason"].startswith("verified: ")
    assert all(check["ok"] for check in told["checks"]) and told["worlds"] == [1]


def test_mistakes_and_defects(asked, tmp_path, monkeypatch):
    (tmp_path / "s.py").write_text(SCHEDULE + "\n\ndef schedule(s):\n    s['no_such_module']\n")
    told = asked(*REWRITE)
    assert (told["exit"], told["reason"], told["error"]) == (2, "SR202", "UnknownPath")
    assert "no_such_module" in told["message"] and told["places"][0]["line"]
    assert asked("tree", "net.py")["reason"] == "SR501"
    monkeypatch.setitem(cli.COMMANDS, "tree", lambda options: 1 // 0)
    assert asked("tree", "net.py", "--schedule", "s.py") == {"exit": 3, "reason": "defect"}


def test_one_form_at_a_time(asked):
    assert asked("net.py", "--schedule", "s.py", "--diff")["reason"] == "SR501"
    assert asked(*REWRITE, "--verify")["reason"] == "SR501"


def completed(line: str, folder) -> list[str]:
    """What a shell is given for a command line with the cursor at its end."""
    answer = folder / "answer"
    given = {
        **{"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SHELL": "bash"},
        **{"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"},
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
    }
    subprocess.run([sys.executable, "-m", "slapo_rewrite"], env=os.environ | given, timeout=60)
    return [word.strip() for word in answer.read_text().splitlines()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("slapo-rewrite ver", {"verify"}),
        ("slapo-rewrite n", {"net.py"}),
        ("slapo-rewrite verify ", {"out"}),
        ("slapo-rewrite verify out --wo", {"--world"}),
        ("slapo-rewrite primitives swi", {"swiglu"}),
        ("slapo-rewrite net.py --schedule b", {"bert"} & set(bundled())),
        ("slapo-rewrite net.py --sup", {"--support"}),
    ],
)
def test_completion(line, words, tmp_path):
    (tmp_path / "out").mkdir()
    assert {word.rstrip("/") for word in completed(line, tmp_path)} == words
