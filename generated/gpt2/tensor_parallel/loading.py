# Written by slapo-rewrite 0.1.0 for modeling_gpt2.py; rewrite.json says from what.
"""Between the original's full tensors and the parts that this rank holds."""

import json
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .tensor_parallel import Shard, world_of_one


def shards(model: nn.Module) -> dict[str, Shard]:
    """How each sharded parameter and buffer is divided, by name and in model order.

    A tied parameter stands under all of its names.
    """
    by_tensor = {
        id(getattr(module, name)): shard
        for module in model.modules()
        for name, shard in getattr(module, "sharded_parameters", {}).items()
    }
    named = chain(
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    return {
        name: by_tensor[id(tensor)] for name, tensor in named if id(tensor) in by_tensor
    }


def to_local(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cuts full tensors down to this rank's parts.

    Args:
        model: The model, which says how its parameters are divided.
        named: Tensors shaped like the original's parameters, by parameter name:
            parameters, gradients, optimiser moments. Parts are left as they are.
    """
    divided = shards(model)
    return {
        name: (
            divided[name].cut(tensor)
            if name in divided and divided[name].is_full(tensor)
            else tensor
        )
        for name, tensor in named.items()
    }


def to_full(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gathers the ranks' parts to full tensors, on every rank.

    Every rank calls it, with the same names.

    Args:
        model: The model, which says how its parameters are divided.
        named: Tensors shaped like this rank's parameters, by parameter name.
    """
    # In the model's order, since all ranks must gather in the same one.
    full = {
        name: shard.gather(named[name])
        for name, shard in shards(model).items()
        if name in named
    }
    return {name: full.get(name, tensor) for name, tensor in named.items()}


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The original's state dict, on every rank. Every rank calls it."""
    return to_full(model, model.state_dict())


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make()` returns, initialised alike at every world size.

    Each rank draws the weights of the whole model and keeps its part, so the ranks must
    be seeded alike. For a moment each holds the whole model; to start from a checkpoint
    without that, use `load_pretrained`.
    """
    with world_of_one():
        full = make().state_dict()
        state = torch.get_rng_state()
    model = make()
    model.load_state_dict(full)
    # Local layers draw fewer numbers than whole ones: go on as if all had been whole.
    torch.set_rng_state(state)
    return model


def load_pretrained(model: nn.Module, path: str | Path) -> None:
    """Reads a safetensors checkpoint, each rank only its parts.

    Args:
        model: The model; its parameters are filled in place.
        path: A `.safetensors` file, or a folder with one or with an index of several.

    Raises:
        KeyError: The checkpoint and the model do not have the same names.
        ValueError: A tensor does not have the size that the model was made for.
    """
    divided, stored = shards(model), stored_tensors(Path(path))
    own = model.state_dict(keep_vars=True)
    names = checkpoint_names(own, set(stored), getattr(model, "base_model_prefix", ""))
    for name, tensor in own.items():
        if name in names:
            part = read_part(stored[names[name]], names[name], divided.get(name))
            if part.shape != tensor.shape:
                raise ValueError(
                    f"{name} is {list(part.shape)} in the checkpoint and "
                    f"{list(tensor.shape)} in the model"
                )
            tensor.data.copy_(part)


def stored_tensors(path: Path) -> dict[str, Path]:
    """Which file holds each tensor of a checkpoint."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        by_name = json.loads(index.read_text())["weight_map"]
        return {name: path / file for name, file in by_name.items()}
    file = path / "model.safetensors" if path.is_dir() else path
    with open_checkpoint(file) as tensors:
        return dict.fromkeys(tensors.keys(), file)


def open_checkpoint(file: Path) -> Any:
    """Opens a safetensors file, whose tensors are read when they are asked for."""
    from safetensors import safe_open

    return safe_open(file, framework="pt")


def checkpoint_names(
    own: Mapping[str, Tensor], stored: set[str], prefix: str
) -> dict[str, str]:
    """The checkpoint's name of each of the model's tensors.

    A tied tensor may stand there under one of its names only, and a checkpoint of the
    model without its head leaves out the prefix.

    Raises:
        KeyError: A tensor is missing on either side.
    """
    names = {}
    for name in own:
        short = name.removeprefix(f"{prefix}.")
        if name in stored or short in stored:
            names[name] = name if name in stored else short
    loaded = {id(own[name]) for name in names}
    missing = [n for n, t in own.items() if n not in names and id(t) not in loaded]
    unexpected = sorted(stored - set(names.values()))
    if missing or unexpected:
        raise KeyError(f"missing: {missing}; in the checkpoint only: {unexpected}")
    return names


def read_part(file: Path, name: str, shard: Shard | None) -> Tensor:
    """One tensor of a checkpoint, or this rank's part of it.

    Raises:
        ValueError: The tensor is not as long as the model's whole one.
    """
    with open_checkpoint(file) as tensors:
        if shard is None:
            whole: Tensor = tensors.get_tensor(name)
            return whole
        stored = tensors.get_slice(name)
        size = stored.get_shape()[shard.axis]
        if size != shard.full_size():
            raise ValueError(
                f"{name} is {size} long in the checkpoint, not {shard.full_size()}"
            )
        before = (slice(None),) * shard.axis
        pieces = [stored[(*before, slice(a, b))] for a, b in shard.ranges()]
        return torch.cat(pieces, shard.axis)
