"""The example trains: in one process and with DeepSpeed, to the same losses."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slapo_rewrite import cli
from tests.golden import ROOT

EXAMPLE = ROOT / "examples" / "train_gpt"

pytestmark = pytest.mark.processes


def losses(folder: Path, *command: str) -> list[float]:
    """What a command prints of its steps."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (.*)$", done.stdout, re.M)]


def test_the_example_trains_as_one_process_does(tmp_path, monkeypatch):
    folder = tmp_path / "train_gpt"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("parallel", "__pycache__"))
    monkeypatch.chdir(folder)
    assert cli.main(["gpt.py", "--schedule", "schedule.py", "-o", "parallel"]) == cli.DONE
    single = losses(folder, "train.py", "--single")
    assert len(single) == 100 and single[0] > 5.5 and single[-1] < 2.6
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    parallel = losses(folder, *run, "train.py", "--tensor", "2", "--save", "checkpoint")
    assert parallel == pytest.approx(single, abs=2e-3)
    assert (folder / "checkpoint" / "latest").exists()
