# Written by slapo-rewrite 0.2.0 for gpt.py; rewrite.json says from what.
"""Converts between the original's full tensors and the parts that this rank holds."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .shards import Shard, are_alike, parts_in, rank, world_of, world_size


def shards(model: nn.Module) -> dict[str, Shard]:
    """The shards of parameters and buffers by name; tied tensors under every name."""
    found = parts_in(model)
    return {n: found[id(t)] for n, t in named_tensors(model) if id(t) in found}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name; tied tensors under every name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def to_local(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cuts this rank's parts out of the original's full tensors, by parameter name.

    They may be parameters, gradients or optimiser moments. Parts are kept as they are.
    """
    local = dict(named)
    for name, shard in shards(model).items():
        if name in named and shard.is_full(named[name]):
            local[name] = shard.cut(named[name])
    return local


def to_full(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gathers the ranks' parts, by parameter name, to the original's full tensors.

    Every rank calls it, with the same names. The parts may be those of FSDP2.
    """
    divided = shards(model)
    full = dict(named)
    for name in sorted(named):  # all ranks must gather in the same order
        part = named[name]
        if hasattr(part, "full_tensor"):  # FSDP2 divides it further, over the replicas
            part = part.full_tensor()
        full[name] = divided[name].gather(part) if name in divided else part
    return full


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The original's state dict, on every rank. Every rank calls it."""
    state = model.state_dict()
    full = to_full(model, state)
    # The metadata of modules, such as versions, is kept, except for whose parts these
    # were.
    for note in getattr(state, "_metadata", {}).values():
        note.pop("part", None)
    state.update(full)
    return state


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make()` returns, initialised alike at every world size.

    Each rank first makes the whole model, draws the same weights as one process, bit
    for bit, and keeps its parts of them. So the ranks must be seeded alike.

    Raises:
        ValueError: The ranks are not seeded alike, or the default device is the meta
            device, which holds no weights.
    """
    check_seeds()
    if world_size() == 1:
        return make()
    with world_of(1):
        original = make()
        whole = original.state_dict()
    # A constructor may run layers, whose parts are still the same on all ranks.
    with drawing_apart(), world_of(world_size(), rank()):
        model = make()
    model.load_state_dict(whole)
    take_tensors(model, dict(named_tensors(original)))
    return model


@torch.no_grad()
def take_tensors(model: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Copies what `load_state_dict` does not set.

    A hook of the model's may change parameters while they are loaded, and a constructor
    may draw buffers that are not in the state dict.
    """
    local = to_local(model, full)
    for name, own in named_tensors(model):
        part = local.get(name, own)
        is_other = not torch.equal(part.to_dense(), own.to_dense())  # some are sparse
        if is_other and part.shape == own.shape:
            own.copy_(part)


def drawing_apart() -> AbstractContextManager[None]:
    """A context that leaves the state of the random number generator as it was."""
    device = torch.get_default_device()
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices, device_type=device.type)


def check_seeds() -> None:
    """Refuses ranks that would not draw the weights that one process draws."""
    device = torch.get_default_device()
    if device.type == "meta":
        raise ValueError("the meta device has no weights: leave `torch.device('meta')`")
    if world_size() == 1:
        return
    random: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    if not are_alike(random.get_rng_state().to(device)):
        raise ValueError(
            "all ranks of a tensor-parallel group need the same seed before the model is "
            "built, so that they draw the same weights: torch.manual_seed(0), for example"
        )
