"""What verification changes in models, or reads from them, while it runs them."""

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


# Attributes with the rate at which something is left out at random.
RATES = ("dropout", "pdrop", "layerdrop")
# And those at which models of speech mask what they hear.
MASKS = ("mask_time_prob", "mask_feature_prob")


def vary_constants(model: nn.Module) -> None:
    """Adds a little noise to weights that are all alike, as biases and norms are at the start.

    The parts of a constant tensor are equal, so a wrong part would not show.
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
    """Makes every weight another by about one rounding in float32."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.is_floating_point():
                signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
                tensor.mul_(1 + signs * torch.finfo(torch.float32).eps / 2)


# What draws numbers, and what fills a tensor with them.
_DRAWING = ("rand", "randn", "rand_like", "randn_like")
_FILLING = ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_")


class _Float64(TorchFunctionMode):
    """Whatever asks for float32 gets float64; random numbers are those that float32 would get."""

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
        elif func is not Tensor.view:  # the same bits by another name

            def wider(value: Any) -> Any:
                return torch.float64 if value is torch.float32 else value

            args = tuple(map(wider, args))
            kwargs = {name: wider(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


class _Reseeding(TorchDispatchMode):
    seed: int

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(self.seed)  # the CPU alone, and fast
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def drawn_alike(seed: int) -> Iterator[None]:
    """Whatever draws from torch's generator inside, draws what it would draw first.

    Stages draw in processes of their own: none knows how much those before it have drawn.
    """
    mode = _Reseeding()
    mode.seed = seed
    with mode:
        yield


@contextlib.contextmanager
def in_float64(wanted: bool = True) -> Iterator[None]:
    """What is computed inside has float64 where it would have float32."""
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
    """Gives a model other weights than it was built with."""
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
    """Where dropout probabilities are kept, and those of masks: (object, attribute, value)."""
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
    """Names of the same parameter, for every parameter that has several."""
    named = model.named_parameters(remove_duplicate=False)
    groups = grouped((id(parameter), name) for name, parameter in named)
    return [names for names in groups.values() if len(names) > 1]


@contextlib.contextmanager
def watching(model: nn.Module, seen: dict[tuple[str, int], Tensor]) -> Iterator[None]:
    """Fills `seen` with each module's first output tensor, by path and number of the call."""
    paths = {id(module): path for path, module in model.named_modules() if path}
    calls: dict[str, int] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        path = paths.get(id(module))
        if path is not None:
            number = calls[path] = calls.get(path, -1) + 1
            for tensor in list(tensors_in(output).values())[:1]:
                seen[path, number] = tensor.detach().clone()

    # For all modules at once: one that has a hook of its own is fused no more.
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
