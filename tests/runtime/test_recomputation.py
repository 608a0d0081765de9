"""Buffers that a call leaves unchanged."""

import torch
from torch import nn

from slapo_rewrite.runtime.torch_pipeline import spare_buffers


def test_the_call_that_finds_out_sizes_counts_nothing():
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    mean, x = model[1].running_mean, torch.randn(5, 3)
    spare_buffers(model)
    model(1e6 * x).sum().backward()
    assert model[1].running_mean is mean and not mean.any()
    for each in (model, twin):
        each(x)
    for name, tensor in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


class Counting(nn.Module):
    """Says how often it was called."""

    steps = 0

    def forward(self, x):
        self.steps = self.steps + 1
        return x * self.steps


def test_the_call_that_finds_out_sizes_does_not_advance_counters():
    model, x = nn.Sequential(Counting(), nn.Linear(3, 4)), torch.randn(5, 3)
    model[0].steps = 2
    spare_buffers(model)
    model(x)
    assert model[0].steps == 2
    model(x)
    assert model[0].steps == 3
