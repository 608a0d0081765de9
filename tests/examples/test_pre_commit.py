"""The hook of `.pre-commit-hooks.yaml`, in a repository that holds an output."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slapo_rewrite import cli
from slapo_rewrite.commands.answers import NO
from tests.documents import read
from tests.golden import ROOT
from tests.review.test_html_page import NET, SCHEDULE

HOOKS = ROOT / ".pre-commit-hooks.yaml"
BIN = Path(sys.executable).parent


@pytest.fixture
def output(tmp_path, monkeypatch) -> Path:
    """What the documentation's configuration names."""
    folder = tmp_path / "user"
    (folder / "models").mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "net.py").write_text(NET)
    (folder / "s.py").write_text(SCHEDULE)
    assert cli.main(["net.py", "--schedule", "s.py", "-o", "models/bert"]) == cli.DONE
    return folder


def configured() -> dict:
    (block,) = (b for b in read(ROOT / "docs/commands.md") if b.title == ".pre-commit-config.yaml")
    return yaml.safe_load(block.text)


def test_its_command_answers(output, capsys):
    (hook,) = yaml.safe_load(HOOKS.read_text())
    (asked,) = configured()["repos"][0]["hooks"]
    assert asked["id"] == hook["id"] and not hook["pass_filenames"]
    _, *command = [*shlex.split(hook["entry"]), *asked["args"]]
    assert cli.main(command) == cli.DONE
    (output / "s.py").write_text(SCHEDULE.replace("= 0.5", "= 1.0"))
    assert cli.main(command) == NO
    assert "not current: " in capsys.readouterr().out


@pytest.mark.release
@pytest.mark.processes
def test_by_pre_commit_itself(output, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    for key, value in (("user.name", "A"), ("user.email", "a@b.c"), ("init.defaultBranch", "main")):
        subprocess.run(["git", "config", "--global", key, value], check=True)
    tool = tmp_path / "tool"
    tool.mkdir()
    shutil.copy(HOOKS, tool)
    for folder in (tool, output):
        run("git", "init", "-q", str(folder))
    commit(tool)
    config = configured()
    config["repos"][0] |= {
        "repo": str(tool),
        "rev": run("git", "-C", str(tool), "rev-parse", "HEAD"),
    }
    (output / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    run("pre-commit", "install")
    commit(output)
    (output / "s.py").write_text(SCHEDULE.replace("= 0.5", "= 1.0"))
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        commit(output)
    assert "not current: " in stopped.value.stderr
    run("slapo-rewrite", "update", "models/bert")
    commit(output)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.strip()


def commit(folder: Path) -> None:
    run("git", "-C", str(folder), "add", "-A")
    run("git", "-C", str(folder), "commit", "-q", "-m", "all of it")
