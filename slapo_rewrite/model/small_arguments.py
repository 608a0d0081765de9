"""Builds a small model of a user's own class, by smaller arguments of its constructor.

A Hugging Face model has a configuration that can be made smaller (`small_config`). Another model is
made by a call in the schedule's `model(m)`. The integers in its arguments, and in configurations
among these, are replaced by smaller ones according to their names.

Also executed by its path, as `small_model`, so it imports torch, the standard library and
neighbouring files only.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from . import small_model
from .meta_build import on_meta

# Small numbers for arguments of constructors, by a part of their names; the first match counts.
HEADS = {"head_dim": 16, "head_size": 16, "dim_head": 16, "d_head": 16, "kv_head": 2, "head": 4}
COUNTS = {
    "layer": 12, "depth": 12, "expert_dim": 32, "expert": 4, "inner": 128, "ff": 128, "mlp": 128,
}  # fmt: skip
WIDTHS = {
    "hidden": 64, "dim": 64, "d_model": 64, "width": 64, "embd": 64, "embed": 64, "channel": 64,
}  # fmt: skip
DATA = {
    "vocab": 203, "class": 10, "block_size": 64, "seq": 64, "ctx": 64, "context": 64, "len": 64,
    "position": 64, "patch": 8, "image": 32, "img": 32,
}  # fmt: skip
SMALL = {**HEADS, **DATA, **COUNTS, **WIDTHS, "size": 64}
IN_RATIO = "<heads>"  # in a table: the numbers of heads keep their ratio
OTHER = {"": 64}  # for any name
FEW = {"layer": 4, "depth": 4}
# The tables to try. From the second on, sizes stay that inputs for the full model may rely on.
WAYS = (
    {**SMALL, **OTHER},
    {**HEADS, **COUNTS, **WIDTHS},
    {**COUNTS, **FEW, "hidden": 128},
    {**COUNTS, **FEW},
)
# Widths that are divided further if the vocabulary keeps its size.
NARROW, NARROWED = 4, {*WIDTHS, *OTHER, *(name for name, size in HEADS.items() if size == 16)}
DEEPEST = 3  # the depth of nested configurations

Build = Callable[..., nn.Module]


def small_number(name: str, default: float, small: Mapping[str, int] = SMALL) -> int | None:
    """A smaller number for an argument; None if its own may stay."""
    value = next((v for part, v in small.items() if part in name.lower()), None)
    return None if value is None or default <= value else value


def small_heads(counts: Mapping[str, int]) -> dict[str, int]:
    """Fewer heads in the same ratio; empty if all numbers are equal, or cannot be smaller.

    Grouped-query attention needs the ratio: packed layers are split in blocks of it.
    """
    heads = {
        name: count
        for name, count in counts.items()
        if "head" in name.lower()
        and not any(part in name.lower() for part in ("dim", "size"))
        and count > 0
    }
    if len({*heads.values()}) < 2:
        return {}
    fewest, most, common = min(heads.values()), max(heads.values()), math.gcd(*heads.values())
    by = [n for n in range(2, common + 1) if common % n == 0 and fewest >= 2 * n and most >= 4 * n]
    return {name: count // by[-1] for name, count in heads.items() if by}


def supply(
    schedule: Any, module: types.ModuleType, largest: int, full: nn.Module | None = None
) -> bool:
    """Adds a small model to a schedule that defines none, if the full one is too large.

    `largest` is the most parameters of a model that can be run, and `full` the model, if it is
    built already. Returns whether there is a model that can be run.
    """
    if hasattr(schedule, "verify_model") or hasattr(schedule, small_model.SMALL_BUILD):
        return True
    if full is None:
        with on_meta():
            full = schedule.model(module)
    sizes = (parameter.numel() for parameter in full.parameters())
    if hasattr(getattr(full, "config", None), "to_dict") or sum(sizes) <= largest:
        return True
    build = small_build(schedule, module, full, largest)
    if build is not None:
        setattr(schedule, small_model.SMALL_BUILD, build)
    return build is not None


def small_build(
    schedule: Any, module: types.ModuleType, full: nn.Module, most: int
) -> Build | None:
    """A function that builds a small model of the schedule's class, from any module that has it.

    It takes the module, and with `deep=True` keeps the number of layers. None if no smaller numbers
    give a model of the same classes that takes the inputs.
    """
    own = type(full)
    if vars(module).get(own.__name__) is not own:
        return None
    classes = _classes(full)
    for small in _tables():

        def build(
            m: types.ModuleType, *, deep: bool = False, small: Mapping[str, int] = small
        ) -> nn.Module:
            less = {name: n for name, n in small.items() if not (deep and name in FEW)}
            with _given_less(vars(m)[own.__name__], less):
                model: nn.Module = schedule.model(m)
            return model

        with contextlib.suppress(Exception), _apart():  # errors of the user's constructors
            with on_meta():
                made = build(module)
            if sum(p.numel() for p in made.parameters()) > most:
                continue
            if _classes(made) == classes:
                model = build(module)
                model(**small_model.training_inputs(schedule, model))
                return build
    return None


def _classes(model: nn.Module) -> set[tuple[str, str]]:
    """The classes of a model's modules, by name, since a function may define them repeatedly."""
    return {(cls.__module__, cls.__qualname__) for cls in map(type, model.modules())}


def _tables() -> Iterator[Mapping[str, int]]:
    for small in WAYS:
        if HEADS.keys() <= small.keys():
            yield {IN_RATIO: 0, **small}
        yield small
        if WIDTHS.keys() <= small.keys():
            yield {
                name: value // NARROW if name in NARROWED else value
                for name, value in small.items()
            }


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Isolates trials: they do not change random states, and record no autograd graph."""
    with small_model.drawing(0), small_model.one_thread(), torch.no_grad():
        yield


@contextlib.contextmanager
def _given_less(cls: type[nn.Module], small: Mapping[str, int]) -> Iterator[None]:
    """Makes the next call of a class's constructor use smaller numbers."""
    original: Any = cls.__init__
    patch: Any = mock.patch.object(cls, "__init__")

    def constructor(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        patch.stop()  # nested modules of the same class get the arguments as they are
        given = inspect.signature(original).bind(self, *args, **kwargs)
        given.apply_defaults()
        named = dict(list(given.arguments.items())[1:])
        given.arguments.update(_all_smaller(named, small, DEEPEST))
        original(*given.args, **given.kwargs)

    patch.new = constructor
    patch.start()
    try:
        yield
    finally:
        patch.stop()


def _all_smaller(named: Mapping[str, Any], small: Mapping[str, int], deep: int) -> dict[str, Any]:
    """The arguments of a call, or the attributes of a configuration, with smaller numbers."""
    numbers = {name: value for name, value in named.items() if type(value) is int}
    heads = small_heads(numbers) if IN_RATIO in small else {}
    return {
        name: heads[name] if name in heads else _smaller(name, value, small, deep)
        for name, value in named.items()
    }


def _smaller(name: str, value: Any, small: Mapping[str, int], deep: int) -> Any:
    """The replacement of an argument: a smaller number, or a configuration of smaller ones."""
    if type(value) is int:
        return small_number(name, value, small) or value
    if type(value) is dict and deep and all(isinstance(key, str) for key in value):
        return _all_smaller(value, small, deep - 1)
    if not deep or isinstance(value, (type, torch.Tensor, nn.Module)):
        return value
    if not hasattr(value, "__dict__") or callable(value):
        return value
    own = copy.copy(value)
    for key, item in _all_smaller(vars(value), small, deep - 1).items():
        object.__setattr__(own, key, item)  # works for frozen dataclasses as well
    return own
