"""Shards and annotates tied parameters in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.parameter_attributes import Annotate
from slapo_rewrite.changes.state import EMPTY, ModuleRequests, Shard, Sync
from slapo_rewrite.directive import Directive
from slapo_rewrite.model.layers import splits_of
from slapo_rewrite.model.tree import Node, Tree


def follow_ties(tree: Tree, states: dict[str, ModuleRequests]) -> None:
    """Shards parameters that are tied to a sharded parameter in the same way.

    A module that is sharded because of a tie stays the same for its callers: a collective makes its
    output whole.
    """
    changed = True
    while changed:
        changed = False
        for names in tree.ties.values():
            members = [(tree.nodes[n.rpartition(".")[0]], n.rpartition(".")[2]) for n in names]
            sharded = [
                (node, s) for node, name in members for s in _shards(states, node) if s.name == name
            ]
            if not sharded:
                continue
            first_node, first = sharded[0]
            for node, other in sharded[1:]:
                if (other.axis, other.parts) != (first.axis, first.parts):
                    raise errors.ConflictingEdits(
                        f"`{first_node.path}.{first.name}` and `{node.path}.{other.name}` are one "
                        "tied parameter, but sharded in two ways",
                        at=other.cause.at,
                        cause=first.cause,
                    )
            for node, name in members:
                has_own = all(node.live is not other.live for other, _ in sharded)
                if has_own and not any(s.name == name for s in _shards(states, node)):
                    states[node.path] = _tied(node, states.get(node.path, EMPTY), name, first)
                    changed = True


def annotate_ties(tree: Tree, states: dict[str, ModuleRequests]) -> None:
    """Annotates all names of a tied parameter: tying decides later which object remains."""
    for names in tree.ties.values():
        members = [(n.rpartition(".")[0], n.rpartition(".")[2]) for n in names]
        given = [
            (cause, f"{path}.{name}", annotation)
            for path, name in members
            for annotation, cause in states.get(path, EMPTY).asks(Annotate)
            if annotation.name == name
        ]
        asked: dict[str, tuple[Annotate, Directive]] = {}
        for cause, full, annotation in sorted(given, key=lambda each: each[0].number):
            known, earlier = asked.setdefault(annotation.key, (annotation, cause))
            if known.value != annotation.value:
                raise errors.ConflictingEdits(
                    f"`{full}` is tied to a parameter whose `{known.key}` is {known.value}",
                    at=cause.at,
                    cause=earlier,
                )
        for path, name in members:
            state = states.get(path, EMPTY)
            have = {a.key for a, _ in state.asks(Annotate) if a.name == name}
            for key, (annotation, cause) in asked.items():
                if key not in have:
                    state = state.asking(replace(annotation, name=name), cause)
            if state != EMPTY:
                states[path] = state


def _shards(states: Mapping[str, ModuleRequests], node: Node) -> tuple[Shard, ...]:
    return states.get(node.path, EMPTY).shards


def _tied(node: Node, state: ModuleRequests, name: str, shard: Shard) -> ModuleRequests:
    splits = splits_of(node.live)
    added = [replace(shard, name=name)]
    if splits is None or (name, shard.axis) not in splits:
        return replace(state, shards=(*state.shards, *added))
    split = splits[name, shard.axis]
    present = {s.name for s in state.shards} | {name}
    added += [
        replace(shard, name=other, axis=axis)
        for (other, axis), how in splits.items()
        if how == split and other in node.parameters and other not in present
    ]
    syncs = list(state.syncs)
    if not state.shards:
        operation = "all_gather" if split.output == "partition" else "all_reduce"
        axis = split.axes[0] if operation == "all_gather" else None
        wanted = [Sync("fwd_post", operation, axis, None, shard.cause)]
        if split.has_input_gradient:
            wanted.append(Sync("bwd_post", "all_reduce", None, None, shard.cause))
        have = {(s.mode, s.op) for s in syncs}
        syncs += [s for s in wanted if (s.mode, s.op) not in have]
    return replace(state, shards=(*state.shards, *added), syncs=tuple(syncs))
