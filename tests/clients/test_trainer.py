"""Trainer on tensor-parallel ranks, as in the example, trains as in one process."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slapo_rewrite import cli
from tests.forked import printed
from tests.golden import ROOT

LLAMA = "transformers.models.llama.modeling_llama"


def figures(text: str) -> list[float]:
    """Losses, gradient norms and the losses of the evaluations."""
    lines = re.findall(r"^step .*", text, re.M)
    return [float(n) for line in lines for n in re.findall(r"(?:loss|norm) (\d\S*)", line)]


@pytest.mark.long
@pytest.mark.processes
def test_trainer_on_shared_layers_is_that_of_one_process(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples", dirs_exist_ok=True)
    folder: Path = tmp_path / "examples" / "trainer"
    shutil.rmtree(folder / "parallel", ignore_errors=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert cli.main([LLAMA, "--schedule", "llama", "-o", "parallel"]) == cli.DONE
    single = figures(
        printed(folder / "train.py", 1, "--single", "--steps", "4", "--save", "single")
    )
    assert len(single) == 10 and single[7] < single[0] - 0.5  # evaluated twice
    weights = load_file("single/model.safetensors")
    for world in (2, 4):  # one replica, and two
        run = ["--tensor", "2", "--steps", "4", "--save", f"of_{world}"]
        assert figures(printed(folder / "train.py", world, *run)) == pytest.approx(single, abs=2e-4)
        found = load_file(f"of_{world}/model.safetensors")
        assert found.keys() == weights.keys()
        # Adam divides by a gradient's own size, so what is but rounding counts as much.
        assert all((found[n] - t).abs().mean() < 1e-4 for n, t in weights.items())
