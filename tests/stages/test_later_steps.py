"""Behaviour of stages that only a later step, eval mode or another process shows."""

import pytest
import torch

from slapo_rewrite.runtime.deepspeed_pipeline import with_all_gradients
from tests.rewriting import refused, rewritten

SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    factor = 1

    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.register_buffer("mean", torch.zeros(width))
        self.scale = 1.0
        self.last = nn.Linear(width, 1)
        # end of the constructor

    def forward(self, x, ids, y):
        {before}
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = layer(x)
        {after}
        return F.mse_loss(self.last(x), y)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {{"x": torch.randn(6, 8), "ids": torch.ones(6, 1).long(), "y": torch.randn(6, 1)}}


def schedule(s):
    s["layers"][1].cut_pipeline_stage(target={target!r})
"""
FAR = {
    "updated in the other stage": ("x = x - self.mean", "self.mean.add_(x.detach().mean(0))"),
    "set in the other stage": ("x = x - self.mean", "self.mean = x.detach().mean(0)"),
    "an attribute": ("x = x * self.scale", "self.scale = self.scale / 2"),
    "a norm of both": ("x = self.norm(x)", "x = self.norm(x)"),
    "labels in place": ("x = x + y.mul_(2)", "pass"),
}
AROUND = {
    "a hook": "self.register_forward_hook(lambda m, a, o: o if m.training else 2 * o)",
    "a hook for the whole": "self.register_forward_pre_hook(lambda m, a: print(m.mean + 1))",
}


def parts(before: str = "pass", after: str = "pass", end: str = "") -> str:
    text = SOURCE.format(before=before, after=after)
    return text.replace("# end of the constructor", end) if end else text


@pytest.mark.parametrize("target", ["deepspeed", "torch"])
@pytest.mark.parametrize("case", FAR)
def test_what_one_stage_changes_the_others_do_not_see(tmp_path, case, target):
    words = refused(tmp_path, parts(*FAR[case]), SCHEDULE.format(target=target), "SR310")
    assert "after a step" in words or "not compute what the model computes" in words


def test_buffers_that_two_stages_update(tmp_path):
    """Of which nothing shows in a loss."""
    counts = "self.mean.add_(1)"
    schedule = SCHEDULE.format(target="torch")
    words = refused(tmp_path, parts(counts, counts), schedule, "SR310")
    assert "`mean` is updated as the model runs, and stage 0 would not have all" in words


def test_a_stage_may_be_frozen(tmp_path):
    text = parts(end="self.first.requires_grad_(False)")
    schedule = SCHEDULE.format(target="torch").replace('s["layers"][1]', 's["first"]')
    rewritten(tmp_path, text, schedule)


@pytest.mark.parametrize("mode", ["self.training", "not self.training"])
def test_weights_that_one_stage_scales_for_the_others(tmp_path, mode):
    scale = f"if {mode}:\n            self.scaled()"
    scaled = (
        "    @torch.no_grad()\n    def scaled(self):\n        for layer in self.layers:\n"
        "            layer.weight.mul_(0.5)\n\n    def forward"
    )
    text = parts(scale).replace("    def forward", scaled)
    words = refused(tmp_path, text, SCHEDULE.format(target="torch"), "SR310")
    assert "after a step" in words or "not compute what the model computes" in words


@pytest.mark.parametrize(
    ("first", "layer"),
    [("nn.Linear(width, width)", "Normed(width)"), ("Hooked(width, width)", "nn.Linear(width, 8)")],
)
def test_buffers_of_layers_and_hooks_of_values_are_no_obstacle(tmp_path, first, layer):
    made = """\
class Normed(nn.BatchNorm1d):
    pass


class Hooked(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        if self.training:
            x.register_hook(lambda gradient: gradient / 2)
        return x


class Model"""
    text = parts().replace("class Model", made).replace("= nn.Linear(width, width)", f"= {first}")
    text = text.replace("nn.Linear(width, width) for", f"{layer} for")
    rewritten(tmp_path, text, SCHEDULE.format(target="torch"))


@pytest.mark.parametrize(
    "before", ["n = ids.add_(1)", "n = self.mean.new_ones(1) * ids.mul_(3)", "ids += 1"]
)
def test_arguments_are_each_stage_s_own(tmp_path, before):
    """Torch's stages get the original arguments; DeepSpeed's pass on the changed ones."""
    text, by_name = parts(before, "x = x * ids"), SCHEDULE.format(target="torch")
    rewritten(tmp_path, text, SCHEDULE.format(target="deepspeed"))
    if before == "ids += 1":  # a statement that each stage can do again
        rewritten(tmp_path, text, by_name)
    else:
        assert "not compute" in refused(tmp_path, text, by_name, "SR310")


@pytest.mark.parametrize("case", AROUND)
def test_what_stands_around_the_model_stands_around_each_stage(tmp_path, case):
    words = refused(tmp_path, parts(end=AROUND[case]), SCHEDULE.format(target="torch"), "SR310")
    assert "in eval mode after a step" in words or "the stages fail" in words


def test_what_a_model_sets_for_training_its_stages_set(tmp_path):
    train = (
        "    def train(self, mode=True):\n        self.factor = 2 if mode else 3\n"
        "        return super().train(mode)\n\n    def forward"
    )
    text = parts("x = x * self.factor", "x = x * self.factor").replace("    def forward", train)
    rewritten(tmp_path, text, SCHEDULE.format(target="torch"))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("z = self.last(x).exp()", "x = x + z\n        z.mul_(2)", "own backward pass fails"),
        ("x = x / (x - x)", "x = x * 1", "own loss or gradients are not finite here"),
        (
            "z = torch.fft.rfft(self.first(x))",
            "x = x + torch.fft.irfft(z)",
            "complex, so its gradient would not come back",
        ),
    ],
)
@pytest.mark.parametrize("target", ["deepspeed", "torch"])
def test_what_has_no_gradient_to_send_back(tmp_path, before, after, words, target):
    assert words in refused(tmp_path, parts(before, after), SCHEDULE.format(target=target), "SR310")


def test_what_a_stage_does_not_need_has_a_gradient_of_zeros():
    given = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True), torch.tensor([4])
    ((needed, idle, number),) = with_all_gradients(torch.nn.Identity(), (given,))
    (needed * idle.detach()[0] * number).sum().backward()
    assert given[0].grad.tolist() == [4, 4] and given[1].grad.tolist() == [0, 0, 0]
    assert with_all_gradients(torch.nn.Identity(), (given[0],)) is None
