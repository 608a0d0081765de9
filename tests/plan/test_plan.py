"""`slapo-rewrite plan`: its predictions, its refusals, and its files."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmark.plan_memory import ALONE, SPLIT, ZERO, Case, measured, predicted
from slapo_rewrite import errors
from slapo_rewrite.cli import main
from slapo_rewrite.model.folded_step import StepShape
from slapo_rewrite.plan import planning
from slapo_rewrite.plan.rewritten_step import counted_rewrite
from slapo_rewrite.project import Project
from slapo_rewrite.simulate.hardware import Link, hardware, known_gpus, own_hardware
from slapo_rewrite.simulate.pipeline import Stage, live_micro_batches, pipelined_seconds, simulate
from slapo_rewrite.simulate.step_memory import Unfolded
from tests.marks import long, release
from tests.plan.small_models import source_of, written_schedule

ROWS, TOKENS = 4, 64
NUMBERS = """\
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)
"""
NUMBERS_SCHEDULE = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.randn(2, 4)}


def loss(outputs):
    return outputs.sum()


def schedule(s):
    pass
"""
ARGUMENTS = ["--gpus", "8", "--gpu", "a100", "--batch", "64", "--sequence", "64"]


@pytest.fixture(scope="module", autouse=True)
def counted_once():
    """What a step takes does not hang on the machine or the batch, and is counted once."""
    known = {}
    count = planning.counted_in_processes

    def key(wanted, settings, sizes):
        on_cpu = wanted.hardware.name == "cpu"
        text = Path(wanted.schedule).read_text()
        return str((text, wanted.sequence, wanted.precision, on_cpu, settings, sizes))

    def counted(jobs):
        new = [job for job in jobs if key(*job) not in known]
        if new:
            known.update(zip((key(*job) for job in new), count(new), strict=True))
        return [known[key(*job)] for job in jobs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "counted_in_processes", counted)
        yield


def planned(tmp_path, *more, name="gpt2"):
    schedule = written_schedule(name, tmp_path)
    return main(["plan", source_of(name), "--schedule", schedule, *ARGUMENTS, *map(str, more)])


@pytest.mark.parametrize(
    "case",
    [
        long(Case("bert", ALONE, 1.0, False, 1)),
        release(Case("t5", ALONE, 0.5, True, 2)),
        pytest.param(Case("llama", SPLIT, 0.5, True, 1), marks=pytest.mark.processes),
        long(Case("gpt2", ZERO, 0.0, False, 2)),
    ],
    ids=lambda case: f"{case.model} {case.way}",
)
def test_the_memory_of_a_step_is_what_torch_counts_in_a_real_one(tmp_path, case):
    """`python -m benchmark.plan_memory` does so for all of them."""
    schedule = written_schedule(case.model, tmp_path)
    assert predicted(case, schedule, {}) == pytest.approx(measured(case, schedule), rel=0.05)


def test_what_is_counted_of_a_rewrite_does_not_hang_on_those_before(tmp_path):
    schedule, shape = written_schedule("gpt2", tmp_path), StepShape(TOKENS, torch.bfloat16, True)
    project = Project(source_of("gpt2"), schedule)
    counted = lambda of, fuse: str(counted_rewrite(of, [f"fuse={fuse}"], [1], shape))  # noqa: E731
    fused, plain = counted(project, True), counted(project, False)
    assert fused != plain == counted(Project(source_of("gpt2"), schedule), False)


@pytest.mark.parametrize("name, share", [("llama", 0.8), ("bert", 0.95)])
def test_fused_kernels_are_counted_as_on_a_gpu(tmp_path, name, share):
    file = written_schedule(name, tmp_path)
    # Kernels that draw nothing, and are given another tensor in the seed's place.
    text = (
        Path(file)
        .read_text()
        .replace("(vocab_size=2000", "(vocab_size=2000, hidden_dropout_prob=0.0")
    )
    Path(file).write_text(text)
    found = []
    for fused in (False, True):
        said = [f"fuse={fused}", "tensor_parallel=false"]
        shape = StepShape(TOKENS, torch.bfloat16, is_gpu=True)
        project = Project(source_of(name), file)
        plain, _ = counted_rewrite(project, said, [1], shape)[1]
        parts = [*plain.profile.forward.values(), *plain.profile.backward.values()]
        products = [amount.of(ROWS) for part in parts for amount in part.products.values()]
        found.append([sum(p.moved.of(ROWS) for p in parts), sum(products)])
    (moved, flops), (less, as_many) = found
    assert less < share * moved and as_many == flops


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_the_formula_of_a_pipeline_is_what_its_simulation_comes_to(stages, latency):
    draw = random.Random(stages)
    made = [Stage(draw.uniform(0.8, 1.2), draw.uniform(1.8, 2.2)) for _ in range(stages)]
    for micro_batches in (1, stages, 4 * stages):
        link = Link(latency)
        step = simulate(made, micro_batches, pipeline=link)
        formula = pipelined_seconds(made, micro_batches, link)
        # Where stages differ, the fast ones make up for some of what they wait at the ends.
        assert 0.999 < formula / step.seconds < (1.05 if micro_batches > stages else 1.12)
        live = [live_micro_batches(n, stages, micro_batches) for n in range(stages)]
        assert live == [timeline.live for timeline in step.stages]


def test_a_plan_says_what_it_found_and_assumed(tmp_path, capsys):
    assert planned(tmp_path, "--plot", tmp_path / "plan.svg", "-o", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "NVIDIA A100" in said and "assumed:" in said and "times as long" in said
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    out = tmp_path / "out"
    best = json.loads((out / "plan.json").read_text())["plans"][0]
    configuration = json.loads((out / "deepspeed.json").read_text())
    assert configuration["train_micro_batch_size_per_gpu"] == best["rows"]
    assert configuration["zero_optimization"]["stage"] == best["zero"]
    record = json.loads((out / "rewritten" / "rewrite.json").read_text())
    assert f"ckpt_ratio={best['recomputed']:g}" in best["settings"]
    assert record["knobs"]["ckpt_ratio"] == best["recomputed"]
    launcher = tmp_path / "torchrun"  # by which the script is started from another folder
    launcher.write_text('#!/bin/sh\necho "$@"\n')
    launcher.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = subprocess.check_output([out / "launch.sh", "my.py"], cwd="/", env=path, text=True)
    configured = f"--deepspeed_config {out / 'deepspeed.json'}"
    assert told == f"--nproc-per-node 8 my.py {configured}\n"


def test_what_a_step_is_spent_on_is_all_of_it(tmp_path, capsys):
    """The bubble of all ranks stood beside the work of the slowest: 154% in all."""
    fixed = ["--set", "pipeline_stages=2", "--set", "tensor_parallel=false"]
    assert planned(tmp_path, *fixed, "--json") == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert any(each["bubble"] > each["shares"]["bubble"] + 0.01 for each in plans)
    assert [sum(each["shares"].values()) for each in plans] == pytest.approx(
        [1.0] * len(plans), 1e-2
    )


@pytest.mark.long
def test_a_rewrite_that_is_refused_is_left_out_and_said(tmp_path, capsys):
    file = Path(written_schedule("gpt2", tmp_path))
    text = file.read_text()
    named = text.replace("if fuse:", 'if fuse:\n        s["transformer.h.99"].checkpoint()', 1)
    assert named != text
    file.write_text(named)
    arguments = ["plan", source_of("gpt2"), "--schedule", str(file), *ARGUMENTS]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "with fusion: refused, " in said and "with fusion and sequence parallelism: " in said
    assert "fused" not in said.partition("assumed:")[0]
    assert main([*arguments, "--set", "fuse=true"]) == 2
    assert "transformer.h.99" in capsys.readouterr().err


def test_less_memory_is_bought_with_time(tmp_path, capsys):
    found = []
    for size in ("4GiB", "40MiB"):
        assert planned(tmp_path, "--memory", size, "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        assert all(each["memory_bytes"] <= plan["memory_bytes"] for each in plan["plans"])
        found.append(plan["plans"][0])
    assert found[0]["seconds"] < found[1]["seconds"]
    assert found[0]["memory_bytes"] > found[1]["memory_bytes"]


@pytest.mark.parametrize(
    "more, said",
    [
        (["--gpu", "h1000"], "there is no GPU `h1000`"),
        (["--gpu", "none.toml"], "cannot read `none.toml`"),
        (["--memory", "lots"], "`--memory lots` is not a size"),
        (["--memory", "80"], "a number without a unit is in bytes"),
        (["--memory", "1MiB"], "nothing fits 8 x 1.00 MiB: the smallest"),
        (["--batch", "3"], "a batch of 3 cannot be divided over 8 GPUs"),
        (["--gpus", "0"], "--gpus is at least 1"),
        (["--gpus", "12"], "12 GPUs are not whole nodes of 8"),
        (["-o", __file__], "test_plan.py` is a file, but has to be a folder"),
        (["--sequence", "4096"], "4096 tokens a row does not run without values, in bf16"),
        (["--plot", "plan.txt"], "`--plot` writes .png or .svg"),
        (["--gpu", "v100", "--precision", "tf32"], "V100 SXM2 32GB computes nothing in tf32"),
        (["--set", "layers=2"], "the schedule has no knob `layers`"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_words(tmp_path, capsys, more, said):
    fixed = ["--set", "tensor_parallel=false", "--set", "pipeline_stages=1"]
    assert planned(tmp_path, *fixed, *more) == 2
    assert said in capsys.readouterr().err


def test_products_in_float32_are_as_fast_as_a_gpu_has_them(tmp_path, capsys):
    plain = ["--set", "fuse=false", "--set", "sequence_parallel=false", "--set", "ckpt_ratio=0"]
    plain += ["--set", "pipeline_stages=1", "--set", "tensor_parallel=false", "--json"]
    plain += ["--batch", "512"]
    compute = []
    for precision in ("fp32", "tf32"):
        assert planned(tmp_path, *plain, "--precision", precision) == 0
        plan = json.loads(capsys.readouterr().out)
        assert (plan["precision"], plan["products"]) == ("fp32", precision)
        assert f"Tflop/s ({precision})" in plan["assumptions"][0]
        assert ("set_float32" in "".join(plan["assumptions"])) == (precision == "tf32")
        most = max(plan["plans"], key=lambda each: each["rows"])
        compute.append(most["shares"]["compute"] * most["seconds"] * 64 / most["rows"])
    assert compute[0] / compute[1] == pytest.approx(156 / 19.5, rel=2e-2)


@pytest.mark.long
def test_this_machine_can_be_measured(tmp_path, capsys):
    plain = ["--set", "fuse=false", "--set", "sequence_parallel=false"]
    assert planned(tmp_path, *plain, "--gpu", "measure", "--gpus", "2") == 0
    said = capsys.readouterr().out
    assert "measured on this machine" in said and "send each other" in said


def test_every_gpu_of_the_table_says_where_its_figures_are_from():
    for name in known_gpus():
        gpu = hardware(name)
        assert "data sheet" in gpu.said[0] and gpu.memory > 2**34
        assert gpu.inside.bandwidth > gpu.outside.bandwidth


OWN = """\
[gpus.mine]
title = "A card of ours"
flops = 100e12
bandwidth = 1e12
memory = 48e9
link = 30e9
precision = "bf16"

[network]
bandwidth = 12.5e9
"""


def test_a_table_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    own, theirs = own_hardware(path), hardware("h100")
    assert (own.title, own.memory, own.device.flops) == ("A card of ours", 48e9, 0.7 * 100e12)
    assert own.outside == Link(theirs.outside.latency, 0.67 * 12.5e9)
    assert own.inside.latency == theirs.inside.latency
    assert str(path) in own.said[0] and "100 Gb/s" in own.said[1]
    with pytest.raises(errors.UsageError, match="computes nothing in tf32"):
        own_hardware(path, "tf32")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[gpus.mine]", "[gpus.mine", "is not TOML: .* line 1"),
        ("[gpus.mine]", "[gpu.mine]", r"has to have one table \[gpus.NAME\]"),
        ("[network]", "[gpus.other]", r"has to have one table \[gpus.NAME\]"),
        ("flops", "flop", r"\[gpus.mine\] has `flop`"),
        ("memory = 48e9\n", "", r"\[gpus.mine\] has no `memory`"),
        ("48e9", '"48GB"', "`memory` of .* is not a number above 0"),
        ("= 12.5e9", "= nan", r"`bandwidth` of \[network\] is not a number above 0"),
        ("[network]", "[net]", r"has \[net\]"),
        ('"bf16"', '"fp8"', "`precision` of .* is `fp8`"),
        ('"A card of ours"', "7", "`title` of .* is not a text"),
    ],
)
def test_tables_that_are_none(old, new, said, tmp_path):
    path = tmp_path / "mine.toml"
    assert OWN.count(old) == 1
    path.write_text(OWN.replace(old, new))
    with pytest.raises(errors.BadHardware, match=said):
        own_hardware(path)


def test_stages_that_are_fixed_are_the_plans_and_what_is_launched_says_which_rank_is_what(
    tmp_path, capsys
):
    plain = ["--set", "fuse=false", "--set", "sequence_parallel=false", "--set", "ckpt_ratio=0"]
    out = tmp_path / "out"
    assert planned(tmp_path, *plain, "--set", "pipeline_stages=2", "--json", "-o", out) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told.pop("exit"), told.pop("reason")) == (0, "done")
    assert told == json.loads((out / "plan.json").read_text())
    assert {each["pipeline"] for each in told["plans"]} == {2}
    script = (out / "launch.sh").read_text()
    assert "pipeline.build(..., topology=topology)" in script and "num_pp=2" in script
    assert " 0.000 s" not in script
    assert planned(tmp_path, *plain, "--set", "pipeline_stages=1", "-o", out) == 0
    ways = [line.rpartition("(")[2] for line in capsys.readouterr().out.splitlines()
            if "times as long" in line]  # fmt: skip
    assert len(ways) == len(set(ways)), ways
    assert "initialize(..., mpu=grid)" in (out / "launch.sh").read_text()


def test_stages_that_do_not_divide_the_gpus_are_named(tmp_path, capsys):
    plain = ["--set", "fuse=false", "--set", "sequence_parallel=false", "--set", "ckpt_ratio=0"]
    assert planned(tmp_path, *plain, "--set", "pipeline_stages=3") == 2
    assert "with pipeline_stages=3" in capsys.readouterr().err


def test_layers_that_the_configuration_counts_are_all_counted(tmp_path):
    """Where two of five are left, there is no third one."""
    layers = NUMBERS.replace(
        "nn.Linear(4, 4)", "nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])"
    )
    ways = (
        "for layer in self.linear:\n            x = layer(x)\n        return x",
        "for i in range(5):\n            x = self.linear[i](x)\n        return x",
        "a, b, c, d, e = self.linear\n        return e(d(c(b(a(x)))))",
    )
    found = []
    for way in ways:
        (tmp_path / "net.py").write_text(layers.replace("return self.linear(x)", way))
        (tmp_path / "s.py").write_text(NUMBERS_SCHEDULE)
        project = Project(str(tmp_path / "net.py"), str(tmp_path / "s.py"))
        both = counted_rewrite(project, [], [1], StepShape(None, torch.float32, is_gpu=True))[1]
        pieces = Unfolded(*both).pieces(0.0)
        found.append([[piece.forward.products, piece.forward.net] for piece in pieces])
    assert found[0] == found[1] == found[2] and len(found[0]) > 5


def test_tokens_of_a_model_that_takes_none_are_refused(tmp_path):
    (tmp_path / "net.py").write_text(NUMBERS)
    (tmp_path / "s.py").write_text(NUMBERS_SCHEDULE)
    project = Project(str(tmp_path / "net.py"), str(tmp_path / "s.py"))
    shape = StepShape(TOKENS, torch.float32, is_gpu=True)
    with pytest.raises(errors.UsageError, match=r"`--sequence 64` cannot be used"):
        counted_rewrite(project, [], [1], shape)


@pytest.mark.parametrize("text", ["1KiB", "1024B", "1024", "1.024kB"])
def test_sizes_of_memory_have_the_units_that_people_write(text):
    assert planning.memory_size(text) == 1024


def test_short_steps_wait_for_the_host(tmp_path, capsys):
    """What is started takes as long on any GPU, so that a faster one is no faster."""
    found = []
    for gpu in ("h100", "b200"):
        assert planned(tmp_path, "--gpu", gpu, "--batch", "8", "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["plans"][0])
    assert all(each["bound_by"] == "the host" for each in found)
    assert found[0]["seconds"] == pytest.approx(found[1]["seconds"], rel=0.2)


@pytest.mark.long
def test_products_that_the_schedule_has_in_half_precision_are_as_fast_as_these(tmp_path, capsys):
    """And those in single precision as slow, whatever is trained in."""
    seconds = {}
    for precision, dtype in (("fp32", ""), ("fp32", "bfloat16"), ("bf16", "")):
        given = ["--precision", precision, "--set", f"autocast={dtype}", "--batch", "512"]
        assert planned(tmp_path, *given, "--set", "fuse=false", "--json", name="bert") == 0
        best = json.loads(capsys.readouterr().out)["plans"][0]
        seconds[precision, dtype] = best["shares"]["compute"] * best["seconds"]
    assert seconds["fp32", "bfloat16"] < seconds["fp32", ""] / 4
    assert seconds["fp32", "bfloat16"] == pytest.approx(seconds["bf16", ""], rel=0.5)


def test_a_process_that_goes_on_from_one_with_several_threads_does_not_wait_for_them():
    program = """
import torch
from slapo_rewrite.emit.one_rank import forked
torch.set_num_threads(2)
work = lambda: [len(torch.ones(10**7).sin())]
found = work()
print([*forked(work)] == found)
"""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, env=own, check=True)
    assert said.stdout == "True\n"
