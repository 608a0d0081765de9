"""Functions that change models for verification, or observe them while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_rewrite.groups import grouped

from .figures import tensors_in

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


# Words in the names of attributes with dropout rates.
RATES = ("dropout", "pdrop", "layerdrop")
# Attributes with the rates at which speech models mask their input.
MASKS = ("mask_time_prob", "mask_feature_prob")


def vary_constants(model: nn.Module) -> None:
    """Adds a little noise to constant tensors, such as the initial biases and norms' weights.

    All shards of a constant tensor are equal, so a wrong shard would not be noticed.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.numel() > 1:
                first = tensor.reshape(-1)[0]
                if bool((tensor == first).all()):
                    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float32)
                    tensor.add_(0.1 * noise.to(tensor.dtype))


def nudge(model: nn.Module) -> None:
    """Changes every weight by about one rounding error in float32."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.is_floating_point():
                signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
                tensor.mul_(1 + signs * torch.finfo(torch.float32).eps / 2)


# Functions that draw random tensors, and methods that fill a tensor with random numbers.
_DRAWING = ("rand", "randn", "rand_like", "randn_like")
_FILLING = ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_")


class _Float64(TorchFunctionMode):
    """Replaces float32 by float64 in calls; random numbers are still drawn in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        like = args[0].dtype if args and isinstance(args[0], Tensor) else torch.float64
        kind = kwargs.get("dtype") or like
        if name in _DRAWING and kind in (torch.float32, torch.float64):
            return func(*args, **{**kwargs, "dtype": torch.float32}).double()
        if name in _FILLING and args[0].dtype is torch.float64:
            return args[0].copy_(func(args[0].float(), *args[1:], **kwargs))
        if func is Tensor.float:
            func = Tensor.double
        elif func is not Tensor.view:  # with a dtype it reinterprets the bits

            def wider(value: Any) -> Any:
                return torch.float64 if value is torch.float32 else value

            args = tuple(map(wider, args))
            kwargs = {name: wider(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


class _Reseeding(TorchDispatchMode):
    seed: int

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(self.seed)  # for the CPU only, which is fast
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def drawn_alike(seed: int) -> Iterator[None]:
    """Reseeds torch's generator before each random operation inside.

    Stages run in separate processes, and a stage does not know how much earlier ones have drawn.
    """
    mode = _Reseeding()
    mode.seed = seed
    with mode:
        yield


@contextlib.contextmanager
def in_float64(wanted: bool = True) -> Iterator[None]:
    """Inside, float64 takes the place of float32, if `wanted`."""
    if not wanted:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


def change_weights(model: nn.Module, seed: int) -> None:
    """Overwrites a model's weights with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator))


def is_dropout(module: object) -> TypeGuard[nn.Dropout]:
    """Whether this is one of torch's dropout layers."""
    return isinstance(module, DROPOUTS)


def dropouts(
    model: nn.Module, *, configs: bool, masks: bool = False
) -> Iterator[tuple[Any, str, float]]:
    """All attributes with rates of dropout, or also of masks: (object, attribute, value)."""
    words = (*RATES, *MASKS) if masks else RATES
    seen: set[int] = set()
    for module in model.modules():
        holders: list[Any] = [module]
        config = getattr(module, "config", None)
        if configs and hasattr(config, "__dict__") and id(config) not in seen:
            seen.add(id(config))
            holders.append(config)
        for holder in holders:
            for name, value in list(vars(holder).items()):
                named = any(word in name for word in words)
                if is_dropout(holder):
                    named |= name == "p"
                if named and isinstance(value, float):
                    yield holder, name, value


def tie_groups(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    named = model.named_parameters(remove_duplicate=False)
    groups = grouped((id(parameter), name) for name, parameter in named)
    return [names for names in groups.values() if len(names) > 1]


@contextlib.contextmanager
def watching(model: nn.Module, seen: dict[tuple[str, int], Tensor]) -> Iterator[None]:
    """Records each module's first output tensor in `seen`, by path and number of the call."""
    paths = {id(module): path for path, module in model.named_modules() if path}
    calls: dict[str, int] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        path = paths.get(id(module))
        if path is not None:
            number = calls[path] = calls.get(path, -1) + 1
            for tensor in list(tensors_in(output).values())[:1]:
                seen[path, number] = tensor.detach().clone()

    # A global hook: torch skips its fused fast path for a module that has its own hook.
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
