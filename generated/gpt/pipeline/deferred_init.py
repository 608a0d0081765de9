# Written by slapo-rewrite 0.1.0 for gpt.py; rewrite.json says from what.
"""Building a model of whose parameters only some are kept, with their right values.

`build_deferred` does what `loading.build` does, in less memory.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# What these say of a tensor does not depend on its values.
OF_SIZES = {"size", "dim", "stride", "numel", "is_contiguous", "is_floating_point"}
OF_SIZES |= {"__get__", "__len__", "__hash__", "untyped_storage"}


class Sparing(TorchFunctionMode):
    """Constructs modules; of their parameters, only those of some numbers have memory.

    Parameters are numbered as modules register them. The others have memory only while a
    function is called with them: it writes to them and draws its random numbers as ever,
    and what it wrote is lost.

    Args:
        kept: The numbers of those that are kept.

    Attributes:
        numbers: The numbers of all parameters, by what they are stored in.
        read: Those that are not kept, and that something else was made of: it is wrong.
    """

    def __init__(self, kept: set[int]) -> None:
        super().__init__()
        self.kept, self.thread = kept, threading.get_ident()
        self.numbers: dict[torch.UntypedStorage, int] = {}
        self.sizes: dict[torch.UntypedStorage, int] = {}
        self.read: set[int] = set()

    def __enter__(self) -> "Sparing":
        self.hook = register_module_parameter_registration_hook(self.register)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.hook.remove()

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Numbers a parameter; takes its memory, unless it is kept."""
        storage = parameter.untyped_storage()
        if storage not in self.numbers and threading.get_ident() == self.thread:
            self.numbers[storage] = len(self.numbers)
            if self.numbers[storage] not in self.kept and storage.resizable():
                self.sizes[storage] = storage.nbytes()
                storage.resize_(0)

    def numbers_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of those tensors that are parameters, or share memory with one."""
        stored = {tensor.untyped_storage() for tensor in tensors}
        return {self.numbers[storage] for storage in stored & self.numbers.keys()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage() for tensor in tensors_in((args, kwargs))}
        spared = given & self.sizes.keys()
        for storage in spared:
            storage.resize_(self.sizes[storage])
        result = func(*args, **kwargs)
        reads = spared and self.reads(func.__name__, args, given, result)
        for storage in spared:
            if reads:  # it may still be looked at
                self.read.add(self.numbers[storage])
                del self.sizes[storage]
            else:
                storage.resize_(0)
        return result

    def reads(
        self, name: str, args: Any, given: set[torch.UntypedStorage], result: Any
    ) -> bool:
        """Whether a function may have used values that are missing.

        Args:
            name: The function's name.
            args: What it was called with by place.
            given: Where all tensors that it was called with are stored.
            result: What it gave.
        """
        if name in OF_SIZES or name.startswith("new_") or name.endswith("_like"):
            return False
        made = {tensor.untyped_storage() for tensor in tensors_in(result)}
        if made:  # itself, or a view of it
            return not made <= self.sizes.keys()
        written = tensors_in(args[:1]) if name == "__setitem__" else ()
        changed = {tensor.untyped_storage() for tensor in written} or given
        return result is not None or not changed <= self.sizes.keys()


def construct(
    make: Callable[[], nn.Module], wanted: Callable[[Any], Iterable[Tensor]]
) -> Any:
    """The model that `make()` returns, with those of its parameters that are wanted.

    The others have their shapes and no memory, and are not to be used. Buffers and other
    tensors are all there. Parameters that others are made of are there meanwhile.

    Args:
        make: Makes the model. It is called several times, at first on the meta device,
            then from the same state of torch's random numbers.
        wanted: Gives the tensors that are wanted of a model.
    """
    if torch.get_default_device().type == "meta":
        return make()
    states = random_states()
    try:
        with torch.device("meta"), Sparing(set()) as sparing:
            kept = sparing.numbers_of(wanted(make()))
    except Exception:  # the constructor asks for values
        kept = set()
    while True:
        restore(states)
        needed: set[int] = set()
        with Sparing(kept) as sparing:
            try:
                model = make()
                needed = sparing.numbers_of(wanted(model))
            except Exception:
                if not sparing.read:
                    raise
        needed |= sparing.read
        if needed <= kept:
            return model
        kept = kept | needed


def random_states() -> list[tuple[torch.Generator, Tensor]]:
    """Where random numbers come from, on the CPU and the default device, and how now."""
    devices = {torch.device("cpu"), torch.get_default_device()}
    generators = [default_generator(device) for device in devices]
    return [(generator, generator.get_state()) for generator in generators]


def restore(states: list[tuple[torch.Generator, Tensor]]) -> None:
    """Lets random numbers go on from earlier states."""
    for generator, state in states:
        generator.set_state(state)


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
