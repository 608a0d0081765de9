"""Layers with fewer heads than others beside them: on many ranks, several hold the same head."""

from __future__ import annotations

from typing import Any

from slapo_rewrite.model.layers import Unit, base_of, replicated
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.types import LayerKey, ShardingRequest, ShardingResult, layer_key


def fewer_heads(
    tree: Tree, request: ShardingRequest, followed: ShardingResult
) -> tuple[dict[LayerKey, str], int]:
    """The layers that give fewer heads than others, and a world size that is above their number.

    By layer the attribute that is a head's size, and a number of ranks that the number of heads
    divides, and that divides the number of the others.
    """
    found: dict[LayerKey, str] = {}
    by_owner: dict[str, list[tuple[LayerKey, int, bool]]] = {}
    for path, layer in request.layers.items():
        node = tree.nodes[path]
        key = layer_key(node)
        if node.owner is None or key not in followed.heads:
            continue
        heads = width(node.live) // int(getattr(node.owner.live, followed.heads[key]))
        fits = base_of(node.cls) is node.cls and replicated(layer, Unit("")) is not None
        by_owner.setdefault(node.owner.path, []).append((key, heads, fits))
    world = 0
    for layers in by_owner.values():
        most = max(heads for _, heads, _ in layers)
        for key, heads, fits in layers:
            if fits and heads < most and most % heads == 0:
                found[key] = followed.heads[key]
                world = max(world, heads * _factor(most // heads))
    return found, world


def width(layer: Any) -> int:
    """How many features a layer gives."""
    return int(getattr(layer, "out_features", 0) or getattr(layer, "nf", 0))


def _factor(groups: int) -> int:
    """Of how many ranks each head shall have, the least that is possible."""
    return next(n for n in range(2, groups + 1) if groups % n == 0)
