"""Which layers of a list are alike, and a model of which each list has a few of every kind.

The layers of a list are called one after the other, and those that are made alike do alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo_rewrite.model.tree import Node, Tree

# How many layers of a kind are left: what stands between two of them is seen then.
LEFT = 2
# Attributes of other types are no part of what tells layers apart.
PLAIN = frozenset({bool, int, float, str})


@contextlib.contextmanager
def left_alone(lists: Iterable[tuple[nn.Module, Sequence[nn.Module]]]) -> Iterator[None]:
    """Lists hold these modules alone, numbered anew, for as long as it lasts."""
    whole = []
    for listed, left in lists:
        modules: dict[str, Any] = listed._modules
        whole.append((modules, dict(modules)))
        modules.clear()
        modules.update((str(number), module) for number, module in enumerate(left))
    try:
        yield
    finally:
        for modules, before in whole:
            modules.clear()
            modules.update(before)


def kinds_of(node: Node) -> list[Any]:
    """Of each element: what it is, and its plain attributes but for those that are its number."""
    return kinds_and_numbers(node)[0]


def kinds_and_numbers(node: Node) -> tuple[list[Any], set[tuple[str, str]]]:
    """`kinds_of`, and which attributes are an element's number: by path from it and by name."""
    children = list(node.children.values())
    found = [_plain_attributes(child) for child in children]
    # Most attributes are the same in all, and tell no two apart: modules are compared at once.
    apart = {
        (below, name)
        for each in found
        for below in each.keys() | found[0].keys()
        if (own := each.get(below, {})) != (first := found[0].get(below, {}))
        for name, _ in own.items() ^ first.items()
    }
    numbers = {key for key in apart if _is_number(*key, found)}
    apart -= numbers
    return [
        (child.kind, frozenset((b, n, each[b][n]) for b, n in apart if b in each and n in each[b]))
        for child, each in zip(children, found, strict=True)
    ], numbers


def _plain_attributes(element: Node) -> dict[str, dict[str, Any]]:
    """The plain attributes of an element and of what is below, by path from it and by name."""
    start = len(element.path)
    return {
        inner.path[start:]: {n: v for n, v in vars(inner.live).items() if type(v) in PLAIN}
        for inner in element.walk()
    }


def _is_number(below: str, name: str, found: Sequence[Mapping[str, Mapping[str, Any]]]) -> bool:
    """Whether an attribute is the element's number, counted from anywhere."""
    values = [
        (each[below][name], number)
        for number, each in enumerate(found)
        if name in each.get(below, ())
    ]
    if any(type(value) is not int for value, _ in values):
        return False
    return len({value - number for value, number in values}) == 1


# Tells what each element of a list is: alike where it is equal.
Kinds = Callable[[Node], Sequence[Any]]


def lists_of(tree: Tree) -> list[Node]:
    """The lists of several modules that stand in no other list."""
    return [
        node
        for node in tree.nodes.values()
        if isinstance(node.live, nn.ModuleList)
        and len(node.children) > 1
        and not any(segment.isdigit() for segment in node.path.split("."))
    ]


@dataclass(frozen=True)
class Fold:
    """Of which layers of a list a few are left."""

    left: tuple[int, ...]  # the numbers of those that are
    # For each layer the place among these of the one that stands for it.
    stands_for: tuple[int, ...]


def folds_of(lists: Iterable[Node], kinds: Kinds = kinds_of) -> dict[str, Fold]:
    """What is left of each list: of each kind the first layers.

    Lists of one length are taken apart alike, as one number says of them; `kinds` tells the kinds
    of a list's elements.
    """
    told = [(node, kinds(node)) for node in lists]
    return {
        node.path: fold(list(zip(*(k for _, k in told if len(k) == len(own)), strict=True)))
        for node, own in told
    }


def fold(kinds: Sequence[Any]) -> Fold:
    """What is left of layers of these kinds."""
    kept: dict[Any, list[int]] = {}
    for number, kind in enumerate(kinds):
        if len(kept.setdefault(kind, [])) < LEFT:
            kept[kind].append(number)
    left = sorted(n for numbers in kept.values() for n in numbers)
    places = {number: place for place, number in enumerate(left)}
    return Fold(
        tuple(left),
        tuple(
            places[number if number in places else kept[kind][-1]]
            for number, kind in enumerate(kinds)
        ),
    )


def all_left(folds: Mapping[str, Fold]) -> dict[str, Fold]:
    """The same lists with all layers, each of which stands for itself."""
    numbers = {path: tuple(range(len(fold.stands_for))) for path, fold in folds.items()}
    return {path: Fold(own, own) for path, own in numbers.items()}


def shortened(model: nn.Module, folds: Mapping[str, Fold]) -> dict[str, list[nn.Module]]:
    """Leaves out the other layers of a model, for good, and says which are left in each list."""
    layers = {}
    for path, each in folds.items():
        listed = model.get_submodule(path)
        layers[path] = [listed.get_submodule(str(number)) for number in each.left]
    for path, modules in layers.items():
        listed = model.get_submodule(path)
        listed._modules.clear()
        listed._modules.update({str(n): module for n, module in enumerate(modules)})
    return layers
