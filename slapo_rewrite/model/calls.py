"""Watches the calls of a model's modules, by `module(x)` and by `module.forward(x)`."""

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
    """Calls functions around each call of modules in the context.

    `Enter` is called before the module runs, with the module, its arguments and keyword arguments;
    `Leave` afterwards, with the module, its arguments and its result.
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
    """Records the keys of modules in the order of their calls; of their returns if `leaving`."""
    found: list[K] = []
    notes = [(module, lambda *_, key=key: found.append(key)) for key, module in modules.items()]
    with calls_watched((m, None, note) if leaving else (m, note, None) for m, note in notes):
        yield found


@contextlib.contextmanager
def forward_as_call(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Makes `module.forward(x)` run `module(x)` in the context, so that the module's hooks run."""
    called: set[nn.Module] = set()  # modules whose hooks are running, before `forward`
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
    """Replaces `forward` of modules by these functions in the context."""
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
    """A subclass of `cls` and of `layer` that watches the layer's own `forward`.

    `super().forward(...)` in `cls` calls the watched one. `enter` and `leave` are called before and
    after it, as by `calls_watched`.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        enter(self, args, kwargs)
        output = layer.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        leave(self, args, output)
        return output

    return type(cls.__name__, (cls, type(layer.__name__, (layer,), {"forward": forward})), {})
