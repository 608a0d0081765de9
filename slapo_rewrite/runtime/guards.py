"""Refuses, in words, what would train other weights than the model's."""

from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from .shards import are_alike, named_world, parts_in, rank, world_size


def guard(module: Any) -> None:
    """Guards a module that holds parts against what takes them for the whole."""
    module.parts_differ = False  # as far as is known
    module.register_state_dict_post_hook(note_whose_parts)
    if world_size() > 1:
        watch_registrations()


@cache
def watch_registrations() -> Any:
    """From the first call on, what is put into a module is looked at first."""
    return register_module_module_registration_hook(refuse_wrappers)


def refuse_wrappers(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuses to put into `parent` what would train other weights than the model's.

    Has a parent that can save itself refuse to save parts.
    """
    if module is None or world_size() == 1:
        return
    # `parametrizations` is what `torch.nn.utils.parametrize` puts into a layer first.
    parametrized = name == "parametrizations" and hasattr(parent, "sharded_parameters")
    if parametrized or is_adapter(module, dict(parent.named_children()).get(name)):
        raise RuntimeError(
            f"`{name}` of `{type(parent).__name__}` works on this rank's part: each rank "
            "would train other parameters beside it. Put LoRA adapters in by "
            "`lora.add_adapters`, of a model rewritten `--with add_adapters`; leave the "
            "layer out of others, and of parametrizations"
        )
    if not parts_in(module):
        return
    if hasattr(type(parent), "save_pretrained"):
        vars(parent)["save_pretrained"] = partial(save_whole, parent)
    replicas, ranks = vars(parent).get("process_group"), dist.get_process_group_ranks
    if not isinstance(replicas, dist.ProcessGroup):
        return
    if len({*ranks(replicas)} & {*ranks(named_world().group)}) > 1:
        raise RuntimeError(
            f"`{type(parent).__name__}` would take the tensor-parallel ranks for replicas "
            "and copy one rank's parts over the others': give it the data-parallel group, "
            "or without replicas train the model itself (for Trainer and accelerate see "
            "slapo-rewrite's examples/trainer)"
        )


def is_adapter(module: nn.Module, layer: Any) -> bool:
    """Whether a module adds parameters to a layer that works on parts, which it holds."""
    if not hasattr(layer, "sharded_parameters") or hasattr(layer, "takes_adapters"):
        return False
    held = layer in module.modules()
    return held and not {*module.parameters()} <= {*layer.parameters()}


def check_parts(layer: Any) -> None:
    """Refuses to run a layer in another group than its own, or of which ranks have copies.

    Where the first run finds the same weights on every rank, something has copied one
    rank's part over those of the others, or all have drawn the same numbers.
    """
    shard, weight = layer.sharded_parameters["weight"], layer.weight
    size, world = shard.local_size(), named_world()
    if world_size() > 1 and weight.shape[shard.axis] != size:
        raise RuntimeError(
            f"a weight of shape {list(weight.shape)} has come in the place of this rank's "
            f"part, {size} long: replace and tie embeddings in the original, in one "
            "process, and load what it saves"
        )
    if layer.parts_differ or size == shard.size or world.supposed or weight.is_meta:
        return
    is_fake = dist.get_backend(world.group) == "fake"
    if is_fake or hasattr(weight, "full_tensor") or torch.compiler.is_compiling():
        return
    layer.parts_differ = True
    weight = weight.detach()
    if not weight.numel() or weight.min() == weight.max():
        weight = weight.new_tensor([rank()])  # what is constant may well be alike
    table, sums = weight.reshape(len(weight), -1), [weight.float().norm().double()]
    for axis in (0, 1):  # parts of an identity differ by place alone
        line = table.sum(axis, dtype=torch.float64)
        sums += [line.sum(), line @ torch.arange(len(line)).to(line)]
    if are_alike(torch.stack(sums)):
        raise RuntimeError(
            "all ranks have the same part of the weights. Did DeepSpeed take the tensor-"
            "parallel ranks for replicas (give it `mpu`), or a checkpoint keep one rank's "
            "`state_dict()` (save `loading.full_state_dict(model)`)? A new model begins "
            "with `loading.build`"
        )


def note_whose_parts(
    module: Any, state_dict: Any, prefix: str, metadata: dict[str, Any]
) -> None:
    """In a state dict: notes which of how many ranks the parts belong to."""
    if world_size() == 1:
        return
    metadata["part"] = rank(), world_size()
    is_made = named_world().supposed or torch.get_default_device().type == "meta"
    for name in module.sharded_parameters:
        part = state_dict.get(prefix + name)
        if hasattr(part, "to_local"):  # FSDP2's, which asks what it holds
            with torch.no_grad():
                part = part.to_local()
        if type(part) is not Tensor or part is getattr(module, name):
            continue
        # transformers asks a model on the meta device what it is to read.
        if part.is_meta and not is_made:
            raise RuntimeError(
                "`from_pretrained` reads whole tensors, and this rank holds parts: build "
                "the model and use `loading.load_pretrained(model, path)`, of a model "
                "rewritten `--with load_pretrained`"
            )
        # The checkpoint asks the one first; the other keeps both out of pickles.
        vars(part).update(__create_write_items__=_refuse_checkpoint, __getstate__=dict)


def _refuse_checkpoint(name: str, part: Tensor) -> None:
    """Stops torch.distributed.checkpoint from keeping one rank's part as the whole."""
    raise RuntimeError(
        f"`{name}` is this rank's part, and torch.distributed.checkpoint would keep one "
        "rank's part only: save `loading.full_state_dict(model)`, on every rank, or the "
        "`sharded_state(model, optimizer)` of a model rewritten `--with sharded_state`"
    )


def save_whole(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own `save_pretrained`, of full tensors; it is refused of parts."""
    states = [a for a in (*args, kwargs.get("state_dict")) if isinstance(a, dict)]
    notes = [n for state in states for n in getattr(state, "_metadata", {}).values()]
    if world_size() > 1 and (not states or any("part" in each for each in notes)):
        raise RuntimeError(
            "`model.save_pretrained` would write this rank's parts only: use "
            "`loading.save_pretrained(model, path)` on every rank, of a model rewritten "
            "`--with save_pretrained`; or let one rank write with "
            "`state_dict=loading.full_state_dict(model)`, which every rank calls"
        )
    return type(model).save_pretrained(model, *args, **kwargs)


def own_size(name: str) -> Any:
    """A size of this rank's part, which only the layer's constructor sets."""

    def set_size(layer: Any, size: int) -> None:
        if vars(layer).get(name, size) != size and world_size() > 1:
            raise RuntimeError(
                f"`{name}` is this rank's part and would no longer fit those of the "
                "others: call `resize_token_embeddings` on the original, in one process, "
                "and load what it saves"
            )
        vars(layer)[name] = size

    return property(lambda layer: vars(layer)[name], set_size)
