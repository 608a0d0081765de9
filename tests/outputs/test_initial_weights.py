"""Slapo's deferred initialisation, on source: ranks get parts of one construction's weights."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from slapo_rewrite.emit.rewrite import rewrite
from tests.processes import run
from tests.rewriting import imported, written

SOURCE = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, init=None):
        super().__init__()
        self.linear1 = nn.Linear(20, 20)
        self.linear2 = nn.Linear(20, 40, bias=False)
        self.scale = nn.Parameter(torch.rand(40))
        self.register_buffer("positions", torch.arange(40), persistent=False)
        self.register_buffer("noise", torch.rand(40), persistent=False)
        with torch.no_grad():
            width = self.linear2(self.linear1(torch.zeros(1, 20))).shape[-1]
        self.head = nn.Linear(width, 20, bias=False)
        nn.init.orthogonal_(self.head.weight)
        self.tied = nn.Linear(20, 20)
        self.tied.weight = self.linear1.weight
        if init is not None:
            self.apply(init)

    def forward(self, data):
        out = self.linear2(self.linear1(data))
        return self.tied(self.head(out * self.scale + self.positions * self.noise))
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"data": torch.rand(10, 20)}


def schedule(s):
    s["linear1"].shard(["weight", "bias"], axis=0)
    s["linear1"].sync("bwd_post", "all_reduce")
    s["linear2"].shard("weight", axis=1)
    s["linear2"].sync("fwd_post", "all_reduce")
    s["tied"].shard(["weight", "bias"], axis=0)
    s["tied"].sync("bwd_post", "all_reduce")
    s["tied"].sync("fwd_post", "all_gather", axis=-1)
"""


def zero(module: nn.Module) -> None:
    """An initialisation of the user's own."""
    if isinstance(module, nn.Linear):
        module.weight.data.zero_()
        if module.bias is not None:
            module.bias.data.zero_()


def part(tensor: torch.Tensor, axis: int, rank: int, world: int) -> torch.Tensor:
    return tensor.chunk(world, axis)[rank]


def build_both(original: Path, output: Path) -> None:
    module = imported(output)
    package = module.__name__.rpartition(".")[0]
    loading = importlib.import_module(f"{package}.loading")
    parallel = importlib.import_module(f"{package}.tensor_parallel")
    deferred = importlib.import_module(f"{package}.deferred_init")
    world, rank = parallel.world_size(), parallel.rank()
    builders = (loading.build, deferred.build_deferred)
    for init, build in itertools.product((None, zero), builders):
        torch.manual_seed(1)
        whole = imported(original).Model(init)
        after = torch.rand(2)
        torch.manual_seed(1)
        model = build(lambda init=init: module.Model(init))
        assert torch.equal(torch.rand(2), after)
        assert torch.equal(model.linear1.weight, part(whole.linear1.weight, 0, rank, world))
        assert torch.equal(model.linear1.bias, part(whole.linear1.bias, 0, rank, world))
        assert torch.equal(model.linear2.weight, part(whole.linear2.weight, 1, rank, world))
        assert torch.equal(model.scale, whole.scale)
        assert torch.equal(model.positions, whole.positions)
        assert torch.equal(model.noise, whole.noise)
        assert model.tied.weight is model.linear1.weight
        full = loading.full_state_dict(model)
        assert all(torch.equal(full[name], t) for name, t in whole.state_dict().items())
        if init is zero:
            assert not model.linear1.weight.any() and not model.linear2.weight.any()
        data = torch.rand(3, 20)
        torch.testing.assert_close(model(data), whole(data))


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(n, marks=pytest.mark.processes) for n in (2, 4))]
)
def test_parts_of_one_initialisation(tmp_path, world):
    source, schedule = tmp_path / "source_0.py", tmp_path / "s.py"
    source.write_text(SOURCE)
    schedule.write_text(SCHEDULE)
    output = rewrite(str(source), str(schedule), further=["build_deferred"])
    run(build_both, world, source, written(tmp_path, output))
