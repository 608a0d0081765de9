"""Builds a model again without layers that are equal to others.

Once one model shows which layers of its lists are equal, another model of the same code need not
make them all. The constructors of the others are skipped, and a module without parameters takes
their places.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.model.layer_kinds import Fold, Kinds, all_left, folds_of, kinds_of, lists_of
from slapo_rewrite.model.tree import Tree


class LeftOut(nn.Module):
    """A placeholder for a layer of class `left` that was not made."""

    left: type


@dataclass(frozen=True)
class Shortening:
    """Which layers of a model are made."""

    folds: Mapping[str, Fold]  # how each list is reduced, by path
    # For each class of layers, which of its instances are made, in order; None if that is not
    # known, and all are made.
    wanted: Mapping[type, Sequence[bool]] | None

    @classmethod
    def of(cls, tree: Tree, kinds: Kinds = kinds_of) -> Shortening:
        """Decides from one model which layers other models of the same code need."""
        folds = folds_of(lists_of(tree), kinds)
        return cls(folds, _wanted(tree, folds))

    def by(self, instead: Callable[[type], type]) -> Shortening:
        """The same for a model of other classes, which `instead` maps to."""
        if self.wanted is None:
            return self
        return replace(self, wanted={instead(cls): made for cls, made in self.wanted.items()})

    def undone(self) -> Shortening:
        """A shortening by which all layers are made."""
        return Shortening(all_left(self.folds), None)

    def built(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Builds a model with `LeftOut` modules in the places of layers that are not needed.

        It has all layers if they cannot be left out.
        """
        if self.wanted is None:
            return build()
        try:
            with _making(self.wanted):
                model = build()
        except errors.ModelError:  # a constructor may look at the layers
            return build()
        return model if self.is_of(model) else build()

    def is_of(self, model: nn.Module) -> bool:
        """Whether a model has exactly the needed layers, and placeholders for the others only."""
        out = sum(isinstance(module, LeftOut) for module in model.modules())
        for path, fold in self.folds.items():
            try:
                listed = model.get_submodule(path)
            except AttributeError:
                return False
            made = [not isinstance(module, LeftOut) for module in listed.children()]
            if made != [number in fold.left for number in range(len(fold.stands_for))]:
                return False
            out -= made.count(False)
        return out == 0


# Leaves nothing out.
ALL = Shortening({}, None)


def filled(model: nn.Module, folds: Mapping[str, Fold]) -> None:
    """Replaces placeholders by their representatives."""
    for path, fold in folds.items():
        modules = model.get_submodule(path)._modules
        for number, place in enumerate(fold.stands_for):
            if isinstance(modules[str(number)], LeftOut):
                modules[str(number)] = modules[str(fold.left[place])]


def full_names(sizes: Mapping[str, int], folds: Mapping[str, Fold]) -> dict[str, int]:
    """The parameters of a full model, given those of its reduced lists, by the same names."""
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
    """For each class of layers, which of its instances are made; None if that is not known."""
    found: dict[type, list[bool]] = {}
    seen: set[int] = set()
    for path, fold in folds.items():
        children = [tree.nodes[path].children[str(n)] for n in range(len(fold.stands_for))]
        if any(name.startswith(f"{path}.") for name in tree.ties):
            return None  # a parameter is tied to another module
        for number, child in enumerate(children):
            if id(child.live) in seen:
                return None
            seen.add(id(child.live))
            found.setdefault(child.cls, []).append(number in fold.left)
    return found


@contextlib.contextmanager
def _making(wanted: Mapping[type, Sequence[bool]]) -> Iterator[None]:
    """Makes only the wanted instances of some classes, in their order, in the context."""
    with contextlib.ExitStack() as stack:
        for cls, made in wanted.items():
            instead = _constructor(cls, iter(made), wanted)
            stack.enter_context(patch.object(cls, "__init__", instead))
        yield


def _constructor(cls: type, made: Iterator[bool], classes: Collection[type]) -> Callable[..., None]:
    original: Any = cls.__init__  # type: ignore[misc]

    # As an `__init__` of the same object, its frame does not show in recorded call stacks.
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        counts = next(c for c in type(self).__mro__ if c in classes) is cls  # or as a subclass's
        if not counts or next(made, True):
            original(self, *args, **kwargs)
        else:
            nn.Module.__init__(self)
            self.__class__, self.left = LeftOut, type(self)

    return __init__
