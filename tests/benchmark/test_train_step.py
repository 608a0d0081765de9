"""The benchmark of training steps, tried out without a GPU."""

import json
import os
import subprocess
import sys
import types

import pytest
import torch
from transformers.models.llama import modeling_llama

from benchmark import report, train_step
from benchmark.steps import STEPS, flops_per_token
from tests.golden import ROOT
from tests.runtime.kernels.test_benchmark import ABSENT


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A rewritten BERT."""
    folder = tmp_path_factory.mktemp("prepared")
    train_step.main(["--prepare", str(folder), "--only", "BERT"])
    return folder


@pytest.fixture(scope="module")
def results(prepared, tmp_path_factory):
    """What it measures where there is nothing but torch, triton and transformers."""
    output = tmp_path_factory.mktemp("results") / "out.json"
    arguments = ["--run", str(prepared), "--tiny", "--rounds", "2", "--output", str(output)]
    script = f"""
        import sys
        sys.modules.update(dict.fromkeys({ABSENT!r}))  # importing them fails
        from benchmark import train_step
        train_step.main({arguments!r})
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
    assert "On a CPU, to try the script out" in done.stdout
    return json.loads(output.read_text())


@pytest.mark.release
def test_it_measures_every_variant(results):
    row = results["steps"]["BERT-large"]
    assert not row["failed"]
    assert list(row["seconds"]) == ["eager attention", "SDPA", "ours", "SDPA again"]
    assert all(len(s) == 2 and min(s) > 0 for s in row["seconds"].values())
    assert row["largest"].keys() == {"SDPA", "ours"}
    errors = {name: error["gradients"] for name, error in row["errors"].items()}
    assert 0 < errors["ours"] <= train_step.ERROR_LIMIT * errors["eager attention"] < 0.2
    assert "| BERT-large, ours |" in train_step.table(results)


@pytest.mark.long
def test_another_transformers_is_refused(prepared, tmp_path):
    record = json.loads((prepared / "prepared.json").read_text())
    (tmp_path / "prepared.json").write_text(json.dumps({**record, "transformers": "5.17.0"}))
    with pytest.raises(SystemExit, match=r"was prepared for transformers 5\.17\.0"):
        train_step.main(["--run", str(tmp_path), "--tiny"])


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_without_a_gpu_it_says_so(prepared):
    with pytest.raises(SystemExit, match="there is no GPU here; --tiny"):
        train_step.main(["--run", str(prepared)])


def row(ours, again, errors=(0.01, 0.01)):
    seconds = {"SDPA": [1.0, 1.1], "ours": [ours, 1.1 * ours], "SDPA again": [again, 1.1 * again]}
    names = ("eager attention", "ours")
    found = {n: {"loss": 0.0, "gradients": e} for n, e in zip(names, errors, strict=True)}
    return {"seconds": seconds, "errors": found}


@pytest.mark.parametrize(
    ("measured", "steady", "said"),
    [
        (row(0.8, 1.0), True, "1.25 times SDPA"),
        (row(0.8, 1.0), False, "no claim: the machine changed"),
        (row(0.97, 0.98), True, "no difference"),
        (row(1.25, 1.0), True, "0.80 times SDPA"),
        (row(0.8, 1.0, (0.01, 0.0111)), True, "no claim: gradients are less exact than eager's"),
        ({"seconds": {"SDPA": [1.0]}, "errors": {}}, True, "not measured"),
        (row(0.8, 1.0) | {"errors": {}}, True, "no claim: gradients were not compared"),
    ],
)
def test_a_claim_needs_a_control(measured, steady, said):
    assert train_step.verdict(measured, steady) == said


@pytest.mark.long
def test_a_variant_that_fails_leaves_the_others(prepared, monkeypatch):
    train = train_step.Runner.train

    def failing(self, steps):
        if self.variant.name == "ours":
            raise torch.OutOfMemoryError("out of memory\nand so on")
        train(self, steps)

    monkeypatch.setattr(train_step.Runner, "train", failing)
    options = types.SimpleNamespace(tiny=True, rounds=1)
    model = json.loads((prepared / "prepared.json").read_text())["models"]["BERT-large"]
    bench = train_step.Bench(STEPS[0].tiny(), train_step.load(prepared, model), options, 1e18)
    found = bench.run()
    assert found["failed"] == {"ours": "OutOfMemoryError: out of memory"}
    assert list(found["seconds"]) == ["eager attention", "SDPA", "SDPA again"]
    assert found["largest"].keys() == {"SDPA"}


def test_liger_changes_no_other_variant(monkeypatch):
    def patch(model):
        model.patched = True
        modeling_llama.apply_rotary_pos_emb = patch

    stub = types.ModuleType("liger_kernel.transformers.monkey_patch")
    stub.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": patch}
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    plain = modeling_llama.apply_rotary_pos_emb
    step = next(s for s in STEPS if s.liger).tiny()
    state = step.build(modeling_llama, "sdpa").state_dict()
    variant = next(v for v in train_step.VARIANTS if v.liger)
    runner = train_step.Runner(step, variant, modeling_llama, state, "cpu")
    assert runner.model.patched
    assert modeling_llama.apply_rotary_pos_emb is plain
    with runner.patched():
        assert modeling_llama.apply_rotary_pos_emb is patch
    assert modeling_llama.apply_rotary_pos_emb is plain


def test_operations_are_those_of_the_models():
    found = {step.name: flops_per_token(step) / 1e9 for step in STEPS[:3]}
    wanted = {"BERT-large": 2.157, "GPT-2 medium": 2.272, "Llama-3.2-1B": 8.220}
    assert found == pytest.approx(wanted, abs=1e-3)


def test_figures_are_those_of_the_result_file():
    path = ROOT / "benchmark/results/train_step.json"
    text = train_step.table(json.loads(path.read_text())) if path.exists() else ""
    assert report.marked(train_step.NAME, text) in report.README.read_text()
