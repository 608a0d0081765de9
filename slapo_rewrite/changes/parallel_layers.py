"""A layer that is split: what makes it becomes parallel, or its own class derives from one."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from slapo_rewrite.changes.bases import DeriveFrom
from slapo_rewrite.changes.construction import ReplaceModule, UseParallelLayer
from slapo_rewrite.changes.packed_axes import place_blocks
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.places import AtBase
from slapo_rewrite.changes.pretrained import MAPPED, keep_checkpoints
from slapo_rewrite.directive import merged_causes
from slapo_rewrite.model.join import find_site
from slapo_rewrite.model.layers import IN_UNITS, Layer, base_of, replicated, size_of
from slapo_rewrite.model.tree import Node
from slapo_rewrite.sharding import layer_key


def place_layer(
    to: Placement, node: Node, layer: Layer, other: Callable[[Layer], Layer] | None = None
) -> None:
    """Splits a layer where it is made, or in its own class; one in another's place is made there.

    Args:
        to: Takes the change.
        node: The layer.
        layer: What takes its place.
        other: Gives what takes the place of that, where it has to do more.

    Raises:
        RewriteError: Nothing that can be followed makes it.
    """
    causes, base = to.causes(node), base_of(node.cls)
    assert base is not None
    if base is node.cls and to.states[node.path].replacement:
        return
    fitted = _fitted(to, node, layer)
    fitted = fitted if other is None else other(fitted)
    if base is not node.cls:
        what = DeriveFrom(fitted, base.__name__)
        to.home(node).changes.add(node.path, AtBase(), what, causes)
    else:
        use = UseParallelLayer(fitted)
        to.files.making(node).changes.at_site(node, use, causes)


def place_replacement(to: Placement, node: Node, layer: Layer | None) -> None:
    """Another module where one is made, split if that is asked as well.

    Raises:
        RewriteError: Nothing that can be followed makes it.
    """
    new = to.states[node.path].replacement
    assert new is not None
    causes = merged_causes([new.cause], to.causes(node))
    fitted = _fitted(to, node, layer) if layer and base_of(node.cls) is node.cls else None
    what = ReplaceModule(new.target, new.arguments, new.weights, fitted)
    to.files.making(node).changes.at_site(node, what, causes)
    if new.weights:
        keep_checkpoints(to.files, node, MAPPED, (new.cause,))


def _fitted(to: Placement, node: Node, layer: Layer) -> Layer:
    """The layer with what followed of how it may be split, and with the blocks of a packed axis."""
    key = layer_key(node)
    if key in to.followed.replicated:
        layer = replicated(layer, f"self.{to.followed.replicated[key]}") or layer
    elif (unit := to.followed.units.get(key)) and layer.name in IN_UNITS:
        layer = replace(layer, unit=unit)
    if "parts" not in dict(layer.keywords):
        return layer
    state = to.states[node.path]
    shard = next((s for s in state.shards if s.as_sizes), state.shards[0])
    site, size = None, None
    if base_of(node.cls) is node.cls:
        site = find_site(to.files.sources, node)
        made: ast.expr = site.value
        if state.replacement is not None and state.replacement.arguments is not None:
            made = ast.parse(f"_({state.replacement.arguments})", mode="eval").body
        size = size_of(layer, made) if isinstance(made, ast.Call) else None
    parts = place_blocks(to, node, shard, site, size)
    return replace(layer, keywords=(*dict(layer.keywords, parts=parts).items(),))
