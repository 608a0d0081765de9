"""Stages one after the other, each divided over ranks, against the original."""

import importlib
import sys

import pytest
import torch

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.model.small_model import shrunk, step_inputs
from slapo_rewrite.runtime.stages import has_place
from slapo_rewrite.schedule.load import ScheduleFile
from tests.marks import long
from tests.processes import run

pytestmark = pytest.mark.processes

CASES = {
    "bert": ("sequence_parallel=true",),
    "gpt2": ("sequence_parallel=true", "parallel_loss=false", "ckpt_ratio=0.5"),
    "llama": ("sequence_parallel=true",),
    "t5": (),
}


def chained(folder: str, names: tuple[str, ...]) -> list[tuple[float, float, dict[str, float]]]:
    """For each model: both losses, and how far the gradients are apart, relative to the largest."""
    sys.path.insert(0, folder)
    found = []
    for name in names:
        schedule = ScheduleFile.load(name).module
        original = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        pipeline = importlib.import_module(f"{name}_stages.pipeline")
        loading = importlib.import_module(f"{name}_stages.loading")
        torch.manual_seed(0)
        with torch.device("meta"):
            full = schedule.model(original)
        model = shrunk(full, None)
        inputs = step_inputs(schedule, model)
        expected = model(**inputs).loss
        expected.backward()
        wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

        stages = [stage(model.config) for stage in pipeline.STAGES]
        for stage in stages:
            weights = model.state_dict().items()
            stage.load_state_dict({n: t for n, t in weights if has_place(stage, n)})
        value, labels = pipeline.batch(**inputs)
        for stage in stages:
            value = stage(value)
        loss = stages[-1].step_loss(value, labels)
        loss.backward()
        had: dict[str, torch.Tensor] = {}
        for stage in stages:
            local = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
            for n, gradient in loading.to_full(stage, local).items():
                had[n] = had[n] + gradient if n in had else gradient
        assert had.keys() == wanted.keys()
        apart = {n: float((had[n] - g).abs().max() / wanted[n].abs().max()) for n, g in had.items()}
        found.append((loss.item(), expected.item(), {n: a for n, a in apart.items() if a > 1e-4}))
    return found


@pytest.mark.long
@pytest.mark.parametrize("names", [("llama",), long(("t5",)), long(("bert", "gpt2"))], ids="-".join)
def test_stages_over_ranks(names, tmp_path):
    for name in names:
        source = f"transformers.models.{name}.modeling_{name}"
        output = rewrite(source, name, ("pipeline_stages=2", *CASES[name]))
        write(tmp_path / f"{name}_stages", output.files)
    for results in run(chained, 2, str(tmp_path), names):
        for (loss, expected, apart), name in zip(results, names, strict=True):
            assert loss == pytest.approx(expected, abs=1e-4), name
            assert not apart, name
