"""The benchmark of the kernels, tried out where there is no GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmark import kernels, report
from benchmark.kernel_cases import KERNELS
from tests.golden import ROOT
from tests.runtime.kernels.picked import PUBLIC

# What a machine with a GPU may lack.
ABSENT = ("libcst", "black", "rich", "hypothesis", "deepspeed")


@pytest.mark.long
def test_it_measures_every_kernel_with_torch_alone(tmp_path):
    script = f"""
        import sys
        sys.modules.update(dict.fromkeys({ABSENT!r}))  # importing them fails
        from benchmark import kernels
        kernels.main(["--tiny", "--output", {str(tmp_path / "out.json")!r}])
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines())],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["machine"]["versions"]["torch"] == torch.__version__
    assert list(results["kernels"]) == [kernel.name for kernel in KERNELS]
    for row in results["kernels"].values():
        for variant in ("eager", "ours", "eager again"):
            assert row["seconds"][variant].keys() == {"forward", "both"}, row["seconds"]
        assert row["errors"] is None or row["errors"]["ours"] <= 2 * row["errors"]["eager"]
        assert 0 < row["floor_s"]["forward"] <= row["floor_s"]["both"]
    assert len(done.stdout.splitlines()) == 2 + len(KERNELS) + 3
    assert "On a CPU, to try the script out" in done.stdout


def test_every_public_function_is_measured():
    measured = {kernel.name.split()[0] for kernel in KERNELS}
    # Those are measured by others: another activation inside, or one result of two.
    alike = {"gated", "reglu", "bias_activation", "activation_dropout", "quick_gelu"}
    products = {"linear_each", "linear_activation", "linear_gelu"}  # no kernel of their own
    assert measured | alike | products | {"add_layer_norm"} == set(PUBLIC)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="there is no GPU here; --tiny"):
        kernels.main([])


def test_a_peer_that_fails_or_comes_late_is_named(tmp_path, monkeypatch):
    real, output = kernels.find_variants, tmp_path / "out.json"

    def failing(inputs):
        raise ValueError("no such kernel")

    monkeypatch.setattr(
        kernels, "find_variants", lambda *a, **k: {"liger": lambda *x: failing(x)} | real(*a, **k)
    )
    kernels.main(["--tiny", "--only", "layer_norm", "--output", str(output)])
    seconds = json.loads(output.read_text())["kernels"]["layer_norm"]["seconds"]
    assert seconds["liger"] == {"failed": "ValueError: no such kernel"}
    kernels.main(["--tiny", "--only", "layer_norm", "--seconds", "0", "--output", str(output)])
    results = json.loads(output.read_text())
    seconds = results["kernels"]["layer_norm"]["seconds"]
    assert seconds["eager"] == {"failed": "out of time"}
    assert "both" in seconds["ours"]
    assert "| layer_norm |" in kernels.table(results)


def test_a_run_whose_machine_changes_makes_no_claim(tmp_path, monkeypatch):
    found = iter([1.0, 1.04])
    monkeypatch.setattr(
        kernels, "roofline", lambda *a: {"copy_bytes_per_s": next(found), "product_flops": 1.0}
    )
    kernels.main(["--tiny", "--only", "swiglu", "--output", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    assert not results["steady"]
    assert "UNSTEADY: no claim" in kernels.table(results)


def test_figures_are_those_of_the_result_file():
    path = ROOT / "benchmark/results/kernels.json"
    text = kernels.table(json.loads(path.read_text())) if path.exists() else ""
    assert report.marked(kernels.NAME, text) in report.README.read_text()
