"""Hooks, adapters and FSDP units that are added to modules which kernels replace."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.processes import run
from tests.rewriting import changed_lines, imported, rewritten, written

pytest.importorskip("triton")

SOURCE = """\
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = Conv1D(4 * width, width)
        self.second = Conv1D(width, 4 * width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(1e-30)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.dropout(self.second(self.act(self.first(x))))
        y = self.down(self.act(self.up(x)))
        return self.norm(x + self.dropout(y))
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Block(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.pow(3).mean()


def schedule(s):
    s.apply_all()
    s["up"].shard(["weight", "bias"], axis=0)
    s["down"].shard("weight", axis=1)
    s["first"].shard("weight", axis=1).shard("bias", axis=0)
    s["second"].shard("weight", axis=0)
    s.infer_sync()
"""
MODULES = ("first", "second", "up", "act", "down", "dropout", "norm")
HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "a hook": lambda module: module.register_forward_hook(lambda m, a, o: 2 * o),
    "a hook before": lambda module: module.register_forward_pre_hook(lambda m, a: (2 * a[0],)),
    "a hook behind": lambda module: module.register_full_backward_hook(
        lambda m, into, of: tuple(2 * g for g in into)
    ),
}


def lora(model: nn.Module) -> nn.Module:
    peft: Any = importlib.import_module("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["up", "down", "first"], init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def divided(model: Any) -> nn.Module:
    """Each layer is a unit of FSDP2 by itself, over the data parallel ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("first", "second", "up", "down", "norm"):
        fully_shard(getattr(model, name), mesh=mesh)
    whole: nn.Module = fully_shard(model, mesh=mesh)
    return whole


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.detach().requires_grad_()
    y = model(x)
    y.pow(3).mean().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
    return y, whole | {"x": x.grad}


def kernels_behind(y: Tensor) -> Iterator[str]:
    """The names of our functions in the graph of a result."""
    waiting, seen = [y.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
            if "FunctionBackward" in node.name():
                yield node.name()


def compared(source: Path, output: Path) -> None:
    torch.set_num_threads(1)
    original, ours = imported(source), imported(output)
    tp = importlib.import_module(f"{ours.__package__}.shards")
    loading = importlib.import_module(f"{ours.__package__}.loading")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def both(group: Any) -> tuple[Any, Any, Tensor]:
        tp.set_group(group)
        torch.manual_seed(0)
        one, other = original.Block(8), ours.Block(8)
        other.load_state_dict(one.state_dict())
        return one, other, torch.randn(2, 3, 8)

    def same(one: Any, other: Any, x: Tensor, note: str) -> Tensor:
        (wanted, wanted_gradients), (found, gradients) = step(one, x), step(other, x)
        of_input = gradients.pop("x")
        if tp.world_size() > 1:
            gradients = loading.to_full(other, gradients)
        says = f"{note} in a world of {tp.world_size()}: {{}}".format
        torch.testing.assert_close(
            (found, {**gradients, "x": of_input}),
            (wanted, wanted_gradients),
            rtol=1e-4,
            atol=1e-5,
            msg=says,
        )
        return found

    for group in (alone, None):
        y = same(*both(group), "nothing")
        assert len(list(kernels_behind(y))) == 4
        for what, put in HOOKS.items():
            # Alone, on all at once: rules/test_alike.py has each by itself.
            for names in [MODULES] if group is alone else [(name,) for name in MODULES]:
                one, other, x = both(group)
                for model in (one, other):
                    for name in names:
                        put(getattr(model, name))
                same(one, other, x, f"{what} on {names}")
    for change in (lora, divided):
        one, other, x = both(alone)
        same(change(one), change(other), x, change.__name__)


def interpreted(source: Path, output: Path) -> None:
    """Imports what takes long once, for both ranks."""
    for name in ("peft", "transformers.pytorch_utils"):
        importlib.import_module(name)
    run(compared, 2, source, output, start="fork")


@pytest.mark.long
@pytest.mark.processes
def test_what_is_put_on_later(tmp_path, monkeypatch):
    output = rewritten(tmp_path, SOURCE, SCHEDULE)
    text = changed_lines(output)
    assert text.count("linear_gelu(") == 2 and text.count("linear=self.") == 2
    assert text.count("dropout=self.dropout") == 2
    source = max(tmp_path.glob("source_*.py"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read where triton is imported
    given = (source, written(tmp_path, output))
    process = multiprocessing.get_context("spawn").Process(target=interpreted, args=given)
    process.start()
    process.join()
    assert process.exitcode == 0
