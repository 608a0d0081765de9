"""torch.distributed.checkpoint of a model and its optimizer, at one world size and at another."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, LlamaConfig

from slapo_rewrite.emit.write import write
from tests.marks import long
from tests.processes import run

# In a world of one there is no group, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NONE = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 = {"n_embd": 20, "n_layer": 2, "n_head": 4, "vocab_size": 105, "n_positions": 32, **NONE}
LLAMA = {"hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 2, "vocab_size": 105}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
# Packed queries, keys and values; key/value heads that several ranks hold; parts that are uneven
# otherwise than torch divides, 105 in 27, 26, 26 and 26.
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2Config(**GPT2), 1e-5),
    "llama": ("LlamaForCausalLM", LlamaConfig(**LLAMA), 1e-4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, made) -> Path:
    path = tmp_path_factory.mktemp("distributed_checkpoint")
    for name in MODELS:
        source = f"transformers.models.{name}.modeling_{name}"
        write(path / f"{name}_stored", made(source, name, [], "sharded_state").files)
    return path


def load(folder: Path, name: str, file: str) -> Any:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{name}_stored.{file}")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    for step in range(first, first + 3):
        ids = torch.randint(105, (2, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module, rate: float = 1e-2) -> torch.optim.Optimizer:
    """Adam that leaves gradients of rounding errors alone, and trains two groups."""
    norms = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": norms, "lr": rate / 2}, {"params": others}]
    return torch.optim.AdamW(groups, rate, eps=1e-4)


def original(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    kind, config, _ = MODELS[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    model = getattr(module, kind)(config).double().train()
    return model, adam(model)


def rewritten(folder: Path, name: str, replicas: int, rate: float, seed: int) -> tuple[Any, Any]:
    kind, config, _ = MODELS[name]
    if replicas > 1:
        sizes = replicas, dist.get_world_size() // replicas
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        load(folder, name, "tensor_parallel").set_group(mesh["tensor"].get_group())
    module, loading = (load(folder, name, n) for n in (f"modeling_{name}", "loading"))
    torch.manual_seed(seed)
    model = loading.build(lambda: getattr(module, kind)(config)).double().train()
    for layer in (*model.base_model.modules(), model) if replicas > 1 else ():
        if isinstance(layer, nn.ModuleList):
            for block in layer:
                fully_shard(block, mesh=mesh["data"])
        elif layer is model:
            fully_shard(model, mesh=mesh["data"])
    return model, adam(model, rate)


def stored(folder: Path, name: str, model: Any, optimizer: Any) -> dict[str, Any]:
    return {"train": load(folder, name, "distributed_checkpoint").sharded_state(model, optimizer)}


def save(folder: Path, names: tuple[str, ...], replicas: int, place: str) -> None:
    for name in names:
        model, optimizer = rewritten(folder, name, replicas, 1e-2, seed=0)
        steps(model, optimizer, 0)
        state = stored(folder, name, model, optimizer)
        if dist.is_initialized() and replicas == 1:
            later = checkpoint.async_save(state, checkpoint_id=folder / place / name)
            later.result()
        else:
            checkpoint.save(state, checkpoint_id=folder / place / name)
        with pytest.raises(TypeError, match="placeholder for a full tensor"):
            next(iter(state["train"].state_dict()["model"].values())).clone()


def go_on(folder: Path, names: tuple[str, ...], replicas: int, place: str) -> None:
    """Reads into a model of other weights, whose optimizer has another rate, and trains on."""
    for name in names:
        loading, limit = load(folder, name, "loading"), MODELS[name][2]
        whole, their = original(name)
        steps(whole, their, 0)
        model, optimizer = rewritten(folder, name, replicas, 1.0, seed=5)
        checkpoint.load(stored(folder, name, model, optimizer), checkpoint_id=folder / place / name)
        for first in (3, 6):
            found, wanted = loading.full_state_dict(model), whole.state_dict()
            assert found.keys() == wanted.keys()
            for key, tensor in wanted.items():
                error = (found[key] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)
                assert error < limit, f"{name}: {key}: {error:.1e}"
            for each in ((whole, their), (model, optimizer)):
                steps(*each, first)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("saved", "read"),
    [
        ((2, 1), [(1, 1), (4, 1)]),
        ((4, 2), [(2, 1)]),
        long((4, 1), [(2, 1), (4, 2)]),
        long((1, 1), [(2, 1), (4, 2)]),
    ],
)
def test_saved_at_one_world_size_and_read_at_another(folder, saved, read):
    """Sizes are of worlds, and of the replicas in them, which FSDP2 divides."""
    place = f"saved_{saved[0]}_{saved[1]}"
    run(save, saved[0], folder, tuple(MODELS), saved[1], place)
    for world, replicas in read:
        run(go_on, world, folder, tuple(MODELS), replicas, place)
