"""Chooses the tensor-parallel layer that carries out the requests for a torch layer."""

from __future__ import annotations

from slapo_rewrite import errors
from slapo_rewrite.changes.state import ModuleRequests, Shard, Sync
from slapo_rewrite.model.layers import Layer, Split, splits_of
from slapo_rewrite.model.tree import Node
from slapo_rewrite.runtime.packed_axes import Packed
from slapo_rewrite.runtime.tensor_parallel import ReduceScatter, sum_later
from slapo_rewrite.sharding.types import SPOKEN


def choose_layer(node: Node, state: ModuleRequests) -> Layer:
    """The replacement of a sharded torch layer, with the collectives that it carries out.

    Raises:
        BadAxis: The layer cannot be split along this axis.
        IncompleteShard: A parameter that must be split with the others is not.
        SyncMismatch: A collective does not fit the layer's input or output.
    """
    split = _split(node, state)
    keywords: dict[str, object] = {}
    parts = {shard.parts for shard in state.shards}
    if len(parts) > 1:
        first = state.shards[0]
        second = next(s for s in state.shards if s.parts != first.parts)
        raise errors.ConflictingEdits(
            f"{node.shown}: `{first.name}` and `{second.name}` are packed differently",
            at=second.cause.at,
            also=[first.cause.at],
            hint="give both the same `parts`",
        )
    packed = parts.pop()
    if len(packed) > 1:
        keywords["parts"] = Packed(len(packed) if len(set(packed)) == 1 else packed)
    for sync in _collectives(state):
        check_sync(node, split, sync, state)
    done = {sync.mode: sync for sync in _done_inside(split, state)}
    after = done.get("fwd_post")
    if split.has_input_gradient and "bwd_post" not in done:
        keywords["reduce_input_gradient"] = False
    if split.output == "partition" and after:
        keywords["gather_output"] = True
    if split.output == "partial sum" and after and after.op == "reduce_scatter":
        assert after.axis is not None
        keywords["reduce"] = ReduceScatter(axis=after.axis)
    if split.output == "partial sum" and not after:
        keywords["reduce"] = sum_later
    return Layer(split.module, split.name, tuple(keywords.items()), split.arguments)


def done_inside(node: Node, state: ModuleRequests) -> list[Sync]:
    """The collectives that a sharded layer carries out itself."""
    return _done_inside(_split(node, state), state)


def _done_inside(split: Split, state: ModuleRequests) -> list[Sync]:
    if split.output == "whole":
        return []
    done = [s for s in _collectives(state) if s.mode == "bwd_post" and s.of is None][:1]
    after = [s for s in _collectives(state) if s.mode == "fwd_post"][:1]
    if split.output == "partial sum":
        after = [s for s in after if s.op in ("all_reduce", "reduce_scatter")]
    else:
        after = [
            s
            for s in after
            if s.op == "all_gather" and s.axis in split.axes and not s.partial_gradient
        ]
    return done + after


def _collectives(state: ModuleRequests) -> list[Sync]:
    return [sync for sync in state.syncs if isinstance(sync.op, str)]


def _split(node: Node, state: ModuleRequests) -> Split:
    """How all shards together split the layer."""
    possible = splits_of(node.live) or {}
    chosen: dict[Split, Shard] = {}
    for shard in state.shards:
        split = possible.get((shard.name, shard.axis))
        if split is None:
            raise errors.BadAxis(
                f"`{node.path}.{shard.name}` ({node.cls.__name__}) cannot be sharded along "
                f"axis {shard.axis}",
                at=shard.cause.at,
                hint="it can be sharded as " + ", ".join(f"`{n}` axis {a}" for n, a in possible)
                if possible
                else "it stays whole because of its arguments, such as sparse=True",
            )
        chosen.setdefault(split, shard)
    if len(chosen) > 1:
        (_, first), (_, second) = list(chosen.items())[:2]
        raise errors.BadAxis(
            f"{node.shown}: `{first.name}` along axis {first.axis} and `{second.name}` along "
            f"axis {second.axis} split the layer in different ways",
            at=second.cause.at,
            also=[first.cause.at],
            hint=(
                "the bias of a layer that is split over its inputs stays whole: it is added "
                "once, after the sum"
            ),
        )
    split, shard = next(iter(chosen.items()))
    sharded = {s.name for s in state.shards}
    for name in node.parameters:
        if name not in sharded and name not in split.whole:
            of_layer = any(name == own for own, _ in possible)
            raise errors.IncompleteShard(
                f"`{node.path}.{name}` is not sharded, but `{shard.name}` is",
                at=shard.cause.at,
                hint=f'shard both: .shard(["{shard.name}", "{name}"], axis=...)'
                if of_layer
                else (
                    f"the layer itself has no `{name}`: leave this one whole, or write "
                    f"`{node.cls.__name__}` as a module that holds the layer and its additions"
                ),
            )
    if "weight" in node.parameters and "weight" not in sharded:
        raise errors.IncompleteShard(
            f"`{node.path}.weight` is not sharded, but `{shard.name}` is", at=shard.cause.at
        )
    return split


def check_sync(node: Node, split: Split, sync: Sync, state: ModuleRequests) -> None:
    """Raises `SyncMismatch` if a collective does not fit a sharded layer's input or output."""
    shard = state.shards[0]
    problem = hint = None
    spoken = SPOKEN.get(str(sync.op))
    after = [s for s in _collectives(state) if s.mode == "fwd_post"]
    first = bool(after) and sync is after[0]
    if first and split.output == "partition" and sync.op in ("all_reduce", "reduce_scatter"):
        problem = (
            f"the output of {node.shown} is a partition: {spoken} would add up different features"
        )
        hint = (
            f'gather it: .sync("fwd_post", "all_gather", axis={split.axes[0]}); where its parts '
            'go on, what adds up is its input\'s gradient: .sync("bwd_post", "all_reduce")'
        )
    elif first and split.output == "partition" and sync.op == "scatter":
        problem = f"the output of {node.shown} is a partition: it is already scattered"
        hint = 'split another axis instead: .sync("fwd_post", "RS->SR")'
    elif first and split.output == "partial sum" and sync.op in ("all_gather", "all_to_all"):
        problem = (
            f"the output of {node.shown} is a partial sum: {spoken} would concatenate the summands"
        )
        hint = 'add them up: .sync("fwd_post", "all_reduce")'
    elif first and split.output == "partial sum" and sync.op in ("scatter", "keep"):
        problem = f"the output of {node.shown} is a partial sum: it has to be added up first"
        hint = f'add it up and scatter it: .sync("fwd_post", "reduce_scatter", axis={sync.axis})'
    elif sync.mode == "bwd_post" and not split.has_input_gradient:
        problem = (
            f"the gradient of the input of {node.shown} is no partial sum: there is "
            "nothing to reduce"
        )
        hint = "remove this line"
    if problem:
        raise errors.SyncMismatch(problem, at=sync.cause.at, also=[shard.cause.at], hint=hint)
