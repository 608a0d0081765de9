"""Seeing a model's modules being called: `module.forward(x)` is as good a call as `module(x)`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

K = TypeVar("K")
Enter = Callable[[nn.Module, Any, Any], None]
Leave = Callable[[nn.Module, Any, Any], None]


@contextlib.contextmanager
def calls_watched(
    watched: Iterable[tuple[nn.Module, Enter | None, Leave | None]],
) -> Iterator[None]:
    """Has functions told of each call of modules meanwhile.

    Each is told before its module runs (itself, the arguments, the keyword arguments), and
    afterwards (itself, the arguments, the result).
    """
    watched = list(watched)
    handles: list[Any] = []
    with forward_as_call(module for module, _, _ in watched):
        try:
            for module, enter, leave in watched:
                if enter is not None:
                    handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                if leave is not None:
                    handles.append(module.register_forward_hook(leave))
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def calls_noted(modules: Mapping[K, nn.Module], leaving: bool = False) -> Iterator[list[K]]:
    """Notes which modules are called meanwhile, or return if so asked, by what they go by."""
    found: list[K] = []
    notes = [(module, lambda *_, key=key: found.append(key)) for key, module in modules.items()]
    with calls_watched((m, None, note) if leaving else (m, note, None) for m, note in notes):
        yield found


@contextlib.contextmanager
def forward_as_call(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Has `module.forward(x)` carried out as `module(x)` meanwhile, so that its hooks see it."""
    called: set[nn.Module] = set()  # their hooks are at work, and their `forward` comes next
    handles, calls = [], {}
    for module in dict.fromkeys(modules):
        handles.append(module.register_forward_pre_hook(lambda m, _: called.add(m), prepend=True))
        call = functools.partial(_call, module, module.forward, called)
        calls[module] = functools.update_wrapper(call, module.forward)
    try:
        with forwards_instead(calls):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def forwards_instead(functions: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Has modules run these functions meanwhile in the place of what `forward` is."""
    own = {module: vars(module).get("forward") for module in functions}
    for module, function in functions.items():
        vars(module)["forward"] = function
    try:
        yield
    finally:
        for module, forward in own.items():
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


def _call(
    module: nn.Module,
    forward: Callable[..., Any],
    called: set[nn.Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if module not in called:
        return module(*args, **kwargs)
    called.remove(module)
    return forward(*args, **kwargs)


def around_layer(cls: type, layer: type, enter: Enter, leave: Leave) -> type:
    """A class with the `forward` that `cls` puts around a layer's, and the layer's own watched.

    `super().forward(...)` in `cls` leads to the watched one. `enter` is told before it, as by
    `calls_watched`, and `leave` after it.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        enter(self, args, kwargs)
        output = layer.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        leave(self, args, output)
        return output

    return type(cls.__name__, (cls, type(layer.__name__, (layer,), {"forward": forward})), {})
