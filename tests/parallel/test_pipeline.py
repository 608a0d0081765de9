"""Stages run by their engines in real processes, against the original in one."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slapo_rewrite import cli
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.schedule.load import locate
from slapo_rewrite.verify.rank_layout import Layout, Training
from slapo_rewrite.verify.report import Report
from slapo_rewrite.verify.run import verify
from tests.marks import all_but, long
from tests.rewriting import imported

MODELS = Path(__file__).parents[1] / "models"
PLAIN, CLIPPED, ZERO = Training(), Training(clipping=0.2), Training(zero=1, clipping=0.2)
BF16 = Training(zero=1, clipping=0.2, bf16=True)


@dataclass(frozen=True)
class Case:
    """A model and its schedule.

    Attributes:
        name: The model's.
        source: Its file or module.
        schedule: The schedule's file or name, which has a small model to verify.
        cuts: Lines to end the schedule with, by the number of stages; else a knob makes them.
        settings: Knobs.
        shared: How two stages on two tensor-parallel ranks train.
        replicated: How two replicas of two stages train.
        unfit: A setting that the stages are not written for, and what is said of it.
    """

    name: str
    source: str
    schedule: str
    cuts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    shared: Training = PLAIN
    replicated: Training = PLAIN
    unfit: tuple[str, Any, str] | None = None

    def written(self, folder: Path, stages: int, *settings: str) -> Path:
        """An output of so many stages."""
        plan = folder / f"plan_{stages}.py"
        cuts = "".join(f"    {line}\n" for line in self.cuts.get(stages, ()))
        text = locate(self.schedule).read_text().replace("n_layer=3", "n_layer=4")
        plan.write_text(f"{text}{cuts}\n\nmodel = verify_model\n")
        knobs = [*self.settings, *settings, *([] if cuts else [f"pipeline_stages={stages}"])]
        out = folder / f"{self.name}_in_{stages}"
        write(out, rewrite(self.source, str(plan), knobs).files)
        return out


def bundled(family: str, **more: Any) -> Case:
    """A model of transformers with the schedule that ships with the tool."""
    return Case(family, f"transformers.models.{family}.modeling_{family}", family, **more)


SOURCE, SCHEDULE = str(MODELS / "gpt.py"), str(MODELS / "gpt_schedule.py")
GPT = Case("gpt", SOURCE, SCHEDULE, shared=ZERO, replicated=BF16)
CASES = [
    bundled(
        "bert", replicated=ZERO, unfit=("is_decoder", True, r"bert\.config\.is_decoder` is True")
    ),
    GPT,
    bundled("gpt2", shared=ZERO, replicated=BF16),
    bundled(
        "llama",
        settings=("ckpt_ratio=0.5",),
        shared=BF16,
        unfit=("tie_word_embeddings", True, r"ties other parameters.*lm_head\.weight"),
    ),
    bundled(
        "t5",
        cuts={
            4: (
                's["encoder.block"][0].cut_pipeline_stage()',
                's["encoder"].cut_pipeline_stage()',
                's["decoder.block"][0].cut_pipeline_stage()',
            ),
        },
        shared=CLIPPED,
        replicated=ZERO,
    ),
]


@pytest.fixture
def warm(monkeypatch):
    """DeepSpeed does not look for an accelerator."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def trained(out: Path, layout: Layout, training: Training = PLAIN) -> Report:
    report = verify(out, [layout], training=training)
    assert report.ok, report.render()
    return report


T5 = CASES[-1]


@pytest.mark.processes
@pytest.mark.parametrize("case", all_but([GPT], CASES), ids=lambda case: case.name)
@pytest.mark.usefixtures("warm")
def test_the_engine_trains_as_one_process_does(case, tmp_path):
    report = trained(case.written(tmp_path, 2), Layout(2))
    assert [row.name for row in report.rows] == [
        "starts as the whole model does",
        "loads the original's weights",
        "gives them back bit for bit",
        "copies alike",
        "loss in eval mode",
        "loss",
        "gradients complete",
        "gradients",
        "losses of steps 2 to 5",
        "weights after 5 steps",
        "copies alike after 5 steps",
    ]
    assert max(report.shares.values()) < 0.9


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("warm")
def test_so_it_does_on_several_axes_and_with_more_stages(case, tmp_path):
    two = case.written(tmp_path, 2)
    trained(two, Layout(2, tensor=2), case.shared)
    trained(two, Layout(2, data=2), case.replicated)
    trained(case.written(tmp_path, 4), Layout(4))


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_slices_of_the_sequence_on_all_axes_with_layers_checkpointed(tmp_path):
    out = GPT.written(tmp_path, 2, "sequence_parallel=true", "ckpt_ratio=0.5")
    trained(out, Layout(2, tensor=2, data=2), CLIPPED)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("case", "layout", "settings"),
    [
        (GPT, Layout(2, tensor=2, data=2), ["ckpt_ratio=0.5"]),
        long(bundled("gpt2"), Layout(4), []),
    ],
    ids=["gpt", "gpt2"],
)
def test_torch_schedules_train_as_one_process_does(case, layout, settings, tmp_path):
    trained(case.written(tmp_path, layout.pipe, "pipeline_engine=torch", *settings), layout)


def broken(out: Path, old: str, new: str) -> Report:
    """What verification says where `pipeline.py` has something else."""
    file = out / "pipeline.py"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    report = verify(out, [Layout(2)])
    file.write_text(text)
    assert not report.ok
    return report


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_what_is_wrong_is_seen_and_told(tmp_path):
    out = GPT.written(tmp_path, 2)
    lost = broken(out, "\n    shared=", "\n    shared=() and ").render()
    assert "copies alike after 5 steps (rank 0): transformer.wte.weight on rank 0 is not" in lost
    assert "of one parameter wrong in `gradients`, in model order:\n    first, last" in lost
    line = r'/plan_2\.py:\d+: s\["{transformer\.wte,lm_head}"\]\.shard\('
    assert re.search(re.escape(str(tmp_path)) + line, lost)
    loop = "        for block in self.transformer.h[2:]:\n"
    detached = broken(out, loop, f"        x = x.detach() + 0 * x\n{loop}")
    assert {row.name for row in detached.rows if not row.ok} >= {"gradients"}
    assert "right again: transformer.h.2.ln_1.weight" in detached.render()
    death = "        print('last words', flush=True)\n        import os\n        os._exit(3)\n"
    dead = broken(out, loop, f"{death}{loop}").render()
    assert "rank 1 at pipeline pp2 dies with exit status 3 during: the stages in eval" in dead
    assert "    last words\n" in dead


@pytest.mark.processes
def test_the_command_line_verifies_model_and_pipeline(tmp_path, capsys):
    out = GPT.written(tmp_path, 2)
    assert cli.main(["verify", str(out)]) == cli.DONE
    printed = capsys.readouterr().out.rstrip()
    words = "verified: rewritten equals original at world sizes 1, 2 and pipeline pp2"
    assert printed.endswith(words)
    verification = json.loads((out / "rewrite.json").read_text())["verification"]
    assert (verification["verdict"], verification["worlds"]) == ("equal", [1, 2, "pp2"])
    checks = [check for check in verification["checks"] if check["world"] == "pp2"]
    assert {"loss", "gradients", "weights after 5 steps"} <= {check["check"] for check in checks}
    assert verification["parameters_on_a_rank"]["pp2"] < 0.9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pp", "3"], "is cut into 2 stages, not 3"),
        (["--dp", "0"], "--dp is at least 1"),
        (["--tp", "2"], "--tp 2 does not fit: nothing in"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(arguments, words, tmp_path, capsys):
    out = GPT.written(tmp_path, 2, "tensor_parallel=false")
    assert cli.main(["verify", str(out), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_output_without_stages_has_no_layout(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [GPT.source, "--schedule", GPT.schedule, "-o", str(out)]
    assert cli.main([*arguments, "--pp", "2"]) == 2
    assert "`--pp` needs `--verify`" in capsys.readouterr().err
    assert cli.main([*arguments, "--verify", "--pp", "2"]) == 2
    assert f"`{out}` has no pipeline stages" in capsys.readouterr().err


@pytest.mark.parametrize("case", [c for c in CASES if c.unfit], ids=lambda case: case.name)
def test_a_model_that_the_stages_are_not_written_for_is_refused(case, tmp_path):
    out = case.written(tmp_path, 2)
    pipeline = imported(out / "pipeline.py")
    model = imported(tmp_path / "plan_2.py").model(imported(next(out.glob("modeling_*.py"))))
    with pytest.raises(ValueError, match="cut into 2 stages, not 7"):
        pipeline.build(model.config, num_stages=7)
    name, value, message = case.unfit
    other = copy.deepcopy(model.config)
    setattr(other, name, value)
    with pytest.raises(ValueError, match=message):
        pipeline.STAGES[0](other)
