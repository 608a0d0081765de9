"""Analyses a small model in place of one that does not run without values.

Some models branch on values: how many tokens an expert got, whether any token attends to all. The
small twin that verification runs has values. It consists of the same classes, so the results for
it, attributes of classes and places in files, hold for the model as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from slapo_rewrite.model.small_model import seed_torch
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.sharding.kv_replication import width
from slapo_rewrite.sharding.propagate import Records, propagate
from slapo_rewrite.sharding.types import (
    CannotFollow,
    LayerKey,
    ShardingRequest,
    ShardingResult,
    layer_key,
)


class CannotStandIn(Exception):
    """The small model does not have the model's structure."""


class StandIn:
    """Analyses a small model, and translates the results to the full model.

    Args:
        tree: The full model.
        treated: What the schedule asks of each of its module paths.
        make: Makes the small model, with weights, and the keyword arguments of a training step.

    Raises:
        CannotStandIn: There is no small model, or its structure is not the full model's.
    """

    def __init__(
        self,
        tree: Tree,
        treated: Mapping[str, Hashable],
        make: Callable[[], tuple[nn.Module, dict[str, Any]]],
    ) -> None:
        try:
            with torch.random.fork_rng(devices=[]):
                seed_torch(0)
                small, self.inputs = make()
        except Exception as error:
            raise CannotStandIn(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        self.tree, self.small, self.treated = tree, Tree(small), treated
        self._made: dict[Node, Hashable] = {}  # cache of `_made_of`
        self.paths: dict[str, str] = {}  # the full model's path for each path of the small model
        self._pair(tree.root, self.small.root)

    def _pair(self, node: Node, like: Node) -> None:
        # Each module with parametrizations has a class of its own.
        if type_before_parametrizations(node.live) is not type_before_parametrizations(like.live):
            raise CannotStandIn(
                f"{node.shown} is a {node.cls.__name__} in the model and a "
                f"{like.cls.__name__} in the small one"
            )
        self.paths[like.path] = node.path
        same = node.children.keys() == like.children.keys()
        if _is_list(node) and not (same and isinstance(node.live, nn.Sequential)):
            self._pair_elements(node, like)
            return
        if not same:
            raise CannotStandIn(f"{node.shown} holds other modules in the small model")
        for name, child in node.children.items():
            self._pair(child, like.children[name])

    def _pair_elements(self, node: Node, like: Node) -> None:
        """Pairs list elements so that each structure and treatment has an element of its own."""
        found: dict[Any, Node] = {}
        for child in node.children.values():
            key = (self._made_of(child), child.kind, self._treatment(child))
            found.setdefault(key, child)
        waiting = list(found.values())
        for element in like.children.values():
            made = self._made_of(element)
            fitting = [c for c in found.values() if self._made_of(c) == made]
            if not fitting:
                raise CannotStandIn(f"no element of {node.shown} is built like {element.shown}")
            chosen = next((c for c in fitting if c in waiting), fitting[0])
            waiting = [c for c in waiting if c is not chosen]
            self._pair(chosen, element)
        if waiting:
            raise CannotStandIn(f"the small model has no element like `{waiting[0].path}`")

    def _made_of(self, node: Node) -> Hashable:
        """A module's structure: class, names and ranks of its parameters, and its submodules.

        For a list or a dictionary, the number of elements of each structure does not count.
        """
        if node not in self._made:
            named = node.children.items()
            inside: Hashable = tuple((name, self._made_of(child)) for name, child in named)
            if _is_list(node):
                inside = frozenset(self._made_of(child) for child in node.children.values())
            own = tuple((name, parameter.dim()) for name, parameter in node.parameters.items())
            self._made[node] = type_before_parametrizations(node.live), own, inside
        return self._made[node]

    def _treatment(self, node: Node) -> Hashable:
        """What the schedule asks of a module and of its submodules."""
        start = len(node.path)
        return tuple(
            (inner.path[start:], self.treated[inner.path])
            for inner in node.walk()
            if inner.path in self.treated
        )

    def propagate(
        self,
        request: ShardingRequest,
        editable: Callable[[str], str | None],
        records: Records,
        thorough: bool,
    ) -> ShardingResult:
        """The result for the full model, from `propagate` on the small one."""
        try:
            found = propagate(
                self.small, self._request_for(request), self.inputs, editable, records, thorough
            )
        except CannotFollow as error:
            raise self._meant(error) from error
        return self._translated(found)

    def _request_for(self, request: ShardingRequest) -> ShardingRequest:
        def those_in(values: Mapping[str, Any]) -> dict[str, Any]:
            return {own: values[path] for own, path in self.paths.items() if path in values}

        return ShardingRequest(
            those_in(request.layers),
            those_in(request.parameters),
            those_in(request.borders),
            frozenset(own for own, path in self.paths.items() if path in request.heads),
            those_in(request.attributes),
            frozenset(own for own, path in self.paths.items() if path in request.forked),
            frozenset(own for own, path in self.paths.items() if path in request.tied_heads),
            request.texts,
        )

    def _translated(self, found: ShardingResult) -> ShardingResult:
        """A result with the full model's paths and classes; the small model's sizes are dropped."""
        paths = self.paths
        keys: dict[LayerKey, LayerKey] = {
            layer_key(self.small.nodes[own]): layer_key(self.tree.nodes[path])
            for own, path in paths.items()
        }
        return replace(
            found,
            heads={keys[key]: name for key, name in found.heads.items()},
            units={keys[key]: replace(unit, size=0) for key, unit in found.units.items()},
            multiples={(keys[key], name): n for (key, name), n in found.multiples.items()},
            once={(keys[key], name) for key, name in found.once},
            replicated={keys[key]: name for key, name in found.replicated.items()},
            arguments={replace(a, source=self._path(a.source)) for a in found.arguments},
            sharded_calls={(place, paths[path]) for place, path in found.sharded_calls},
            replicated_calls={(place, paths[path]) for place, path in found.replicated_calls},
            shared={(paths[p], n): self._path(source) for (p, n), source in found.shared.items()},
            readings={
                replace(r, path=paths[r.path], reader=self._path(r.reader)) for r in found.readings
            },
            summed=frozenset((paths[path], number) for path, number in found.summed),
            nested={paths[path] for path in found.nested},
            losses={
                place: replace(loss, owner=paths[loss.owner], head=paths[loss.head])
                for place, loss in found.losses.items()
            },
            statistics={replace(s, owner=paths[s.owner]) for s in found.statistics},
            tied_heads={
                replace(h, owner=paths[h.owner], embedding=paths[h.embedding])
                for h in found.tied_heads
            },
            draws={
                replace(
                    d,
                    callers=tuple((paths[path], line) for path, line in d.callers),
                    source=paths[d.source],
                    blocks=tuple(self._in_full(d.source, size) for size in d.blocks),
                )
                for d in found.draws
                if not d.blocks or layer_key(self.small.nodes[d.source]) not in found.units
            },
            cuts={(paths[path], place, number) for path, place, number in found.cuts},
            even=set(),
            misfits=[self._meant(error) for error in found.misfits],
            is_of_small=True,
        )

    def _in_full(self, path: str, size: int) -> int:
        """A size of a small layer's features, scaled to the full model; 0 if not known."""
        small, full = self.small.nodes[path].live, self.tree.nodes[self.paths[path]].live
        return size * width(full) // width(small) if width(small) else 0

    def _path(self, path: str | None) -> str | None:
        return None if path is None else self.paths[path]

    def _meant(self, error: CannotFollow) -> CannotFollow:
        """The error with the full model's paths."""

        def named(text: str) -> str:
            for own, path in self.paths.items():
                if own != path:
                    text = text.replace(f"`{own}`", f"`{path}`")
            return text

        meant = CannotFollow(
            f"{named(str(error))} (found in the small model that verification runs)",
            self._path(error.path),
            named(error.hint) if error.hint else None,
            sync=(self.paths[error.sync[0]], error.sync[1]) if error.sync else None,
            remedy=replace(error.remedy, path=self.paths[error.remedy.path])
            if error.remedy
            else None,
            place=error.place,
        )
        meant.within = self._path(error.within)
        meant.twice = tuple(self.paths[path] for path in error.twice)
        meant.at_values = [replace(m, path=self.paths[m.path]) for m in error.at_values]
        return meant


def _is_list(node: Node) -> bool:
    """Whether the number of a module's elements may vary: a list, or a sequence of blocks."""
    if isinstance(node.live, nn.Sequential):
        blocks = [*node.children.values()]
        return len({block.cls for block in blocks}) == 1 and all(block.children for block in blocks)
    return isinstance(node.live, (nn.ModuleList, nn.ModuleDict))
