"""The output projection of a split `nn.MultiheadAttention`, which is a module inside of it."""

from __future__ import annotations

from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.state import EMPTY, ModuleRequests
from slapo_rewrite.model.layers import ATTENTION, PROJECTION, base_of, qualified
from slapo_rewrite.model.tree import Node, Tree


def join_projections(tree: Tree, states: dict[str, ModuleRequests]) -> None:
    """Takes what is asked of such projections for asked of the attention, which is one layer.

    Raises:
        IncompleteShard: Only one of the two is split.
        BadAxis: One of them is split otherwise than by heads.
        Unsupported: Something else is asked of a projection.
    """
    name, weight, axis = PROJECTION
    for node in list(tree.nodes.values()):
        if (base := base_of(node.cls)) is None or qualified(base) != ATTENTION:
            continue
        path = f"{node.path}.{name}".lstrip(".")
        state, inner = states.get(node.path, EMPTY), states.get(path, EMPTY)
        if not state.shards and not inner.causes():
            continue
        projected = [(s.name, s.axis, len(s.parts)) for s in inner.shards]
        if not state.shards or projected != [(weight, axis, 1)]:
            raise errors.IncompleteShard(
                f"`{node.path or 's'}` computes with `in_proj_weight` and `{name}.{weight}`, and "
                "both are to be split by heads",
                at=(*state.causes(), *inner.causes())[0].at,
                hint='shard both: .shard(["in_proj_weight", "in_proj_bias"], axis=0, parts=3) and '
                f'["{name}"].shard("{weight}", axis={axis})',
            )
        _check_packed(node, state)
        syncs = (*state.syncs, *inner.syncs)
        if (
            any(s.mode != "fwd_post" for s in inner.syncs)
            or replace(inner, shards=(), syncs=()) != ModuleRequests()
        ):
            raise errors.Unsupported(
                f"`{path}` is a part of the attention that is split: what is asked of it but a sum "
                "of what it gives has no place",
                at=inner.every_cause()[-1].at,
                hint=f"ask it of `{node.path}`",
            )
        shards = tuple(replace(s, parts=(1,)) for s in state.shards)
        states[node.path] = replace(state, shards=shards, syncs=syncs)
        del states[path]


def _check_packed(node: Node, state: ModuleRequests) -> None:
    """Queries, keys and values lie packed along the axis."""
    for shard in state.shards:
        if len(set(shard.parts)) != 1 or len(shard.parts) != 3:
            raise errors.BadAxis(
                f"`{node.path}.{shard.name}` packs queries, keys and values",
                at=shard.cause.at,
                hint='say so: .shard(["in_proj_weight", "in_proj_bias"], axis=0, parts=3)',
            )
