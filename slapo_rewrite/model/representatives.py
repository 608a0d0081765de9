"""Elements of module lists that represent others: work grows with classes, not with layers.

A representative is run twice, and returns cached results for further layers. The result of a layer
depends on its arguments: if a `forward` calls some layers of a list with other arguments, because
of their numbers for example, these calls are run as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_rewrite.model.calls import forwards_instead
from slapo_rewrite.model.layer_kinds import LEFT, kinds_and_numbers, left_alone
from slapo_rewrite.model.layers import base_of
from slapo_rewrite.model.meta_device import unwatched
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.tree import Node, Tree


class Representatives:
    """The elements of each module list that are made and scheduled alike, descendants included."""

    def __init__(self, tree: Tree, asked: Mapping[str, Hashable]) -> None:
        self.tree = tree
        # For the first of several equal elements: the names of all of them.
        self.siblings: dict[str, tuple[str, ...]] = {}
        self._asked: dict[str, list[tuple[str, int]]] = {}
        numbers: dict[Hashable, int] = {}
        seen: dict[int, int] = {}
        for path, state in asked.items():
            number = seen.get(id(state))
            if number is None:
                number = seen[id(state)] = numbers.setdefault(state, len(numbers))
            for node in tree.nodes[path].outwards():
                if node.parent is not None and isinstance(node.parent.live, nn.ModuleList):
                    below = self._asked.setdefault(node.path, [])
                    below.append((path[len(node.path) :], number))
        # An element with a module that another parent shares is not equal to others.
        holders: dict[int, set[int]] = {}
        holding: set[int] = set()
        for node in reversed(tree.nodes.values()):  # submodules first
            if node.parent is not None and (id(node) in holding or node.parameters):
                holding.add(id(node.parent))
                holders.setdefault(id(node.live), set()).add(id(node.parent.live))
        self._shared = {live for live, above in holders.items() if len(above) > 1}
        self._kept: dict[str, Node] = {}
        self._elements: dict[str, dict[str, Node]] = {}
        # For each list, the layer in each place; None where the list holds None.
        self._runs: dict[str, list[Node | None]] = {}
        # The attributes that hold an element's index: the module and the attribute's name.
        self._numbers: dict[str, list[tuple[nn.Module, str]]] = {}
        self._keep(tree.root)

    def _keep(self, node: Node) -> None:
        self._kept[node.path] = node
        children = node.children
        if isinstance(node.live, nn.ModuleList):
            groups: dict[Any, list[Node]] = {}
            kinds, numbers = kinds_and_numbers(node)
            for child, kind in zip(children.values(), kinds, strict=True):
                below = tuple(sorted(self._asked.get(child.path, ())))
                is_shared = bool(self._shared) and any(
                    id(inner.live) in self._shared for inner in child.walk()
                )
                groups.setdefault((kind, below, is_shared and child.path), []).append(child)
            first = {child.name: group[0] for group in groups.values() for child in group}
            self._runs[node.path] = [first.get(name) for name in node.live._modules]
            children = {group[0].name: group[0] for group in groups.values()}
            self._elements[node.path] = children
            for group in groups.values():
                self.siblings[group[0].path] = tuple(c.name for c in group)
                self._numbers[group[0].path] = [
                    (inner.live, name)
                    for inner in group[0].walk()
                    for below, name in numbers
                    if inner.path[len(group[0].path) :] == below and name in vars(inner.live)
                ]
        for child in children.values():
            self._keep(child)

    @contextlib.contextmanager
    def reduced(self) -> Iterator[None]:
        """Reduces the tree to representatives, in the context."""
        nodes = self.tree.nodes
        whole = {path: nodes[path].children for path in self._elements}
        self.tree.nodes = self._kept
        for path, children in self._elements.items():
            nodes[path].children = children
        try:
            yield
        finally:
            self.tree.nodes = nodes
            for path, children in whole.items():
                nodes[path].children = children

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        """Replaces the live layers of lists by their representatives, in the context.

        A representative runs twice, since the input of the first layer differs from that of the
        second: it requires no gradient, or has another precision. It runs again for arguments that
        the others do not get.
        """
        lists = [
            (self._kept[path].live, [node.live if node else None for node in run])
            for path, run in self._runs.items()
        ]
        places: dict[nn.Module, Places] = {}
        for run in self._runs.values():
            there = [(number, node) for number, node in enumerate(run) if node is not None]
            first = {node.path: number for number, node in reversed(there)}
            for number, node in there:
                if node.children and base_of(node.cls) is None:
                    own = places.setdefault(node.live, Places([], self._numbers[node.path]))
                    own.further.append(number - first[node.path])
        with left_alone(lists), repeated(self.tree.root.live, places):
            yield


@dataclass(frozen=True)
class Places:
    """The places of a representative in a list."""

    further: list[int]  # their offsets from the layer's own place
    # The attributes that hold its index: the module and the attribute's name.
    numbers: Sequence[tuple[nn.Module, str]] = ()

    @contextlib.contextmanager
    def numbered(self, place: int) -> Iterator[None]:
        """Gives the layer the index of a place, in the context, for its entry of a cache."""
        own = [(module, name, getattr(module, name)) for module, name in self.numbers]
        for module, name, number in own:
            setattr(module, name, number + self.further[place])
        try:
            yield
        finally:
            for module, name, number in own:
                setattr(module, name, number)


@contextlib.contextmanager
def repeated(model: nn.Module, places: Mapping[nn.Module, Places]) -> Iterator[None]:
    """Runs representatives in the places of other layers, in the context."""
    calls = [(layer, _Calls(layer, own)) for layer, own in places.items()]

    def begin(model: nn.Module, args: Any) -> None:
        for _, called in calls:
            called.begin()

    handle = model.register_forward_pre_hook(begin)
    wrapped = {layer: functools.update_wrapper(c, c.forward) for layer, c in calls}
    try:
        with forwards_instead(wrapped):
            yield
    finally:
        handle.remove()


class _Calls:
    """The calls of a representative in one forward pass.

    It is called once for each of its places.
    """

    def __init__(self, layer: nn.Module, places: Places) -> None:
        self.forward, self.places = layer.forward, places
        self.begin()

    def begin(self) -> None:
        """Begins a forward pass."""
        self.left = len(self.places.further)
        self.shapes: dict[Hashable, list[Hashable]] = {}
        self.given: dict[Hashable, Any] = {}
        self.last: tuple[Sequence[Any], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        result = self._result(args, kwargs)
        if not self.left:
            self.begin()  # cached results would keep tensors alive that the model frees
        return result

    def _result(self, args: Any, kwargs: Any) -> Any:
        everything = (*args, *kwargs, *kwargs.values())
        if self.last is not None and _is_same(everything, self.last[0]):
            return self.last[1]
        with unwatched():  # these are not operations of the model
            way = _described((args, kwargs))
            shapes = tuple(tensor.shape for tensor in tensors((args, kwargs)))
        # Shapes are no part of the key: calls are equal on a rank as well, with smaller shards.
        known = self.shapes.setdefault(way, [])
        if len(known) < LEFT or shapes not in known:
            known.append(shapes)
            with self.places.numbered(-1 - self.left):
                self.given[way] = self.forward(*args, **kwargs)
        else:
            self.last = everything, self.given[way]
        return self.given[way]


def _is_same(given: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether a layer gets the same objects as before, none of which is a mutable container."""
    return len(given) == len(before) and all(
        one is other and not isinstance(one, (list, Mapping))
        for one, other in zip(given, before, strict=True)
    )


def _described(value: Any) -> Hashable:
    """A key for a layer's arguments, without the values of tensors."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    if isinstance(value, Mapping):
        return tuple((name, _described(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_described(item) for item in value)
    return type(value).__qualname__
