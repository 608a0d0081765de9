"""Replication of key/value heads, on more ranks than there are such heads."""

from __future__ import annotations

from typing import Any

from slapo_rewrite.model.layers import Unit, base_of, replicated
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.types import LayerKey, ShardingRequest, ShardingResult, layer_key


def fewer_heads(
    tree: Tree, request: ShardingRequest, followed: ShardingResult
) -> tuple[dict[LayerKey, str], int]:
    """The layers with fewer heads than others of their module, and a world size above that number.

    Returns the attribute that is a head's size for each such layer, and a multiple of the number
    of its heads that divides the number of the others' heads.
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
    """The number of output features of a layer."""
    return int(getattr(layer, "out_features", 0) or getattr(layer, "nf", 0))


def _factor(groups: int) -> int:
    """The smallest possible number of ranks that share a head: the least factor above 1."""
    return next(n for n in range(2, groups + 1) if groups % n == 0)
