"""A model that is built again, without the layers that nothing is to be learnt from.

Where one model has told which layers of its lists are alike, another that is made by the same code
need not make them all: the constructors of the others are not run, and a module without parameters
stands in their places.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.model.layer_kinds import Fold
from slapo_rewrite.model.tree import Tree


class LeftOut(nn.Module):
    """Stands where a layer was not made."""


def built_short(build: Callable[[], nn.Module], tree: Tree, folds: Mapping[str, Fold]) -> nn.Module:
    """Builds a model of which lists have `LeftOut`s in the places of layers that are not left.

    Args:
        build: Builds it, by the code that built the other one.
        tree: The other one's.
        folds: Which of its layers are left.

    Returns:
        The model; with all its layers where they cannot be left out.

    Raises:
        ModelError: It cannot be built.
    """
    wanted = _wanted(tree, folds)
    if wanted is None:
        return build()
    try:
        with _making(wanted):
            model = build()
    except errors.ModelError:  # a constructor may look at the layers
        return build()
    return model if _is_short(model, folds) else build()


def filled(model: nn.Module, folds: Mapping[str, Fold]) -> None:
    """Puts the layers that are left into the places of those that they stand for."""
    for path, fold in folds.items():
        modules = model.get_submodule(path)._modules
        for number, place in enumerate(fold.stands_for):
            if isinstance(modules[str(number)], LeftOut):
                modules[str(number)] = modules[str(fold.left[place])]


def full_names(sizes: Mapping[str, int], folds: Mapping[str, Fold]) -> dict[str, int]:
    """The parameters of a full model, of those of its layers that are left, by the same names."""
    found = {}
    for name, size in sizes.items():
        listed = next((path for path in folds if name.startswith(f"{path}.")), None)
        if listed is None:
            found[name] = size
            continue
        number, _, rest = name.removeprefix(f"{listed}.").partition(".")
        fold = folds[listed]
        for other, place in enumerate(fold.stands_for):
            if fold.left[place] == int(number):
                found[f"{listed}.{other}.{rest}"] = size
    return found


def _wanted(tree: Tree, folds: Mapping[str, Fold]) -> dict[type, list[bool]] | None:
    """For each class of layers which of its instances are made; None where that is not known."""
    found: dict[type, list[bool]] = {}
    seen: set[int] = set()
    for path, fold in folds.items():
        children = [tree.nodes[path].children[str(n)] for n in range(len(fold.stands_for))]
        if any(name.startswith(f"{path}.") for name in tree.ties):
            return None  # a parameter is another module's as well
        for number, child in enumerate(children):
            if id(child.live) in seen:
                return None
            seen.add(id(child.live))
            found.setdefault(child.cls, []).append(number in fold.left)
    return found


@contextlib.contextmanager
def _making(wanted: Mapping[type, list[bool]]) -> Iterator[None]:
    """Of some classes only the wanted instances are made meanwhile, in this order."""
    with contextlib.ExitStack() as stack:
        for cls, made in wanted.items():
            instead = _constructor(cls, iter(made))
            stack.enter_context(patch.object(cls, "__init__", instead))
        yield


def _constructor(cls: type, made: Iterator[bool]) -> Callable[..., None]:
    original: Any = cls.__init__  # type: ignore[misc]

    # Called as it is, it is no call of its own among those that lead to a module.
    @functools.wraps(original)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if type(self) is not cls or next(made, True):
            original(self, *args, **kwargs)
        else:
            nn.Module.__init__(self)
            self.__class__ = LeftOut

    return __init__


def _is_short(model: nn.Module, folds: Mapping[str, Fold]) -> bool:
    """Whether those layers are there that are left, and no others, and nothing else is missing."""
    out = sum(isinstance(module, LeftOut) for module in model.modules())
    for path, fold in folds.items():
        try:
            listed = model.get_submodule(path)
        except AttributeError:
            return False
        made = [not isinstance(module, LeftOut) for module in listed.children()]
        if made != [number in fold.left for number in range(len(fold.stands_for))]:
            return False
        out -= made.count(False)
    return out == 0
