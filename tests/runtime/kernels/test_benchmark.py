"""The benchmark of the kernels, tried out without a GPU."""

import json
import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from benchmark import kernel_choice, kernels, report
from benchmark.kernel_cases import KERNELS
from slapo_rewrite.fusion.backends import Table
from slapo_rewrite.model.kernel_samples import SAMPLES, Maker
from tests.golden import ROOT
from tests.runtime.kernels.picked import PUBLIC

# What a machine with a GPU may lack.
ABSENT = ("libcst", "black", "rich", "hypothesis", "deepspeed")


@pytest.mark.release
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


def test_a_table_to_choose_by_is_made_and_read(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    kernels.main(["--choose", "--tiny", "--only", "residual", "--output", str(path)])
    table = Table.read(path)
    assert table.name == "gpu" and table.device and table.measured
    functions = {name for name in SAMPLES if name.startswith("residual")}
    dtypes = ("bfloat16", "float32")
    assert {(row.kernel, row.dtype) for row in table.rows} == set(product(functions, dtypes))
    for row in table.rows:
        assert row.microseconds.keys() == {"triton", "eager"}
        assert all(figure > 0 for figure in row.microseconds.values())
        assert table.nearest(row.kernel, row.width, row.dtype) == row
    assert f"wrote {path}: {len(table.rows)} measurements" in capsys.readouterr().err
    kernels.main(["--choose", "--tiny", "--only", "swiglu"])
    assert json.loads(capsys.readouterr().out)["measurements"][0]["kernel"] == "swiglu"


def test_every_function_is_measured_at_some_width():
    for function in SAMPLES:
        assert all(width > 0 for width in kernel_choice.widths(function, tiny=False))
        given = kernel_choice.backends(function, compiled=False)
        assert [*given] == ["eager", "triton", "eager again"]
    assert kernel_choice.widths("causal_lm_linear_cross_entropy", tiny=False)[0] == 32000
    assert kernel_choice.widths("rotary", tiny=False) == (64, 128)


def test_what_fails_or_is_not_exact_enough_gets_no_figure(monkeypatch, capsys):
    _, reference = kernel_choice.forms("swiglu")

    def wrong(gate, up):
        return reference(gate, up) * 1.01

    def failing(gate, up):
        raise RuntimeError("no such kernel")

    given = {"triton": wrong, "inductor": failing, "eager": reference}
    monkeypatch.setattr(kernel_choice, "backends", lambda *_: given)
    kernels.main(["--choose", "--tiny", "--only", "swiglu"])
    shown = capsys.readouterr()
    rows = json.loads(shown.out)["measurements"]
    assert [row["microseconds"].keys() for row in rows] == [{"eager"}, {"eager"}]
    assert "swiglu 8 by inductor: RuntimeError: no such kernel" in shown.err
    assert "swiglu 8 by triton: its error is 1.0e-02" in shown.err


@pytest.mark.parametrize(("again", "figures"), [(1.02, {"eager", "triton"}), (1.04, set())])
def test_a_machine_that_changes_gives_no_figures(again, figures, monkeypatch):
    found = iter([1.0, 0.5, again])

    class Timer:
        device = "cuda"

        def median_s(self, calls):
            return next(found)

    kernel, reference = kernel_choice.forms("swiglu")
    given = {"eager": reference, "triton": kernel, kernel_choice.AGAIN: reference}
    monkeypatch.setattr(kernel_choice, "backends", lambda *_: given)
    maker = Maker(8, 8, torch.float32)
    measured, failed = kernel_choice.measured("swiglu", maker, Timer(), 1)
    assert measured.keys() == figures
    assert (kernel_choice.AGAIN in failed) == (not figures)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"),
    ],
)
def test_a_device_is_called_as_plans_call_it(device, name):
    assert kernel_choice.short_name(device) == name
