"""The example workflow's commands are ones that the tool takes, and that say what they should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slapo_rewrite import cli
from tests.golden import ROOT
from tests.review.test_html_page import NET, SCHEDULE

EXAMPLE = ROOT / "examples" / "review"
WORKFLOW = yaml.safe_load((EXAMPLE / "slapo-rewrite.yml").read_text())


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """One that holds an output where the workflow looks for it, and stands in for GitHub's `gh`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "s.py").write_text(SCHEDULE)
    (tmp_path / "models").mkdir()
    outputs = WORKFLOW["jobs"]["review"]["env"]["OUTPUTS"].split()
    for out in outputs:
        assert cli.main(["net.py", "--schedule", "s.py", "-o", out]) == 0
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("slapo-rewrite", f'exec {sys.executable} -m slapo_rewrite "$@"'),
        ("gh", 'echo "$@" > gh.txt'),
        ("pip", "true"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return tmp_path


def run(repository: Path) -> list[int]:
    """The steps' exit codes, until one fails."""
    job = WORKFLOW["jobs"]["review"]
    codes = []
    for step in job["steps"]:
        if "run" not in step:
            continue
        given = {**job["env"], **step.get("env", {}), "NUMBER": "7", "OMP_NUM_THREADS": "1"}
        path = f"{repository / 'bin'}{os.pathsep}{os.environ['PATH']}"
        own = {**os.environ, **given, "PATH": path, "PYTHONPATH": str(ROOT)}
        shell = [shutil.which("bash") or "sh", "-e", "-c", step["run"]]
        codes.append(subprocess.run(shell, cwd=repository, env=own, timeout=300).returncode)
        if codes[-1]:
            break
    return codes


@pytest.mark.release
@pytest.mark.processes
def test_a_pull_request_is_commented_and_checked(repository):
    assert run(repository) == [0, 0, 0, 0]
    assert "<h1>bert</h1>" in (repository / "reviews/bert.html").read_text()
    assert (repository / "comment.md").read_text().startswith("### `models/bert`")
    said = (repository / "gh.txt").read_text()
    assert said == "pr comment 7 --edit-last --create-if-none --body-file comment.md\n"
    for name in ("comment.md", "gh.txt"):
        (repository / name).unlink()
    shutil.rmtree(repository / "reviews")
    (repository / "s.py").write_text(SCHEDULE.replace("= 0.5", "= 1.0"))
    assert run(repository) == [0, 0, 0, 1], "it is commented all the same"


def test_it_may_do_no_more_than_it_needs():
    assert WORKFLOW["permissions"] == {"contents": "read", "pull-requests": "write"}
    text = (EXAMPLE / "slapo-rewrite.yml").read_text()
    inserted = re.findall(r"run:.*?(?=\n      - |\Z)", text, re.S)
    assert not any("${{" in step for step in inserted), "what others wrote is no part of a script"
