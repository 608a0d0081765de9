"""How accurate is the time of a step that `slapo-rewrite plan` predicts?

    python -m benchmark.plan_time

Takes the training steps that `benchmark.train_step` timed on a GPU from its result file: the
original with torch's attention, and the bundled schedule with `fuse=true`, each at the batch that
all were timed at and at the largest that fits. Each is compared with the prediction from the GPU's
data sheet, without a GPU: the model's forward and backward pass, and an AdamW that reads and writes
two bytes of each parameter, gradient and moment.

Writes `benchmark/results/plan_time.json`.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmark import report, train_step
from benchmark.steps import STEPS, Step
from slapo_rewrite.bundle import rules_folder
from slapo_rewrite.model.folded_step import StepShape
from slapo_rewrite.plan.candidates import Predictor, Way
from slapo_rewrite.plan.rewritten_step import counted_rewrite
from slapo_rewrite.project import Project
from slapo_rewrite.simulate.hardware import hardware

NAME = "plan_time"
WAYS = {"SDPA": False, "ours": True}  # and whether it is fused
STATE = 14  # bytes of a parameter that AdamW touches: four read and three written, of two each
MODEL = """

def model(m):
    import transformers

    return m.{step.model}(transformers.{step.config}(**{step.sizes}, use_cache=False))


def inputs(model):
    import torch

    ids = torch.zeros(2, {step.tokens}, dtype=torch.long)
    return {{"input_ids": ids, "labels": ids[:, : {step.targets} or None].clone()}}
"""


def schedule_of(step: Step, folder: Path) -> str:
    """The bundled schedule, of the model that is timed."""
    text = (rules_folder() / "schedules" / f"{step.schedule}.py").read_text()
    path = folder / f"{step.schedule}_timed.py"
    path.write_text(text + MODEL.format(step=step))
    return str(path)


def predictor_of(step: Step, fused: bool, gpu: str, folder: Path) -> Predictor:
    """The predictor of a model's steps on one GPU."""
    settings = [f"fuse={fused}", "tensor_parallel=false"]
    project = Project(step.source, schedule_of(step, folder))
    counted = counted_rewrite(project, settings, [1], StepShape(None, torch.bfloat16, True))[1]
    assert not isinstance(counted, str), counted
    return Predictor((counted[0], None), hardware(gpu), "bf16", 1, lambda stages: ())


def predicted_seconds(predictor: Predictor, rows: int) -> float:
    """The predicted seconds of a step with this many rows."""
    (stage,) = predictor.stages(Way(rows=rows))
    parameters = sum(predictor.plain.names.values())
    update = STATE * parameters / predictor.hardware.device.bandwidth
    return stage.forward + stage.backward + update


def table(content: dict[str, Any]) -> str:
    """Milliseconds, in the README's Markdown."""
    rows = [
        [
            each["model"],
            each["way"],
            each["rows"],
            f"{each['measured'] * 1e3:.1f}",
            f"{each['predicted'] * 1e3:.1f}",
            f"{each['predicted'] / each['measured']:.2f}",
        ]
        for each in content["cases"]
    ]
    header = ["a step", "", "rows", "measured, ms", "predicted, ms", "predicted over measured"]
    return report.rendered(header, rows)


def main() -> None:
    timed = report.read(train_step.NAME)
    gpu = timed["machine"]["gpu"]["name"].split()[-1].lower()
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for step in STEPS:
            have = timed["steps"][step.name]
            for way, fused in WAYS.items():
                predictor = predictor_of(step, fused, gpu, Path(folder))
                largest = have["largest"][way]
                tokens = step.tokens + step.targets
                measured = {
                    step.batch: statistics.median(have["seconds"][way]),
                    largest["batch"]: largest["batch"] * tokens / largest["tokens_per_s"],
                }
                for rows, seconds in measured.items():
                    guess = predicted_seconds(predictor, rows)
                    cases.append({"model": step.name, "way": way, "rows": rows,
                                  "measured": seconds, "predicted": guess})  # fmt: skip
                    print(cases[-1], round(guess / seconds, 3), flush=True)
    content = {"versions": report.versions(("torch", "transformers")), "gpu": gpu, "cases": cases}
    report.write(NAME, content, table(content))


if __name__ == "__main__":
    main()
