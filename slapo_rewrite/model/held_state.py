"""The state of a model beside parameters and buffers, to find what a training step changes."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from slapo_rewrite.code.own_files import is_own

# The attributes of every module, and the `forward` that replaces its own while it is watched.
_OF_TORCH = {*vars(nn.Module()), "forward"}


# Libraries that hold no state of a model.
LEFT_ALONE = {"numpy", "slapo_rewrite", "torch", "transformers"}


def held(module: nn.Module, file: types.ModuleType) -> dict[tuple[str, str], bytes]:
    """The state of a module, its submodules and the user's files, by place and name.

    The state of a file that is only used by another one counts as that file's.
    """
    named = dict(module.named_modules())
    homes = {type(each).__module__ for each in named.values()} & sys.modules.keys()
    own = {n: sys.modules[n] for n in homes if _is_users(n, file)} | {file.__name__: file}
    beside = _beside(own.values(), file)
    held_in: list[tuple[str, str, Any]] = [(each.__name__, "", each) for each in own.values()]
    for near in beside:
        further = [each for each in _beside([near], file) if each.__name__ not in own]
        held_in.append((near.__name__, "", near))
        held_in += [(near.__name__, f"{each.__name__}.", each) for each in further]
    for place, prefix, home in [*held_in]:
        for name, cls in vars(home).items():
            if isinstance(cls, type) and cls.__module__ == home.__name__:
                held_in.append((place, f"{prefix}{name}.", cls))
    held_in += [(path, "", each) for path, each in named.items()]
    return {
        (place, f"{prefix}{name}"): _worth(value)
        for place, prefix, holder in held_in
        for name, value in vars(holder).items()
        if name not in _OF_TORCH
        and not name.startswith("__")
        # Tensors computed from parameters at run time, as by weight norm.
        and not any(own.startswith(f"{name}_") for own in getattr(holder, "_parameters", ()))
    }


def used_by(modules: Iterable[types.ModuleType]) -> set[str]:
    """The modules, of libraries or the user, that define the objects in some modules."""
    spaces = {module.__name__: vars(module) for module in modules}
    found = {home_of(value) for space in spaces.values() for value in space.values()}
    known = sys.stdlib_module_names | LEFT_ALONE
    return {n for n in found & sys.modules.keys() - spaces if n.partition(".")[0] not in known}


def home_of(value: object) -> str:
    """The module that defines an object, or the module itself; '' if unknown."""
    name = getattr(value, "__module__", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) else ""


def _beside(modules: Iterable[types.ModuleType], file: types.ModuleType) -> list[types.ModuleType]:
    """The user's modules that some modules use."""
    return [sys.modules[name] for name in sorted(used_by(modules)) if _is_users(name, file)]


def _is_users(name: str, file: types.ModuleType) -> bool:
    """Whether a module is the user's own, or of the same library as the model's file."""
    library, of_file = (each.partition(".")[0] for each in (name, file.__name__))
    lies = getattr(sys.modules[name], "__file__", None) or ""
    return library not in LEFT_ALONE and (library == of_file or is_own(lies))


def _worth(value: object) -> bytes:
    """A fingerprint of a value, which changes with it as far as it can be pickled."""
    buffer = io.BytesIO()
    with contextlib.suppress(Exception):  # of foreign classes
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles the contents of objects; modules, classes and unpicklable objects by `id`."""

    def persistent_id(self, given: Any) -> Any:
        if isinstance(given, torch.Tensor) and not given.is_meta:
            return bytes(given.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
        if isinstance(given, types.FunctionType):
            cells = [cell.cell_contents for cell in given.__closure__ or ()]
            return id(given), vars(given), cells, given.__defaults__, given.__kwdefaults__
        return id(given) if isinstance(given, type | nn.Module | types.ModuleType) else None

    def reducer_override(self, given: Any) -> Any:
        try:
            made = given.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # a lock, for example
            made = ""
        return made if isinstance(made, tuple) else (str, (str(id(given)),))
