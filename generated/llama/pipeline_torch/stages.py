# Written by slapo-rewrite 0.1.0 for modeling_llama.py; rewrite.json says from what.
"""Stages of a model: what each holds, and its weights under the original names."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .deferred_init import Recording, take_drawn
from .shards import world_size


def check_ties(model: nn.Module, ties: Iterable[tuple[str, ...]]) -> None:
    """Refuses a model that shares other parameters than the stages were written for.

    Args:
        model: The whole model.
        ties: The names that each shared parameter had then, numbers written as `*`.

    Raises:
        ValueError: A parameter is shared that was not, or the other way round.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(re.sub(r"\d+", "*", name))
    found = {tuple(sorted(set(group))) for group in names.values() if len(group) > 1}
    if other := found ^ set(ties):
        raise ValueError(
            f"parameters are shared otherwise than in the stages: {sorted(other)}; "
            "let slapo-rewrite write them again for this model"
        )


def keep(model: nn.Module, recording: Recording, *held: nn.Module | Tensor) -> None:
    """Leaves nothing in a model but what a stage holds, and gives that its memory.

    Other names of a parameter that is held stay as well, so that each stage has all
    names of its weights. What else is taken out is None from then on.

    Args:
        model: The model, built inside the recording.
        recording: What was to be done to initialise it.
        *held: Modules and parameters.

    Raises:
        ValueError: The model is not as deep as the one that was cut.
    """
    if any(isinstance(m, nn.ModuleList) and not len(m) for m in held):
        raise ValueError(
            "a stage would hold none of the layers: the model has fewer than the one that "
            "was cut; let slapo-rewrite write the stages again for this model"
        )
    modules = {inner for m in held if isinstance(m, nn.Module) for inner in m.modules()}
    tensors = {id(t) for t in held if isinstance(t, Tensor)}
    tensors |= {id(t) for m in modules for t in own_tensors(m).values()}
    real: dict[int, Tensor] = {}
    for module in list(model.modules()):
        for name, tensor in own_tensors(module).items():
            if id(tensor) not in tensors:
                setattr(module, name, None)
                getattr(module, "sharded_parameters", {}).pop(name, None)
                continue
            if id(tensor) not in real:
                real[id(tensor)] = with_memory(tensor, recording)
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(name, real[id(tensor)])  # type: ignore[arg-type]
            else:
                setattr(module, name, real[id(tensor)])
    drop(model, modules)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters, buffers and other tensors, by name."""
    own: dict[str, Any] = {**vars(module), **module._parameters, **module._buffers}
    return {name: value for name, value in own.items() if isinstance(value, Tensor)}


def with_memory(tensor: Tensor, recording: Recording) -> Tensor:
    """A recorded tensor with its values."""
    value = recording.value(tensor)
    if not isinstance(tensor, nn.Parameter):
        return value.detach()
    made = nn.Parameter(value.detach(), tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    made._backward_hooks = tensor._backward_hooks
    return made


def drop(module: nn.Module, held: set[nn.Module]) -> bool:
    """Takes out the submodules that hold nothing of a stage; whether any is left."""
    left = module in held or bool(own_tensors(module))
    for name, child in list(module.named_children()):
        if drop(child, held):
            left = True
        else:
            setattr(module, name, None)
    return left


def draw_parts(
    stage: nn.Module, recording: Recording, make: Callable[[], nn.Module]
) -> None:
    """Gives a stage its parts of the weights that the whole model would draw.

    Each rank draws the weights of the whole model and holds one full tensor at a time.

    Args:
        stage: The stage.
        recording: What it was built inside.
        make: Makes the model.
    """
    if world_size() > 1:
        recording.generator.set_state(recording.start)
        take_drawn(stage, make)


def has_place(model: nn.Module, name: str) -> bool:
    """Whether a stage holds the module that a weight of the whole model belongs to."""
    found: Any = model
    for step in name.split(".")[:-1]:
        found = getattr(found, step, model)
        if found is None:
            return False
    return getattr(found, name.rpartition(".")[2], model) is not None


def gathered(
    named: Mapping[str, Tensor], group: Any, first_rank_only: bool = False
) -> dict[str, Tensor]:
    """The tensors of all stages, by name, on every rank. Every rank calls it.

    Args:
        named: Those of this rank's stages.
        group: The ranks that hold the stages of one model.
        first_rank_only: Give them to the first of all processes alone, on its CPU.
    """
    mine = {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()}
    listed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(listed, mine, group=group)
    device = next(iter(named.values())).device
    full: dict[str, Tensor] = {}
    known: set[str] = set()
    for number, theirs in enumerate(listed):
        for name, (shape, dtype) in theirs.items():
            if name in known:
                continue
            known.add(name)
            if number == dist.get_rank(group):
                tensor = (
                    named[name].detach().clone(memory_format=torch.contiguous_format)
                )
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, dist.get_global_rank(group, number), group=group)
            if not first_rank_only:
                full[name] = tensor
            elif dist.get_rank() == 0:
                full[name] = tensor.cpu()
    return full
