"""Finds equal layers of lists, and reduces each list of a model to a few layers of every kind.

The layers of a list are called one after the other. Layers that are made alike compute alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo_rewrite.model.tree import Node, Tree

# How many layers of a kind are kept: two show what happens between layers.
LEFT = 2
# Only attributes of these types distinguish layers.
PLAIN = frozenset({bool, int, float, str})


@contextlib.contextmanager
def left_alone(lists: Iterable[tuple[nn.Module, Sequence[nn.Module | None]]]) -> Iterator[None]:
    """Reduces lists to these modules, renumbered, in the context."""
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
    """A key for each element: its kind, and its plain attributes other than its index."""
    return kinds_and_numbers(node)[0]


def kinds_and_numbers(node: Node) -> tuple[list[Any], set[tuple[str, str]]]:
    """`kinds_of`, and the attributes that are an element's index: relative path and name."""
    children = list(node.children.values())
    found = [_plain_attributes(child) for child in children]
    # Most attributes are equal in all elements, so whole modules are compared first.
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
    """The plain attributes of an element and its descendants, by relative path and name."""
    start = len(element.path)
    return {
        inner.path[start:]: {n: v for n, v in vars(inner.live).items() if type(v) in PLAIN}
        for inner in element.walk()
    }


def _is_number(below: str, name: str, found: Sequence[Mapping[str, Mapping[str, Any]]]) -> bool:
    """Whether an attribute is the element's index plus a constant."""
    values = [
        (each[below][name], number)
        for number, each in enumerate(found)
        if name in each.get(below, ())
    ]
    if any(type(value) is not int for value, _ in values):
        return False
    return len({value - number for value, number in values}) == 1


# Returns a key for each element of a list, equal for equal elements.
Kinds = Callable[[Node], Sequence[Any]]


def lists_of(tree: Tree) -> list[Node]:
    """The module lists of several elements that are not inside another list."""
    return [
        node
        for node in tree.nodes.values()
        if isinstance(node.live, nn.ModuleList)
        and len(node.children) > 1
        and not any(segment.isdigit() for segment in node.path.split("."))
    ]


@dataclass(frozen=True)
class Fold:
    """A list of layers, reduced to a few of each kind."""

    left: tuple[int, ...]  # the numbers of the layers that are kept
    # For each layer, the position in `left` of its representative.
    stands_for: tuple[int, ...]


def folds_of(lists: Iterable[Node], kinds: Kinds = kinds_of) -> dict[str, Fold]:
    """Reduces each list to the first layers of each kind.

    Lists of equal length are reduced together, since one configuration value is the length of all.
    `kinds` returns the keys of a list's elements.
    """
    told = [(node, kinds(node)) for node in lists]
    return {
        node.path: fold(list(zip(*(k for _, k in told if len(k) == len(own)), strict=True)))
        for node, own in told
    }


def fold(kinds: Sequence[Any]) -> Fold:
    """Reduces a list of layers, given their keys."""
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
    """The same lists with all layers, each its own representative."""
    numbers = {path: tuple(range(len(fold.stands_for))) for path, fold in folds.items()}
    return {path: Fold(own, own) for path, own in numbers.items()}


def shortened(model: nn.Module, folds: Mapping[str, Fold]) -> dict[str, list[nn.Module]]:
    """Removes the other layers of a model permanently; returns the kept layers of each list."""
    layers = {}
    for path, each in folds.items():
        listed = model.get_submodule(path)
        layers[path] = [listed.get_submodule(str(number)) for number in each.left]
    for path, modules in layers.items():
        listed = model.get_submodule(path)
        listed._modules.clear()
        listed._modules.update({str(n): module for n, module in enumerate(modules)})
    return layers
