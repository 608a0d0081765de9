"""Modules that a reader of their source cannot tell apart: one of them is looked at for all."""

from __future__ import annotations

import types
from collections.abc import Hashable

import torch
from torch import nn

from slapo_rewrite.code.evaluate import is_plain
from slapo_rewrite.code.facts import dotted
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import HOOKS


class Fingerprints:
    """One number for all modules of a kind whose attributes are equal, all the way down."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[str, int] = {}

    def of(self, node: Node) -> int:
        """The number of a module."""
        if node.path not in self._known:
            held = tuple((n, self.of(child)) for n, child in node.children.items())
            attributes = {n: v for n, v in vars(node.live).items() if not n.startswith("_")}
            # What counts the layers tells no layer from another; an option of torch's modules does.
            counts = not node.cls.__module__.startswith("torch.")
            own = tuple(
                (n, "index" if counts and type(v) is int and _is_index(node, n, v) else _seen(v))
                for n, v in attributes.items()
            )
            hooks = tuple(len(getattr(node.live, name)) for name in HOOKS)
            key = (node.cls, node.kind, own, held, hooks, tuple(node.buffers))
            self._known[node.path] = self._numbers.setdefault(key, len(self._numbers))
        return self._known[node.path]


def _is_index(node: Node, name: str, value: int) -> bool:
    """Whether an attribute is the number of a layer around it, and not equal to that by chance.

    By chance, the same module of a layer beside it has the same.
    """
    steps: list[str] = []
    for above in node.outwards():
        if above.name == str(value) and above.parent is not None:
            beside = above.parent.children
            other = beside.get(str(value + 1)) or beside.get(str(value - 1))
            other = other.at(".".join(reversed(steps))) if other is not None else None
            if other is None or vars(other.live).get(name) != value:
                return True
        steps.append(above.name)
    return False


def _seen(value: object) -> Hashable:
    """What a reader sees of an attribute."""
    if is_plain(value):
        return type(value), repr(value)
    if isinstance(value, nn.Module | torch.Tensor):
        return dotted(type(value))
    if isinstance(value, types.MethodType):
        return value.__name__
    if callable(value):
        return dotted(value) or id(value)
    return id(value)
