"""Building a model without memory, and working out its tensors one at a time.

`build_deferred` does what `loading.build` does, in less memory.

A constructor that runs inside a `Recording` gets tensors on the meta device. Every
operation that gives them values is noted, and is carried out when they are asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .loading import check_seeds, take_parts
from .shards import world_of, world_size

META = torch.device("meta")
# What these leave in a tensor does not depend on what it held before.
OVERWRITING = {"fill_", "normal_", "uniform_", "zero_"}
# These hand a tensor's values to Python.
READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


@dataclass(eq=False)
class Memory:
    """What has been written to one piece of memory, in order.

    Attributes:
        size: In bytes.
        device: Where it would be.
        writes: The operations.
    """

    size: int
    device: torch.device
    writes: list["Write"] = field(default_factory=list)


@dataclass
class View:
    """A recorded tensor at one time.

    Attributes:
        memory: What it is a view of.
        writes: How many operations had written there by then.
        dtype: Its type.
        layout: Its offset, size and strides.
    """

    memory: Memory
    writes: int
    dtype: torch.dtype
    layout: tuple[int, torch.Size, tuple[int, ...]]

    def value(self, known: dict[tuple[Memory, int], Tensor]) -> Tensor:
        """The real tensor.

        Args:
            known: What memories held after so many writes, as far as it was needed.
        """
        memory, number = self.memory, self.writes
        while number and (memory, number) not in known:
            number -= 1
        if number:
            real = known[memory, number]
            real = real.clone() if number < self.writes else real
        else:
            real = torch.empty(memory.size, dtype=torch.uint8, device=memory.device)
        for write in memory.writes[number : self.writes]:
            real = write.carry_out(memory, real, known)
        known[memory, self.writes] = real
        return self.of(real)

    def of(self, real: Tensor) -> Tensor:
        """The same view of real memory."""
        view: Any = torch.empty(0, dtype=self.dtype, device=real.device)
        view.set_(real.untyped_storage(), *self.layout)
        return view  # type: ignore[no-any-return]


@dataclass
class Write:
    """An operation that writes to a piece of memory.

    Attributes:
        operation: The operation.
        args: Its arguments, a `View` for each recorded tensor.
        kwargs: Its keyword arguments.
        output: Which of its results the memory belongs to; None for an argument's.
        generator: Where it draws random numbers from.
        state: The generator's state before it; None if it draws none.
    """

    operation: Callable[..., Any]
    args: Any
    kwargs: Any
    output: int | None
    generator: torch.Generator
    state: Tensor | None

    def carry_out(
        self, memory: Memory, real: Tensor, known: dict[tuple[Memory, int], Tensor]
    ) -> Tensor:
        """Writes to `real`, which stands for `memory`; returns what the result is in."""

        def tensor(view: View) -> Tensor:
            return view.of(real) if view.memory is memory else view.value(known)

        args, kwargs = tree_map_only(View, tensor, (self.args, self.kwargs))
        before = self.generator.get_state()
        if self.state is not None:
            self.generator.set_state(self.state)
        result = self.operation(*args, **kwargs)
        self.generator.set_state(before)
        if self.output is not None:
            storage = tensors_in(result)[self.output].untyped_storage()
            real = torch.empty(0, dtype=torch.uint8, device=memory.device)
            real.set_(storage)
        return real


class Recording(TorchDispatchMode):
    """Makes tensors on the meta device, and notes how they get their values.

    Random numbers are drawn as if the tensors were real, and thrown away, so that each
    tensor's are the ones that it would have got.

    On the meta device itself it leaves everything as it is.

    Args:
        device: Where the tensors would be made.

    Attributes:
        start: The state that the device's random numbers start from.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.generator = default_generator(device)
        self.start = self.generator.get_state()
        self.memories: dict[torch.UntypedStorage, Memory] = {}
        self.disguise = Disguise(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch imports its compiler, to keep it away from this class."""
        return False

    def __enter__(self) -> "Recording":
        super().__enter__()
        self.disguise.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.disguise.__exit__(*error)
        super().__exit__(*error)

    def value(self, tensor: Tensor) -> Tensor:
        """A recorded tensor's values; any other tensor comes back itself."""
        view = self.view(tensor)
        with _disable_current_modes():
            return view.value({}) if isinstance(view, View) else view

    def view(self, tensor: Tensor) -> View | Tensor:
        """What stands for a recorded tensor now; any other tensor for itself."""
        if not self.knows(tensor):
            return tensor
        memory = self.memories[tensor.untyped_storage()]
        offset = int(tensor.storage_offset())
        layout = (offset, tensor.size(), tensor.stride())
        return View(memory, len(memory.writes), tensor.dtype, layout)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is recorded."""
        return tensor.untyped_storage() in self.memories

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func._opname == "scalar_tensor" and kwargs.get("device") == META:
            kwargs["device"] = self.device  # torch makes it to go with a recorded one
        given = tensors_in((args, kwargs))
        makes_tensor = any("Tensor" in str(r.type) for r in func._schema.returns)
        if given:
            recorded = any(map(self.knows, given))
        else:
            recorded = makes_tensor and kwargs.get("device") in (None, self.device)
        if not recorded or self.device == META:
            return func(*args, **kwargs)
        written = written_to(func, args, kwargs)
        if makes_tensor and all(map(self.knows, written)):
            return self.record(func, args, kwargs, written)
        return self.now(func, *tree_map_only(Tensor, self.view, (args, kwargs)))

    def now(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carries out an operation at once, on real tensors."""
        known: dict[tuple[Memory, int], Tensor] = {}
        real = tree_map_only(View, lambda view: view.value(known), (args, kwargs))
        return func(*real[0], **real[1])

    def record(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """Carries out an operation on the meta device, and notes it."""
        for tensor in written:
            storage = tensor.untyped_storage()
            whole = tensor.is_contiguous() and tensor.nbytes == storage.nbytes()
            if whole and func._opname in OVERWRITING:
                self.memories[storage] = Memory(storage.nbytes(), self.device)
        views = tree_map_only(Tensor, self.view, (args, kwargs))
        generator, state = kwargs.get("generator") or self.generator, None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = generator.get_state()
            self.now(func, *views)
        args, kwargs = tree_map_only(Tensor, self.as_meta, (args, kwargs))
        if "device" in kwargs or not tensors_in((args, kwargs)):
            kwargs = {**kwargs, "device": META}
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:  # how large it is depends on values
            return self.now(func, *views)
        for tensor in written:
            write = Write(func, views[0], views[1], None, generator, state)
            self.memories[tensor.untyped_storage()].writes.append(write)
        for number, tensor in enumerate(tensors_in(result)):
            storage = tensor.untyped_storage()
            if storage not in self.memories:
                write = Write(func, views[0], views[1], number, generator, state)
                self.memories[storage] = Memory(storage.nbytes(), self.device, [write])
        return result

    def as_meta(self, tensor: Tensor) -> Tensor:
        """The tensor, or one of the same shape without memory."""
        return tensor if self.knows(tensor) else torch.empty_like(tensor, device=META)


class Disguise(TorchFunctionMode):
    """Lets recorded tensors pass for real ones, which torch initialises otherwise.

    Args:
        recording: What knows them.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = (
            bool(args) and isinstance(args[0], Tensor) and self.recording.knows(args[0])
        )
        if known and func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if known and func == Tensor.device.__get__:
            return self.recording.device
        if known and func in READING:
            args = (self.recording.value(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def default_generator(device: torch.device) -> torch.Generator:
    """Where random numbers on a device come from; the meta device has none of its own."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def written_to(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation changes."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            found += tensors_in(given)
    return found


def build_deferred(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make()` returns, initialised alike at every world size.

    Each rank draws the weights of the whole model bit for bit as one process does, one
    tensor at a time, and keeps its part of each: none holds more than its own model and
    one full tensor. To start from a checkpoint none of it is needed.

    Raises:
        ValueError: The ranks are seeded otherwise, or the default device is the meta
            device, which holds no weights.
    """
    check_seeds()
    if world_size() == 1:
        return make()
    generator = default_generator(torch.get_default_device())
    state = generator.get_state()
    model = make()
    generator.set_state(state)
    take_drawn(model, make)
    return model


def take_drawn(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Gives a model its parts of the weights that the whole model draws.

    Args:
        model: The model, or a part of it; its weights are filled in place.
        make: Makes the model, which is whole where this calls it.
    """
    with world_of(1), Recording(torch.get_default_device()) as recording:
        whole = make().state_dict()
    take_parts(model, lambda name: recording.value(whole[name]))
