# Written by slapo-rewrite 0.1.0 for gpt.py; rewrite.json says from what.
"""Between the original's full tensors and the parts that this rank holds."""

from collections.abc import Mapping
from itertools import chain

from torch import Tensor, nn

from .tensor_parallel import Shard


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
