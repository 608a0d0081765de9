"""Composite torch layers that are split as one: requests for inner modules become theirs.

`nn.MultiheadAttention` has an output projection, `nn.TransformerEncoderLayer` an attention and
linear layers, `nn.Transformer` such layers. Torch constructs these in its own files.
"""

from __future__ import annotations

from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.state import EMPTY, ModuleRequests, Sync
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.model.layers import Inner, inner_of
from slapo_rewrite.model.tree import Node, Tree


def join_inner_layers(tree: Tree, states: dict[str, ModuleRequests]) -> None:
    """Moves requests for modules inside such layers to the layers.

    Raises:
        IncompleteShard: A parameter that must be sharded with the others is not.
        BadAxis: `parts` does not say that queries, keys and values are packed.
        Unsupported: A request that cannot be carried out inside the layer.
    """
    for node in list(tree.nodes.values()):  # outer layers come first
        if inner := inner_of(node.live):
            _join(tree, states, node, inner)


def _join(tree: Tree, states: dict[str, ModuleRequests], node: Node, inner: Inner) -> None:
    def path_of(path: str) -> str:
        return joined_path(node.path, path)

    paths = dict.fromkeys([node.path, *(path_of(path) for path, _ in inner)])
    found = {path: states.get(path, EMPTY) for path in paths}
    asked = {path: state for path, state in found.items() if state.causes()}
    wanted = {
        (path_of(path), name): how
        for (path, name), how in inner.items()
        if tree.nodes[path_of(path)].live._parameters[name] is not None
    }
    shards = {(path, s.name): s for path, state in asked.items() for s in state.shards}
    if not shards and (not asked or set(asked) == {node.path}):
        return
    first = next(iter(asked.values())).causes()[0]
    for (path, name), (axis, blocks) in wanted.items():
        shard = shards.get((path, name))
        if shard is None or shard.axis != axis:
            packed = ", parts=3" if blocks == 3 else ""
            raise errors.IncompleteShard(
                f"{node.shown} is split over heads as a whole, but `{path}.{name}` is not sharded "
                f"along axis {axis}",
                at=(shard.cause if shard else first).at,
                hint=f's["{path}"].shard("{name}", axis={axis}{packed})',
            )
        if len(set(shard.parts)) != 1 or len(shard.parts) != blocks:
            raise errors.BadAxis(
                f"`{path}.{name}` packs {blocks} blocks"
                f"{': queries, keys and values' if blocks == 3 else ''}",
                at=shard.cause.at,
                hint=f"give it parts={blocks}",
            )
    syncs: list[Sync] = []
    for path, state in asked.items():
        rest = replace(state, shards=(), syncs=())
        if path != node.path and rest != ModuleRequests():
            raise _no_place(node, path, state)
        for sync in state.syncs:
            if path == node.path:
                syncs.append(sync)
            elif not _is_inside(path, sync):
                raise _no_place(node, path, state)
            elif path == path_of("out_proj"):
                syncs.append(sync)  # it applies to the attention's output
    joined = tuple(
        replace(shards[key], name=f"{key[0]}.{key[1]}"[len(node.path) :].lstrip("."), parts=(1,))
        for key in wanted
    )
    for path in asked:
        states.pop(path, None)
    states[node.path] = replace(found.get(node.path, EMPTY), shards=joined, syncs=tuple(syncs))


def _is_inside(path: str, sync: Sync) -> bool:
    """Whether the layer carries out a collective inside."""
    gives_sums = path.endswith(("out_proj", "linear2"))
    mode = "fwd_post" if gives_sums else "bwd_post"
    return (sync.mode, sync.op, sync.of, sync.value) == (mode, "all_reduce", None, None)


def _no_place(node: Node, path: str, state: ModuleRequests) -> errors.Unsupported:
    return errors.Unsupported(
        f"`{path}` is inside {node.shown}, which is split as a whole, so it cannot be changed "
        "separately",
        at=state.every_cause()[-1].at,
        hint=f"select {node.shown} instead, or remove the line",
    )
