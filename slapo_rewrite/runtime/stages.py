"""Stages of a model: what each holds, and its weights under the original names."""

import operator
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

BUNDLE = 1 << 24  # so many numbers are sent at once


class Stage(nn.Module):
    """Makes a model of which it holds the modules and parameters of one stage only.

    It stands before the model's class among the bases of a stage. What it does not hold
    is None, and has no memory; what it does hold starts as in the whole model, from the
    same seed.

    Args:
        *args: Those of the model's class.
        **kwargs: Likewise.

    Raises:
        ValueError: The stages were written for another model.
    """

    # What attributes of the model have to be; `...` for anything but None.
    SETTINGS: ClassVar[Mapping[str, Any]] = {}
    # The names of each parameter that has several, numbers as `*`.
    TIES: ClassVar[Iterable[tuple[str, ...]]] = ()
    # The modules of other stages whose sizes it reads; without memory they stay.
    SIZES: ClassVar[Iterable[str]] = ()
    # What the stage holds of the model.
    held: Callable[[], Iterable[nn.Module | Tensor]]
    # Makes a model with memory for what is held.
    made_by: Callable[..., Any] = staticmethod(construct)
    # Its part of the original's state dict.
    full_state: Callable[[], dict[str, Tensor]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        def make() -> "Stage":
            vars(self).clear()  # it is made again until it has what it is to hold
            super(Stage, self).__init__(*args, **kwargs)
            return self

        self.made_by(make, lambda model: tensors_of(model.held()))
        check_settings(self, self.SETTINGS)
        check_ties(self, self.TIES)
        keep(self, self.held(), self.SIZES)


class UnshardedStage(Stage):
    """A stage that one rank holds whole."""

    def full_state(self) -> dict[str, Tensor]:
        """Its part of the original's state dict, that of FSDP2 put together."""
        return {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in self.state_dict().items()
        }


class ShardedStage(Stage):
    """A stage that the ranks of a tensor-parallel group share.

    Each rank draws the whole model's weights, and keeps its part of the stage's.
    """

    made_by = staticmethod(construct_parts)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        states = random_states()
        super().__init__(*args, **kwargs)
        if world_size() > 1 and torch.get_default_device().type != "meta":
            restore(states)
            fill_parts(self, partial(model_class(type(self)), *args, **kwargs))

    def full_state(self) -> dict[str, Tensor]:
        """Its part of the original's state dict, gathered from those ranks."""
        return full_state_dict(self)


class Unlike:
    """Any setting but one value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return other != self.value

    def __repr__(self) -> str:
        return f"anything but {self.value!r}"


class Compared:
    """Any setting that compares so with a number, or with another setting."""

    def __init__(self, sign: str, other: int | str) -> None:
        self.sign, self.other = sign, other

    def holds(self, value: Any, model: nn.Module) -> bool:
        """Whether a value is one."""
        other = self.other
        bound = attrgetter(other)(model) if isinstance(other, str) else other
        known = isinstance(value, int) and isinstance(bound, int)
        return known and bool(SIGNS[self.sign](value, bound))

    def __repr__(self) -> str:
        return f"what is {self.sign} {self.other}"


class Count:
    """A list of so many layers."""

    def __init__(self, number: int) -> None:
        self.number = number

    def holds(self, value: Any, _: nn.Module) -> bool:
        """Whether a value is one."""
        return isinstance(value, nn.Module) and len(value) == self.number  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"{self.number} of its layers"


SIGNS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def model_class(stage: type) -> Any:
    """The class of the model that a stage is one of."""
    return next(kind for kind in stage.__mro__ if not issubclass(kind, Stage))


def check_settings(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Refuses a model for which the stages would leave out something that it does.

    `settings` are what attributes of the whole model were when the stages were written.
    """
    for path, expected in settings.items():
        owner, _, name = path.rpartition(".")
        # What it has not is what a `getattr` with a default took for it.
        found = getattr(attrgetter(owner)(model) if owner else model, name, expected)
        if expected is ...:
            if found is None:
                raise ValueError(
                    f"`{path}` is None, and the stages were written for a model where "
                    "it is not: let slapo-rewrite write them again for this model"
                )
        elif hasattr(expected, "holds") and expected.holds(found, model):
            continue
        elif found is not expected and found != expected:
            shown = type(found).__name__ if isinstance(found, nn.Module) else found
            raise ValueError(
                f"`{path}` is {shown}, and the stages were written for {expected}: "
                "let slapo-rewrite write them again for this model"
            )


class FixedSettings:
    """Refuses a step in which some settings of a stage are others than it was written for.

    A hook before `forward`.

    Args:
        paths: The settings, which methods of the model may set.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths

    def __call__(self, stage: Stage, _: Any) -> None:
        """Looks at those that the stage holds."""
        own = (path for path in self.paths if has_place(stage, path))
        check_settings(stage, {path: stage.SETTINGS[path] for path in own})


def check_ties(model: nn.Module, ties: Iterable[tuple[str, ...]]) -> None:
    """Refuses a model that shares other parameters than the stages were written for.

    `ties` are the names that each shared one had then, numbers written as `*`.
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


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters, buffers and other tensors, by name."""
    own: dict[str, Any] = dict(vars(module))
    own |= module.named_parameters(recurse=False, remove_duplicate=False)
    own |= module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: value for name, value in own.items() if isinstance(value, Tensor)}


def keep(
    model: nn.Module, held: Iterable[nn.Module | Tensor], sizes: Iterable[str] = ()
) -> None:
    """Leaves nothing in a model but what a stage holds.

    Other names of a parameter that is held stay as well, so that each stage has all
    names of its weights. What else is taken out is None from then on.

    Args:
        model: The model.
        held: Modules and parameters.
        sizes: Paths of modules that stay without what they hold, for their sizes.

    Raises:
        ValueError: The model is not as deep as the one that was cut.
    """
    held = list(held)
    if any(isinstance(m, nn.ModuleList) and not len(m) for m in held):
        raise ValueError(
            "a stage would hold none of the layers: the model has fewer than the one that "
            "was cut; let slapo-rewrite write the stages again for this model"
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
    """All tensors of modules, and those that stand by themselves."""
    found = [each for each in held if isinstance(each, Tensor)]
    for module in held:
        if isinstance(module, nn.Module):
            for inner in module.modules():
                found += own_tensors(inner).values()
    return found


class SendableGradients(torch.autograd.Function):
    """Gives each tensor its gradient in one piece of memory; zeros where it has none."""

    @staticmethod
    def forward(_: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The same values, not as views: a stage may write into what it is given."""
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Those that there are, and zeros."""
        return tuple(gradient.contiguous() for gradient in gradients)


def check_names(inputs: Iterable[str], names: set[str]) -> None:
    """Refuses other arguments of a step than the stages were written for."""
    if {*inputs} != names:
        raise TypeError(f"the stages take {sorted(names)}, and not {sorted(inputs)}")


def load_held(stage: nn.Module, full: Mapping[str, Tensor], **how: Any) -> None:
    """Lets a stage load what it holds of the original's state dict."""
    held = {name: tensor for name, tensor in full.items() if has_place(stage, name)}
    stage.load_state_dict(held, **how)


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
    """Names of tensors that are sent as one, since many small messages take long.

    Args:
        tensors: Their shapes and types, by name.
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
