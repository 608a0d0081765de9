"""Changes of split layers by other libraries are right at several ranks, or refused at once."""

import copy
import io
import tempfile
import warnings
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from slapo_rewrite.runtime import tensor_parallel as tp
from slapo_rewrite.runtime.conv1d import ColumnParallelConv1D
from slapo_rewrite.runtime.guards import BY_ELEMENT
from slapo_rewrite.runtime.loading import full_state_dict
from slapo_rewrite.runtime.replicated import ReplicatedLinear
from tests.processes import run


class Held(nn.Module):
    """A layer below others, as in a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(layer, nn.LayerNorm(6))


class LowRank(nn.Module):
    """What PEFT's LoRA does: the layer is kept, and a product of its input is added."""

    def __init__(self, layer: nn.Module, in_features: int, out_features: int) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Around(nn.Module):
    """What has no parameters of its own, as `torch.compile` puts around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def check_adapters():
    for layer in (
        tp.ColumnParallelLinear(6, 12),
        tp.RowParallelLinear(12, 6),
        ColumnParallelConv1D(12, 6),
        ReplicatedLinear(6, 6),  # of another rank's tokens
    ):
        model = Held(layer)
        model.inner[0] = Around(layer)
        model.inner[0] = layer
        model.inner[1] = LowRank(model.inner[1], 6, 6)  # a whole layer
        if tp.world_size() == 1:
            weight_norm(layer)
            model.inner[0] = LowRank(layer, 6, 6)
            continue
        with pytest.raises(RuntimeError, match="`0` of `Sequential` would work on this rank's"):
            model.inner[0] = LowRank(layer, 6, 6)
        assert model.inner[0] is layer
        if layer.sharded_parameters:
            with pytest.raises(RuntimeError, match=r"`weight_orig` of .* and pruning"):
                prune.l1_unstructured(layer, "weight", amount=0.5)
            said = pytest.raises(RuntimeError, match=r"`weight_g` of .* this rank's part")
            with said, pytest.warns(FutureWarning):
                nn.utils.weight_norm(copy.deepcopy(layer))
        with pytest.raises(RuntimeError, match="`parametrizations` of `Parametrized"):
            weight_norm(layer)


def check_replicas_of_different_parts():
    """DDP over the tensor-parallel ranks is refused before it copies; over others it is not."""
    model = Held(tp.RowParallelLinear(12, 6))
    before = copy.deepcopy(model.state_dict())
    if tp.world_size() > 1:
        with pytest.raises(RuntimeError, match="`DistributedDataParallel` would treat the tensor"):
            DistributedDataParallel(model)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        own = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        DistributedDataParallel(model, process_group=own[dist.get_rank()])
        DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="`FullyShardedDataParallel` would treat the tensor"):
            FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        with pytest.raises(RuntimeError, match="clip by the norm of this rank's parts: use `fully"):
            FullyShardedDataParallel(model, own[dist.get_rank()], device_id=torch.device("cpu"))


def check_checkpoints():
    """They keep one rank's tensor of each name; `torch.save` of a rank's parts is as ever."""
    model = Held(tp.ColumnParallelLinear(6, 12))
    with tempfile.TemporaryDirectory() as folder:
        states = {"model": model.state_dict()}, model.state_dict(), {"model": model}
        for state in states if tp.world_size() > 1 else ():
            with pytest.raises(checkpoint.CheckpointException, match="only this rank's part"):
                checkpoint.save(state, checkpoint_id=folder)
            with pytest.raises(RuntimeError, match=r"part of `inner\.0\.weight` would be written"):
                safetensors.torch.save_model(model, f"{folder}/parts.safetensors")
            checkpoint.save(full_state_dict(model), checkpoint_id=folder)
            safetensors.torch.save_file(full_state_dict(model), f"{folder}/all.safetensors")
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved)
    assert not any(vars(tensor) for tensor in loaded.values())
    for state in (loaded, model.state_dict(), copy.deepcopy(model.state_dict())):
        model.load_state_dict(state)
        model.load_state_dict(state, assign=True)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def check_batches():
    """The first batch of training, and of evaluation, is the same on every rank."""
    for layer in (tp.VocabParallelEmbedding(12, 6), tp.ColumnParallelEmbedding(12, 6)):
        for parameter in layer.parameters():
            nn.init.normal_(parameter, mean=tp.rank())
        ids = torch.arange(6)
        layer(ids)
        layer.eval()
        if tp.world_size() > 1:
            with pytest.raises(RuntimeError, match="the ranks look up different ids"):
                layer(ids.roll(tp.rank()))  # the same sum
            layer.train()
            with pytest.raises(RuntimeError, match="examples/trainer"):
                layer(ids[: 3 + tp.rank()])
        layer.train()
        layer(ids)


class PerRow(torch.optim.Optimizer):
    """Steps of one length for each row."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.data -= group["lr"] * nn.functional.normalize(each.grad, dim=-1)


JOINT = (torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS)
KINDS = (PerRow, *(kind for kind in BY_ELEMENT if kind is not torch.optim.SparseAdam))


def check_optimizers():
    """One that computes with all of a matrix is refused if it has parts; one that may, says so."""
    for layer in (tp.RowParallelLinear(12, 6), nn.Linear(12, 6)):
        has_parts = tp.world_size() > 1 and type(layer) is not nn.Linear
        for kind in KINDS:
            optimizer = kind([layer.weight], lr=1e-3)
            for number in range(2):
                layer.weight.grad = torch.ones_like(layer.weight)
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    optimizer.step(lambda: torch.zeros(()))
                names = [str(each.message).split("`")[1] for each in said]
                warned = has_parts and kind is PerRow and number == 0
                assert names == warned * [kind.__name__], (kind, names)
        for kind in JOINT if has_parts else ():
            with pytest.raises(RuntimeError, match=f"`{kind.__name__}` trains this .* Train split"):
                kind([layer.weight], lr=1e-3).step(lambda: torch.zeros(()))
    if tp.world_size() > 1:
        shared = ZeroRedundancyOptimizer(Held(layer).parameters(), torch.optim.SGD, lr=1.0)
        shared.step()
        layer = tp.RowParallelLinear(12, 6)
        shared = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, lr=1.0)
        before = layer.weight.detach().clone()
        with pytest.raises(RuntimeError, match="`ZeroRedundancyOptimizer` would treat the tensor"):
            shared.step()
        assert torch.equal(before, layer.weight)


def check_other_layers():
    """A layer may take a split one's place, but not with its weights, as a resized head does."""
    model = nn.Sequential(nn.ReLU(), tp.ColumnParallelLinear(6, 12))
    split = model[1]
    for other in (nn.Linear(6, 16), nn.Identity(), nn.Linear(3, 2), tp.ColumnParallelLinear(6, 8)):
        model[1], model[1] = other, split
    resized = nn.Linear(6, 16)
    with torch.no_grad():
        resized.weight[: len(split.weight)] = split.weight
    rounded = nn.Module()
    rounded.register_buffer("packed", torch.zeros(36, dtype=torch.int8))
    for other in (resized, rounded):
        if tp.world_size() == 1:
            model[1], model[1] = other, split
            continue
        with pytest.raises(RuntimeError, match="`1` would be made from this rank's part alone"):
            model[1] = other


def test_a_weight_is_read_once_a_call():
    """That of `spectral_norm` is another each time that it is read."""
    for layer in tp.ColumnParallelLinear(6, 12), tp.RowParallelLinear(6, 12):
        plain = nn.Linear(6, 12)
        plain.load_state_dict(layer.state_dict())
        for each in (layer, plain):
            torch.manual_seed(0)
            spectral_norm(each)
        x = torch.randn(2, 6)
        for _ in range(3):
            assert torch.equal(layer(x), plain(x))


def run_checks():
    check_adapters()
    check_replicas_of_different_parts()
    check_checkpoints()
    check_batches()
    check_optimizers()
    check_other_layers()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_clients(world):
    run(run_checks, world)
