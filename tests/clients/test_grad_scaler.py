"""Torch's scaler for sharded gradients makes all ranks see an overflow in one rank's part."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from slapo_rewrite.runtime import loading, shards
from slapo_rewrite.runtime.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    clip_grad_norm_,
)
from tests.processes import run

OVERFLOWS = 1  # the step in which a gradient does


def make() -> nn.Module:
    return nn.Sequential(ColumnParallelLinear(6, 10), nn.ReLU(), RowParallelLinear(10, 6))


def train(model: nn.Module, scaler: GradScaler, batches: torch.Tensor, last: bool) -> list[float]:
    """A few steps; `last` is whether a rank holds the row of the gradient that overflows.

    Returns:
        The scale after each step.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scales = []
    for step, batch in enumerate(batches):
        scaler.scale(model(batch).square().mean()).backward()
        gradient = model[0].weight.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if step == OVERFLOWS and last:
            local[-1, 0] = float("inf")
        scaler.unscale_(optimizer)
        clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def check(replicas: int, kind: type[GradScaler]) -> None:
    torch.manual_seed(0)
    batches = torch.randn(4, 8, 6)
    sizes = replicas, dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
    shards.set_group(mesh["tensor"].get_group())
    torch.manual_seed(1)
    with shards.world_of(1):
        whole = make()
        scales = train(whole, GradScaler("cpu", init_scale=1024.0), batches, True)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    torch.manual_seed(1)
    model = loading.build(make)
    data = mesh["data"].get_local_rank()
    if replicas > 1:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["data"])
    last = shards.rank() == shards.world_size() - 1 and data == replicas - 1
    own = batches.chunk(replicas, 1)[data]
    scaler = kind("cpu", init_scale=1024.0)
    if kind is ShardedGradScaler:
        assert train(model, scaler, own, last) == scales
        state = loading.full_state_dict(model)
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
    else:  # what it is for: by torch's own one, one rank steps and the other not
        with pytest.raises(RuntimeError) as refused:  # a group that steps loses its replicas
            train(model, scaler, own, last)
        if data == replicas - 1:
            assert re.search("parameters differently: .* ShardedGradScaler", str(refused.value))


@pytest.mark.processes
@pytest.mark.parametrize("kind", [ShardedGradScaler, GradScaler])
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 2)])
def test_all_ranks_skip_a_step_together(world, replicas, kind):
    run(check, world, replicas, kind)
