"""Ranks that train their copies of a parameter differently get an error by the fourth batch."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_ as clip_by_torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slapo_rewrite.runtime import loading, shards
from slapo_rewrite.runtime.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    clip_grad_norm_,
)
from tests.processes import run

STEPS = 5


def make() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(6), ColumnParallelLinear(6, 10), nn.ReLU(), RowParallelLinear(10, 6)
    )


def train(model: Any, clip: Callable[[nn.Module], None], skipped: int = STEPS) -> None:
    """A few steps; the optimizer leaves one out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model(torch.randn(8, 6, dtype=next(model.parameters()).dtype)).square().sum().backward()
        clip(model)
        if step != skipped:
            optimizer.step()
        optimizer.zero_grad()


def by_torch(model: nn.Module) -> None:
    clip_by_torch(model.parameters(), 1.0)


def by_the_whole(model: nn.Module) -> None:
    clip_grad_norm_(model, 1.0)


def rounded(model: nn.Module) -> None:
    """A gradient that is zero but for rounding, which another order makes another."""
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.fill_(1e-9 * (1 + shards.rank()))


def not_at_all(model: nn.Module) -> None:
    pass


def check_what_trains_alike(clip: Callable[[nn.Module], None]) -> None:
    warnings.simplefilter("error")
    torch.manual_seed(0)
    model = loading.build(make)
    train(model, clip)
    other = copy.deepcopy(model)
    train(other, clip)
    assert hasattr(other[1].weight, "model_parallel")  # as DeepSpeed asks it for its norm
    train(model.double(), clip)


def check_recomputed_layers() -> None:
    model = loading.build(make)
    keeps = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    for _ in range(STEPS):
        x = torch.ones(8, 6, requires_grad=True)
        checkpoint(model, x, use_reentrant=False, context_fn=keeps).sum().backward()


def check_what_does_not(clip: Callable[[nn.Module], None], skipped: int, with_fsdp: bool) -> None:
    torch.manual_seed(0)
    if with_fsdp:
        sizes = dist.get_world_size() // 2, 2
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        shards.set_group(mesh["tensor"].get_group())
    model = loading.build(make)
    if with_fsdp:
        fully_shard(model, mesh=mesh["data"])
    with pytest.raises(RuntimeError, match=r"differently: .* with `tensor_parallel.clip"):
        train(model, clip, skipped if shards.rank() == 0 else STEPS)


def check_other_batches() -> None:
    torch.manual_seed(0)
    model = loading.build(make)
    torch.manual_seed(shards.rank())
    with pytest.warns(UserWarning, match=r"gradients of 1 replicated parameters .* the same batch"):
        train(model, not_at_all)


def check_copies_of_their_own(changed: str) -> None:
    torch.manual_seed(0)
    model: Any = loading.build(make)
    torch.manual_seed(shards.rank())
    if changed == "copy":
        nn.init.normal_(model[0].weight)
    else:  # a model of the ranks' own, which nothing is loaded into
        model = make()
    with pytest.raises(RuntimeError, match=r"had different values .* `loading\.build`"):
        train(model, by_the_whole)


def check_loaded_state(of_one: bool) -> None:
    """The optimizer's state that each rank saved, or that of the first, goes on."""
    torch.manual_seed(0)
    model = loading.build(make)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(8, 6)).sum().backward()
        optimizer.step()
    saved = [optimizer.state_dict()]
    if of_one:
        dist.broadcast_object_list(saved, 0)
    optimizer.load_state_dict(saved[0])
    refused = pytest.raises(RuntimeError, match=r"one rank's optimizer state: save a file")
    with refused if of_one else contextlib.nullcontext():
        for _ in range(STEPS):
            model(torch.ones(8, 6)).sum().backward()
            optimizer.step()


@pytest.mark.processes
@pytest.mark.parametrize("of_one", [False, True])
def test_the_state_of_one_ranks_optimizer_is_refused(of_one: bool) -> None:
    """Moments of other parts fit where all are of one size."""
    run(check_loaded_state, 2, of_one)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "clip"), [(2, by_the_whole), (2, not_at_all), (2, rounded), (4, by_the_whole)]
)
def test_what_trains_as_in_one_process_is_not_refused(
    world: int, clip: Callable[[nn.Module], None]
) -> None:
    run(check_what_trains_alike, world, clip)


@pytest.mark.processes
def test_nothing_is_compared_as_layers_are_computed_again() -> None:
    """Selective checkpointing would find operations that it has not seen before."""
    run(check_recomputed_layers, 2)


@pytest.mark.processes
@pytest.mark.parametrize(("clip", "skipped"), [(by_torch, STEPS), (not_at_all, 0)])
def test_ranks_that_train_copies_otherwise_are_refused(
    clip: Callable[[nn.Module], None], skipped: int
) -> None:
    run(check_what_does_not, 2, clip, skipped, False)


@pytest.mark.processes
def test_so_they_are_beside_fsdp2() -> None:
    run(check_what_does_not, 4, by_torch, STEPS, True)


@pytest.mark.processes
def test_batches_of_their_own_are_told_of() -> None:
    run(check_other_batches, 2)


@pytest.mark.processes
@pytest.mark.parametrize("changed", ["copy", "model"])
def test_copies_that_differ_from_the_beginning_are_refused(changed: str) -> None:
    run(check_copies_of_their_own, 2, changed)
