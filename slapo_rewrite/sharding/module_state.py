"""Restores what a model caches while it runs, such as a mask, after each run."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slapo_rewrite.model.held_state import used_by
from slapo_rewrite.model.meta_device import unwatched


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restores every module's attributes and buffers afterwards, so that runs do not interact.

    Caches (`functools.cache`) of the model's files and libraries are cleared before and after.
    """
    files = {type(module).__module__ for module in model.modules()}
    _forget(files)
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    held = [_copied(own) for _, own in before]
    with unwatched():
        values = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    try:
        yield
    finally:
        _forget(files)
        for (now, own), containers in zip(before, held, strict=True):
            now.clear()
            now.update(own)
            for container, content in containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        with unwatched(), torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _copied(own: dict[str, Any]) -> list[tuple[Any, Any]]:
    kinds = (dict, OrderedDict, list, set)  # hooks are in an OrderedDict
    return [(value, value.copy()) for value in own.values() if type(value) in kinds]


def _forget(modules: set[str]) -> None:
    """Clears the caches of functions and methods that modules define or use."""
    for name in modules & sys.modules.keys():
        for cache in _caches_in(name):
            cache.cache_clear()
    for cache in _caches_beside(frozenset(sys.modules[n] for n in modules & sys.modules.keys())):
        cache.cache_clear()


@functools.cache
def _caches_beside(
    modules: frozenset[types.ModuleType],
) -> list[functools._lru_cache_wrapper[Any]]:
    """The caches of libraries that modules use, such as einops.

    A tracked `Size` equals a plain integer and the `Size` of another run: all hit one cache entry.
    """
    near = used_by(modules)
    further = used_by(sys.modules[name] for name in near)
    return [cache for name in sorted(near | further) for cache in _caches_in(name)]


def _caches_in(name: str) -> Iterator[functools._lru_cache_wrapper[Any]]:
    """The caches of the functions and methods that a module defines."""
    known = list(vars(sys.modules[name]).values())
    known += [m for c in known if isinstance(c, type) for m in vars(c).values()]
    for function in (getattr(each, "__func__", each) for each in known):  # of static methods
        if getattr(function, "__module__", None) != name:
            continue
        cells = getattr(function, "__closure__", None) or ()  # a decorator may hold the cache
        for cell in (types.CellType(function), *cells):
            with contextlib.suppress(ValueError):  # raised by an empty cell
                if isinstance(cell.cell_contents, functools._lru_cache_wrapper):
                    yield cell.cell_contents
