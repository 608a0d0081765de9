"""The measures by which stages are balanced, on published models."""

from itertools import pairwise

import pytest

from slapo_rewrite.model.costs import costs_of, elements_of
from slapo_rewrite.model.small_model import training_inputs
from slapo_rewrite.project import Project
from slapo_rewrite.simulate.hardware import hardware, step_seconds
from tests.rewriting import refused, rewritten

SCHEDULE = """\
from rules.schedules.{name} import model


def schedule(s, by: str = "cost", stages: int = 2):
    s.cut_evenly(stages, by=by)
"""


@pytest.mark.long
@pytest.mark.parametrize(("name", "stages"), [("gpt2", 4), ("llama", 2)])
def test_no_cut_between_layers_is_faster_than_the_one_by_cost(name, stages, tmp_path):
    (tmp_path / "s.py").write_text(SCHEDULE.format(name=name))
    project = Project(f"transformers.models.{name}.modeling_{name}", str(tmp_path / "s.py"))
    model = project.tree.root.live
    inputs = training_inputs(project.schedule.module, model)
    paths = elements_of(model, inputs)
    seconds = step_seconds(costs_of(model, inputs, paths), hardware("h200").device)
    ends, dearest = {}, {}
    for by in ("cost", "layers", "parameters"):
        states = project.plan({"by": by, "stages": stages}).states
        ends[by] = [n for n, path in enumerate(paths, 1) if path in states and states[path].cut]
        assert len(ends[by]) == len(states) == stages - 1
        bounds = pairwise([0, *ends[by], len(paths)])
        dearest[by] = max(sum(seconds[start:end]) for start, end in bounds)
    assert dearest["cost"] < min(dearest["layers"], dearest["parameters"])
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


HEADLESS = """\
import torch
from torch import nn


class Stack(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {returned}
"""

STEP = """\
import torch


def model(m):
    return m.Stack(depth=4)


def inputs(model):
    return {"x": torch.randn(2, 8)}


def schedule(s):
    s.cut_evenly(5, by="cost")
"""


def test_without_a_head_there_are_as_many_stages_as_layers(tmp_path):
    source = HEADLESS.format(returned="x.mean()")
    assert "2 to 4 stages are possible" in refused(tmp_path, source, STEP, "SR206")


def test_a_model_that_needs_values_has_no_costs(tmp_path):
    source = HEADLESS.format(returned="x[x.nonzero()[0]].mean()")
    text = refused(tmp_path, source, STEP, "SR305")
    assert "cannot be counted" in text and 'by="parameters"' in text


TOWERS = """\
import torch
from torch import nn


class Stack(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.seen = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])
        self.first = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)]) for _ in range(2)])
        self.scales = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x, image=None):
        if image is not None:
            for layer in self.seen:
                x = x + layer(image)
        for scale, layers in zip(self.scales, self.first):
            x = scale(x)
            for layer in layers:
                x = layer(x)
        return x.sum()
"""


def test_layers_that_a_step_does_not_call_are_left_to_the_last_stage(tmp_path):
    output = rewritten(tmp_path, TOWERS, STEP + "def schedule(s):\n    s.cut_evenly(2)\n")
    text = output.files["pipeline.py"]
    assert "for scale, layers in zip(self.scales[:1], self.first[:1]):" in text
    assert "return self.first[:1], self.scales[:1]" in text
    assert "return self.first[1:], self.scales[1:], self.seen" in text


SHARED = HEADLESS.replace("for layer in self.layers:", "for layer in [*self.layers] * 3:")


def test_one_layer_that_is_called_several_times(tmp_path):
    schedule = STEP.replace("depth=4", "depth=1") + "def schedule(s):\n    s.cut_evenly(2)\n"
    text = refused(tmp_path, SHARED.format(returned="x.sum()"), schedule, "SR206")
    assert "`layers.0` is the only layer, called 3 times" in text
    assert "every stage would have to hold and tie its weights" in text
