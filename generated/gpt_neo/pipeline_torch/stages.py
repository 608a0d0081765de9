# Written by slapo-rewrite 0.2.0 for modeling_gpt_neo.py; rewrite.json says from what.
"""Pipeline stages: what each holds of the model, and its weights by original name."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .deferred_init import (
    construct,
    construct_parts,
    fill_parts,
    random_states,
    restore,
)
from .loading import full_state_dict
from .shards import world_size

BUNDLE = 1 << 24  # elements sent in one message


class Stage(nn.Module):
    """The model, with the modules and parameters of one stage only.

    A stage's class derives from this one, then from the model's class. Modules of other
    stages are None and take no memory. From the same seed, weights start as in the
    whole model.

    Args:
        *args: The arguments of the model's class.
        **kwargs: Likewise.

    Raises:
        ValueError: The stages were written for another model.
    """

    # The values that attributes of the model must have; `...` for any but None.
    SETTINGS: ClassVar[Mapping[str, Any]] = {}
    # The names of each parameter that has several; `*` stands for numbers.
    TIES: ClassVar[Iterable[tuple[str, ...]]] = ()
    # Modules of other stages whose sizes it reads: they are kept, without weights.
    SIZES: ClassVar[Iterable[str]] = ()
    # What the stage holds of the model.
    held: Callable[[], Iterable[nn.Module | Tensor]]
    # Makes a model that has memory for what is held only.
    made_by: Callable[..., Any] = staticmethod(construct)
    # Its part of the original's state dict.
    full_state: Callable[[], dict[str, Tensor]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        def make() -> "Stage":
            vars(self).clear()  # the constructor may run several times
            super(Stage, self).__init__(*args, **kwargs)
            return self

        self.made_by(make, lambda model: tensors_of(model.held()))
        check_settings(self, self.SETTINGS)
        check_ties(self, self.TIES)
        keep(self, self.held(), self.SIZES)


class ShardedStage(Stage):
    """A stage that is split over a tensor-parallel group.

    Each rank draws the weights of the whole model, and keeps its parts of the stage's.
    """

    made_by = staticmethod(construct_parts)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        states = random_states()
        super().__init__(*args, **kwargs)
        if world_size() > 1 and torch.get_default_device().type != "meta":
            restore(states)
            fill_parts(self, partial(model_class(type(self)), *args, **kwargs))

    def full_state(self) -> dict[str, Tensor]:
        """Its part of the original's state dict, gathered from the group."""
        return full_state_dict(self)


def model_class(stage: type) -> Any:
    """The model's class, which a stage's class derives from."""
    return next(kind for kind in stage.__mro__ if not issubclass(kind, Stage))


def check_settings(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Refuses a model whose settings are not those that the stages were written for.

    `settings` are the values of the whole model's attributes at that time, by path.
    """
    for path, expected in settings.items():
        owner, _, name = path.rpartition(".")
        # One that is missing was read by a `getattr` with this default.
        found = getattr(attrgetter(owner)(model) if owner else model, name, expected)
        if expected is ...:
            if found is None:
                raise ValueError(
                    f"`{path}` is None, but the stages were written for a model where it is "
                    "not: run slapo-rewrite again for this model"
                )
        elif hasattr(expected, "holds") and expected.holds(found, model):
            continue
        elif found is not expected and found != expected:
            shown = type(found).__name__ if isinstance(found, nn.Module) else found
            raise ValueError(
                f"`{path}` is {shown}, but the stages were written for {expected}: "
                "run slapo-rewrite again for this model"
            )


def check_ties(model: nn.Module, ties: Iterable[tuple[str, ...]]) -> None:
    """Refuses a model whose tied parameters are not those at the time of writing.

    `ties` are the names of each tied parameter; `*` stands for numbers.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(re.sub(r"\d+", "*", name))
    found = {tuple(sorted(set(group))) for group in names.values() if len(group) > 1}
    if other := found ^ set(ties):
        raise ValueError(
            f"this model ties other parameters than the stages do: {sorted(other)}; "
            "run slapo-rewrite again for this model"
        )


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters, buffers and other tensors, by name."""
    own: dict[str, Any] = dict(vars(module))
    own |= module.named_parameters(recurse=False, remove_duplicate=False)
    own |= module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: value for name, value in own.items() if isinstance(value, Tensor)}


def keep(
    model: nn.Module, held: Iterable[nn.Module | Tensor], sizes: Iterable[str] = ()
) -> None:
    """Removes from a model what a stage does not hold, and puts None in its place.

    A tied parameter that is held keeps all of its names.

    Args:
        model: The whole model.
        held: The modules and parameters of the stage.
        sizes: Paths of modules that are kept without their weights, for their sizes.

    Raises:
        ValueError: The model has fewer layers than the one that was cut.
    """
    held = list(held)
    if any(isinstance(m, nn.ModuleList) and not len(m) for m in held):
        raise ValueError(
            "a stage would have no layers: the model has fewer layers than the one that "
            "was cut; run slapo-rewrite again for this model"
        )
    modules = {inner for m in held if isinstance(m, nn.Module) for inner in m.modules()}
    tensors = {id(tensor) for tensor in tensors_of(held)}
    for module in list(model.modules()):
        for name, tensor in own_tensors(module).items():
            if id(tensor) not in tensors:
                setattr(module, name, None)
                getattr(module, "sharded_parameters", {}).pop(name, None)
    for path, module in reversed([*model.named_modules(remove_duplicate=False)]):
        inside = [*module.modules()]
        if any(f"{each}.".startswith(f"{path}.") for each in sizes):
            continue
        if path and modules.isdisjoint(inside) and not any(map(own_tensors, inside)):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, None)


def tensors_of(held: Iterable[nn.Module | Tensor]) -> list[Tensor]:
    """All tensors of modules, and the single tensors among them."""
    found = [each for each in held if isinstance(each, Tensor)]
    for module in held:
        if isinstance(module, nn.Module):
            for inner in module.modules():
                found += own_tensors(inner).values()
    return found


class SendableGradients(torch.autograd.Function):
    """Makes the gradient of each tensor contiguous, and zeros where there is none."""

    @staticmethod
    def forward(_: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The same values, not as views: a stage may write into its inputs."""
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """The gradients; autograd fills missing ones with zeros."""
        return tuple(gradient.contiguous() for gradient in gradients)


def check_names(inputs: Iterable[str], names: set[str]) -> None:
    """Refuses arguments that the stages were not written for."""
    if {*inputs} != names:
        raise TypeError(f"the stages take {sorted(names)}, not {sorted(inputs)}")


def load_held(stage: nn.Module, full: Mapping[str, Tensor], **how: Any) -> None:
    """Loads what a stage holds of the original's state dict."""
    held = {name: tensor for name, tensor in full.items() if has_place(stage, name)}
    stage.load_state_dict(held, **how)


def has_place(model: nn.Module, name: str) -> bool:
    """Whether a stage holds this weight of the whole model."""
    found: Any = model
    for step in name.split(".")[:-1]:
        found = getattr(found, step, model)
        if found is None:
            return False
    return getattr(found, name.rpartition(".")[2], model) is not None


def gathered(
    named: Mapping[str, Tensor], group: Any, first_rank_only: bool = False
) -> dict[str, Tensor]:
    """Gathers the tensors of all stages on every rank. Every rank calls it.

    Args:
        named: The tensors of this rank's stages, by name.
        group: The ranks that hold the stages of one model.
        first_rank_only: Gather them on the CPU of the first process only.
    """
    mine = {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()}
    listed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(listed, mine, group=group)
    device = next(iter(named.values())).device
    full: dict[str, Tensor] = {}
    known: set[str] = set()
    for number, theirs in enumerate(listed):
        new = {name: of for name, of in theirs.items() if name not in known}
        known |= new.keys()
        for names in bundles(new):
            sizes = [new[name][0].numel() for name in names]
            flat = torch.empty(sum(sizes), dtype=new[names[0]][1], device=device)
            if number == dist.get_rank(group):
                torch.cat([named[n].detach().reshape(-1) for n in names], out=flat)
            dist.broadcast(flat, dist.get_global_rank(group, number), group=group)
            if first_rank_only and dist.get_rank() != 0:
                continue
            flat = flat.cpu() if first_rank_only else flat
            for name, part in zip(names, torch.split(flat, sizes), strict=True):
                full[name] = part.view(new[name][0]).clone()
    return full


def bundles(tensors: Mapping[str, tuple[torch.Size, Any]]) -> Iterator[list[str]]:
    """Groups tensors into messages, since many small ones take long.

    Args:
        tensors: Their shapes and dtypes, by name.
    """
    names: list[str] = []
    held = 0
    for name in sorted(tensors, key=lambda name: str(tensors[name][1])):
        shape, dtype = tensors[name]
        if names and (held + shape.numel() > BUNDLE or dtype != tensors[names[0]][1]):
            yield names
            names, held = [], 0
        names.append(name)
        held += shape.numel()
    if names:
        yield names
