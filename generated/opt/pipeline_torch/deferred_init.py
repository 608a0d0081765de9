# Written by slapo-rewrite 0.2.0 for modeling_opt.py; rewrite.json says from what.
"""Building a model of which only some parameters, or parts of them, are kept.

`build_deferred` does what `loading.build` does, in less memory.
"""

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .loading import shards, take_tensors
from .shards import Shard, rank, world_of, world_size

# Functions whose results do not depend on a tensor's values.
OF_SIZES = {"size", "dim", "stride", "numel", "is_contiguous", "is_floating_point"}
OF_SIZES |= {"__len__", "__hash__", "untyped_storage", "requires_grad_"}
# Functions whose results share the tensor's memory.
VIEWS = {"__get__", "__getitem__", "detach", "view", "view_as", "t", "transpose"}
VIEWS |= {"narrow", "select", "unbind", "split", "chunk", "squeeze", "unsqueeze"}
# Functions that write to a tensor; only `FILLS` replace all of its values.
FILLS = {"normal_", "uniform_", "kaiming_uniform_", "constant_", "fill_", "zero_"}
FILLS |= {"copy_"}
CHANGES = {"__setitem__", "mul_", "add_", "sub_", "div_", "clamp_", "clip_"}
CHANGES |= {"__imul__", "__iadd__", "__isub__", "__itruediv__", "erfinv_"}


class Unfollowed(Exception):
    """Raised if a constructor's use of a parameter cannot be recorded."""


class Step(NamedTuple):
    """A recorded call that writes to a parameter, and may read others.

    Attributes:
        name: The function's name.
        used: The numbers of these parameters.
        filled: The number of the parameter whose values it all replaces, if any.
    """

    name: str
    used: frozenset[int]
    filled: int | None


class Following(TorchFunctionMode):
    """Runs a constructor and follows its parameters from when modules register them.

    Vectors are not followed: they take little memory, and constructors read some.

    Attributes:
        parameters: The followed parameters, in the order of their numbers.
        stored: The storage of each, and its size in bytes.
        numbers: Their numbers, by their storage.
        failed: Whether a parameter could not be followed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.parameters: list[nn.Parameter] = []
        self.stored: list[tuple[torch.UntypedStorage, int]] = []
        self.numbers: dict[torch.UntypedStorage, int] = {}
        self.failed = False

    def __enter__(self) -> Any:
        self.hook = register_module_parameter_registration_hook(self.register)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.hook.remove()
        self.require(not self.failed)  # the constructor may have caught it

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Starts to follow a parameter."""
        storage = parameter.untyped_storage()
        follows = storage not in self.numbers and threading.get_ident() == self.thread
        follows &= type(parameter) is nn.Parameter and not parameter.is_meta
        if follows and storage.resizable() and parameter.dim() > 1:
            number = self.numbers[storage] = len(self.parameters)
            self.parameters.append(parameter)
            self.stored.append((storage, storage.nbytes()))
            self.after(Step("register", frozenset([number]), None))

    def numbers_of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """The numbers of the followed parameters whose memory the tensors use."""
        stored = {tensor.untyped_storage() for tensor in tensors}
        return frozenset(self.numbers[s] for s in stored & self.numbers.keys())

    def require(self, condition: bool) -> None:
        """Raises `Unfollowed` unless the condition holds."""
        if not condition:
            self.failed = True
            raise Unfollowed

    def give_memory(self, numbers: Iterable[int]) -> list[torch.UntypedStorage]:
        """Gives memory to those parameters without, and returns their storages."""
        given = []
        for storage, size in (self.stored[number] for number in numbers):
            if not storage.nbytes():
                storage.resize_(size)
                given.append(storage)
        return given

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        used = self.numbers_of(tensors_in((args, kwargs)))
        if not used:
            return func(*args, **kwargs)
        memory = self.give_memory(used)
        if is_without_values(func):
            result = func(*args, **kwargs)
            for storage in memory:
                storage.resize_(0)
            made = tensors_in(result) if func.__name__ in VIEWS else []
            self.require(all(t.untyped_storage() in self.numbers for t in made))
            return result
        target = args[0] if args else kwargs.get("tensor")
        written = self.numbers_of(tensors_in(target))
        self.require(func.__name__ in FILLS | CHANGES and len(written) == 1)
        read = self.numbers_of(t for t in tensors_in((args, kwargs)) if t is not target)
        all_of_it = (
            target.is_contiguous()
            and target.nbytes == target.untyped_storage().nbytes()
        )
        fills = func.__name__ in FILLS and all_of_it and not written & read
        result = self.run(func, target, args, kwargs)
        self.after(Step(func.__name__, used, min(written) if fills else None))
        return result

    def run(self, func: Any, target: Tensor, args: Any, kwargs: Any) -> Any:
        """Runs a function that writes to `target`."""
        raise NotImplementedError

    def after(self, step: Step) -> None:
        """Is called after each step."""
        raise NotImplementedError


class Recording(Following):
    """Runs a constructor without memory for parameters; records what it does to them.

    Attributes:
        steps: The recorded calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def run(self, func: Any, target: Tensor, args: Any, kwargs: Any) -> Any:
        """Skips the call."""
        return target

    def after(self, step: Step) -> None:
        """Records the step, and frees the memory of its parameters."""
        self.steps.append(step)
        for number in step.used:
            self.stored[number][0].resize_(0)


class Replaying(Following):
    """Runs a constructor whose parameters have memory while their values are needed.

    Args:
        plan: The recording of the constructor's earlier run.
        done: Is called with the number of a parameter and the parameter when its values
            are final, and returns whether to keep it.
    """

    def __init__(self, plan: Recording, done: Callable[[int, Tensor], bool]) -> None:
        super().__init__()
        self.done, self.steps, self.freed = done, iter(plan.steps), 0
        # For each step, the next one of each of its parameters; the last step first.
        self.next: list[dict[int, Step | None]] = []
        following: dict[int, Step] = {}
        for step in reversed(plan.steps):
            self.next.append({number: following.get(number) for number in step.used})
            following |= dict.fromkeys(step.used, step)

    def run(self, func: Any, target: Tensor, args: Any, kwargs: Any) -> Any:
        """Runs the call."""
        return func(*args, **kwargs)

    def after(self, step: Step) -> None:
        """Frees the memory of parameters whose values are no longer needed."""
        self.require(step == next(self.steps, None))
        for number, coming in self.next.pop().items():
            if coming is None:
                kept = self.done(number, self.parameters[number])
            else:
                kept = coming.filled != number
            if not kept:
                storage, size = self.stored[number]
                storage.resize_(0)
                self.freed += size
        if self.freed > 2**24:
            give_back()
            self.freed = 0


def give_back() -> None:
    """Returns freed memory to the system, which glibc keeps between blocks in use."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def is_without_values(func: Any) -> bool:
    """Whether a function neither reads nor writes values of its tensor arguments."""
    name = func.__name__
    if name == "__set__":  # of an attribute
        return getattr(func.__self__, "__name__", "data") != "data"
    beside = name.startswith("new_") and name != "new_tensor"
    return name in OF_SIZES | VIEWS or beside or name.endswith("_like")


def construct(
    make: Callable[[], nn.Module],
    wanted: Callable[[Any], Iterable[Tensor]],
    take: Callable[[int, Tensor], None] | None = None,
) -> Any:
    """The model that `make()` returns, with those of its parameters that are wanted.

    The others have their shapes but no memory, and must not be used. Buffers, vectors
    and other tensors are all there. While the model is made, a parameter has memory
    only as long as its values are needed. A constructor that reads the values of
    parameters, however, runs as usual, and the whole model has memory.

    Args:
        make: Makes the model. It is called several times, at first without values, then
            from the same state of torch's random numbers.
        wanted: Returns the wanted tensors of a model.
        take: Is called with the position of each of these and the tensor, as soon as
            its values are final. Parameters are then not kept.
    """
    if torch.get_default_device().type == "meta":
        return make()
    states, taken = random_states(), set[int]()
    model = None
    try:
        with Recording() as plan:
            tensors = [*wanted(make())]
        places = places_of(plan, tensors) if take else {}
        kept = plan.numbers_of(tensors) - places.keys()

        def done(number: int, parameter: Tensor) -> bool:
            for place in places.get(number, ()):
                assert take is not None
                take(place, parameter)
                taken.add(place)
            return number in kept

        restore(states)
        with Replaying(plan, done) as replay:
            model = make()
            replay.require(next(replay.steps, None) is None)
    except Exception:  # also if it is the constructor's own, which comes again
        model = None
    if model is None:
        restore(states)
        taken.clear()
        model = make()
    for place, tensor in enumerate(wanted(model) if take else ()):
        if take and place not in taken:
            take(place, tensor)
    return model


def places_of(plan: Recording, tensors: list[Tensor]) -> dict[int, list[int]]:
    """Positions of parameters in `tensors`, by number, unless others share their memory."""
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        for number in plan.numbers_of([tensor]):
            places.setdefault(number, []).append(place)
    return {
        number: found
        for number, found in places.items()
        if all(tensors[place] is plan.parameters[number] for place in found)
    }


def construct_parts(
    make: Callable[[], nn.Module], wanted: Callable[[Any], Iterable[Tensor]]
) -> Any:
    """Like `construct`, for parts of a model; they have memory, but no values yet."""
    if world_size() == 1 or torch.get_default_device().type == "meta":
        return construct(make, wanted)
    # A constructor may run layers, whose parts have no values as yet.
    with world_of(world_size(), rank()):
        try:
            with Recording() as plan:
                model = make()
            plan.give_memory(plan.numbers_of(wanted(model)))
            return model
        except Exception:
            pass
        return make()


def fill_parts(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Gives a model its parts of the weights that one process draws.

    Args:
        model: The model, or a stage of it.
        make: Makes the whole model.
    """
    divided, own = shards(model), tensors_of(model)
    parts = [(tensor, divided.get(name)) for name, tensor in own.items()]
    here = world_size(), rank()

    def wanted(whole: nn.Module) -> list[Tensor]:
        named = tensors_of(whole)
        return [named[name] for name in own]

    def take(place: int, full: Tensor) -> None:
        with world_of(*here):
            take_part(*parts[place], full)

    with world_of(1):
        whole = construct(make, wanted, take)
    take_tensors(model, dict(whole.named_buffers()))


@torch.no_grad()
def take_part(tensor: Tensor, shard: Shard | None, full: Tensor) -> None:
    """Copies this rank's part of a full weight into place, without another copy."""
    if shard is None:
        tensor.copy_(full)
        return
    pieces = [full.narrow(shard.axis, a, b - a) for a, b in shard.ranges(rank())]
    sizes = [piece.shape[shard.axis] for piece in pieces]
    for part, piece in zip(torch.split(tensor, sizes, shard.axis), pieces, strict=True):
        part.copy_(piece)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state dict, not detached."""
    named = model.state_dict(keep_vars=True).items()
    return {name: tensor for name, tensor in named if isinstance(tensor, Tensor)}


def random_states() -> list[tuple[Callable[[Any], Any], Any]]:
    """The random states of torch, Python and NumPy, each with its setter."""
    devices = {torch.device("cpu"), torch.get_default_device()}
    generators = [default_generator(device) for device in devices]
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (generator.set_state, generator.get_state()) for generator in generators
    ]
    states.append((random.setstate, random.getstate()))
    if numpy := sys.modules.get("numpy"):
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states


def restore(states: list[tuple[Callable[[Any], Any], Any]]) -> None:
    """Restores earlier random states."""
    for set_state, state in states:
        set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """The default generator of a device; for the meta device, that of the CPU."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
