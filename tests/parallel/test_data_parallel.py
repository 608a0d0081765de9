"""Data parallelism with tensor parallelism: two replicas of two ranks, by common trainers.

Every step is held against one process that trains the original on both replicas' batches: the loss,
the gradients, and the full state dict at the end.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from tests.models import gpt
from tests.processes import run

MODELS = Path(gpt.__file__).parent
CONFIG = gpt.GPTConfig(vocab_size=203, block_size=32, n_layer=2, n_head=4, n_embd=64)
STEPS, RATE, CLIPPED_TO = 3, 1e-2, 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the rewritten GPT lies, with its head's vocabulary in parts that are not even."""
    made: Path = tmp_path_factory.mktemp("outputs")
    schedule = str(MODELS / "gpt_schedule.py")
    files = rewrite(
        str(MODELS / "gpt.py"),
        schedule,
        ["ckpt_ratio=0.5"],
        further=["save_pretrained", "load_pretrained"],
    ).files
    write(made / "gpt_out", files)
    return made


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(203, (4, 17), generator=generator) for _ in range(STEPS)]


def loss_on(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:].contiguous())[1]
    return loss


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam that leaves gradients of rounding errors alone, which the bias of the keys gets."""
    return torch.optim.AdamW(model.parameters(), RATE, eps=1e-4)


class Reference:
    """The original, trained in one process on the whole of each batch."""

    def __init__(self, clipped: bool) -> None:
        torch.manual_seed(0)
        self.model = gpt.GPT(CONFIG)
        self.start = {n: t.clone() for n, t in self.model.state_dict().items()}
        self.losses, self.gradients = [], {}
        optimizer = adam(self.model)
        for tokens in batches():
            optimizer.zero_grad()
            loss = loss_on(self.model, tokens)
            loss.backward()
            if clipped:
                nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPED_TO)
            self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters()}
            optimizer.step()
            self.losses.append(loss.item())


def mine(mesh: DeviceMesh, tokens: torch.Tensor) -> torch.Tensor:
    """The half of a batch that this replica trains on."""
    return tokens.chunk(2)[mesh["data"].get_local_rank()]


def mean_loss(mesh: DeviceMesh, loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh["data"].get_group())
    return mean.item() / 2


def near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def with_torch(mesh: DeviceMesh, loading, model: nn.Module, trained: nn.Module) -> None:
    """Trains `trained`, which is `model` or holds it, with an optimizer of torch."""
    wanted, losses = Reference(clipped=False), []
    optimizer = adam(trained)
    for tokens in batches():
        optimizer.zero_grad()
        loss = loss_on(trained, mine(mesh, tokens))
        loss.backward()
        optimizer.step()
        losses.append(mean_loss(mesh, loss))
    torch.testing.assert_close(losses, wanted.losses, rtol=1e-4, atol=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    near(loading.to_full(model, gradients), wanted.gradients)
    near(loading.full_state_dict(model), wanted.model.state_dict())
    moments = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    full = loading.to_full(model, moments)
    assert all(full[n].shape == g.shape for n, g in wanted.gradients.items())


def by_ddp(mesh: DeviceMesh, loading, model: nn.Module) -> None:
    replicas = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    with_torch(mesh, loading, model, replicas)


def by_fsdp2(mesh: DeviceMesh, loading, model: nn.Module) -> None:
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    held = sum(p.to_local().numel() for p in model.parameters())
    with_torch(mesh, loading, model, model)
    with pytest.raises(checkpoint.CheckpointException, match="only this rank's part"):
        checkpoint.save(model.state_dict(), checkpoint_id=Path(sys.path[0]) / "parts")
    whole = sum(p.numel() for p in gpt.GPT(CONFIG).parameters())
    assert held < 0.3 * whole  # a quarter, and half of what is not split by tensor parallelism
    loading.save_pretrained(model, Path(sys.path[0]) / "saved")
    if dist.get_rank() == 0:
        original = gpt.GPT(CONFIG)
        loading.load_pretrained(original, Path(sys.path[0]) / "saved")
        near(original.state_dict(), Reference(clipped=False).model.state_dict())


class Topology:
    """What DeepSpeed asks for as `mpu`, answered by a device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        for role, dimension in (("data", "data"), ("model", "tensor")):
            part = mesh[dimension]
            setattr(self, f"get_{role}_parallel_group", part.get_group)
            setattr(self, f"get_{role}_parallel_rank", part.get_local_rank)
            setattr(self, f"get_{role}_parallel_world_size", part.size)


def by_zero_1(mesh: DeviceMesh, loading, model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports use what torch will take away
        import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes half a minute to build
    wanted, losses = Reference(clipped=True), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adam(model),
            mpu=Topology(mesh),
            config={
                "train_batch_size": 4,
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": CLIPPED_TO,
            },
        )
        for tokens in batches():
            loss = loss_on(engine, mine(mesh, tokens))
            engine.backward(loss)
            engine.step()
            losses.append(mean_loss(mesh, loss))
    torch.testing.assert_close(losses, wanted.losses, rtol=1e-4, atol=1e-5)
    near(loading.full_state_dict(engine.module), wanted.model.state_dict())


def train(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    module, loading, tensor_parallel = (
        importlib.import_module(f"gpt_out.{name}") for name in ("gpt", "loading", "tensor_parallel")
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel.set_group(mesh["tensor"].get_group())
    start = Reference(clipped=False).start
    for train_by in (by_ddp, by_fsdp2, by_zero_1):
        torch.manual_seed(0)  # ranks and replicas alike
        model = loading.build(lambda: module.GPT(CONFIG))
        full = loading.full_state_dict(model)
        assert all(torch.equal(full[name], tensor) for name, tensor in start.items())
        train_by(mesh, loading, model)


@pytest.mark.processes
def test_two_replicas_of_two_ranks(folder):
    run(train, 4, folder, timeout_s=240)
