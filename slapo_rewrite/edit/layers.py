"""From what was asked of a torch layer to the tensor-parallel layer that does it."""

from __future__ import annotations

from slapo_rewrite import errors
from slapo_rewrite.edit.state import ModuleState, Shard, Sync
from slapo_rewrite.model.layers import Layer, Split, splits_of
from slapo_rewrite.model.tree import Node


def choose_layer(node: Node, state: ModuleState) -> Layer:
    """The layer that takes the place of a sharded torch layer, with the collectives at its border.

    Raises:
        BadAxis: The layer cannot be split there.
        IncompleteShard: A parameter that has to be split with the others is not.
        SyncMismatch: A collective that does not fit what the layer gives out.
    """
    split = _split(node, state)
    keywords: dict[str, object] = {}
    parts = {shard.parts for shard in state.shards}
    if len(parts) > 1:
        first, second = (
            state.shards[0],
            next(s for s in state.shards if s.parts != state.shards[0].parts),
        )
        raise errors.ConflictingEdits(
            f"`{node.path}`: `{first.name}` and `{second.name}` are packed differently",
            at=second.cause.at,
            also=_places(first),
            hint="give both the same `parts`",
        )
    packed = parts.pop()
    if len(packed) > 1:
        keywords["parts"] = len(packed) if len(set(packed)) == 1 else packed
    collectives = [sync for sync in state.syncs if isinstance(sync.op, str)]
    for sync in collectives:
        check_sync(node, split, sync, state)
    modes = {sync.mode for sync in collectives}
    if split.has_input_gradient and "bwd_post" not in modes:
        keywords["reduce_input_gradient"] = False
    if split.output == "partition" and "fwd_post" in modes:
        keywords["gather_output"] = True
    if split.output == "partial sum" and "fwd_post" not in modes:
        keywords["reduce_output"] = False
    return Layer(split.module, split.name, tuple(keywords.items()), split.arguments)


def _split(node: Node, state: ModuleState) -> Split:
    """How the shards split the layer, all of them together."""
    possible = splits_of(node.cls) or {}
    chosen: dict[Split, Shard] = {}
    for shard in state.shards:
        split = possible.get((shard.name, shard.axis))
        if split is None:
            raise errors.BadAxis(
                f"`{node.path}.{shard.name}` ({node.cls.__name__}) cannot be sharded along "
                f"axis {shard.axis}",
                at=shard.cause.at,
                hint="it can be sharded as " + ", ".join(f"`{n}` axis {a}" for n, a in possible),
            )
        chosen.setdefault(split, shard)
    if len(chosen) > 1:
        (_, first), (_, second) = list(chosen.items())[:2]
        raise errors.BadAxis(
            f"`{node.path}`: `{first.name}` along axis {first.axis} and `{second.name}` along "
            f"axis {second.axis} split the layer in different ways",
            at=second.cause.at,
            also=_places(first),
            hint=(
                "the bias of a layer that is split over its inputs stays whole: it is added "
                "once, after the sum"
            ),
        )
    split, shard = next(iter(chosen.items()))
    sharded = {s.name for s in state.shards}
    for name in node.parameters:
        if name not in sharded and name not in split.whole:
            raise errors.IncompleteShard(
                f"`{node.path}.{name}` is not sharded, but `{shard.name}` is",
                at=shard.cause.at,
                hint=f'shard both: .shard(["{shard.name}", "{name}"], axis=...)',
            )
    if "weight" not in sharded:
        raise errors.IncompleteShard(
            f"`{node.path}.weight` is not sharded, but `{shard.name}` is", at=shard.cause.at
        )
    return split


def check_sync(node: Node, split: Split, sync: Sync, state: ModuleState) -> None:
    """Refuses a collective that does not fit what a split layer takes in or gives out.

    Raises:
        SyncMismatch: With the lines of the collective and of the shard.
        Unsupported: An all-gather along an axis that is not the split one.
    """
    shard = state.shards[0]
    problem = hint = None
    if sync.mode == "fwd_post" and sync.op == "all_reduce" and split.output == "partition":
        problem = (
            f"the output of `{node.path}` is a partition: an all-reduce would add up "
            "different features"
        )
        hint = 'gather it: .sync("fwd_post", "all_gather", axis=-1)'
    elif sync.mode == "fwd_post" and sync.op == "all_gather" and split.output == "partial sum":
        problem = (
            f"the output of `{node.path}` is a partial sum: an all-gather would line up "
            "the summands"
        )
        hint = 'add them up: .sync("fwd_post", "all_reduce")'
    elif sync.mode == "bwd_post" and not split.has_input_gradient:
        problem = (
            f"the gradient of the input of `{node.path}` is no partial sum: there is "
            "nothing to reduce"
        )
        hint = "take this line out"
    if problem:
        raise errors.SyncMismatch(problem, at=sync.cause.at, also=_places(shard), hint=hint)
    if sync.mode == "fwd_pre":
        raise errors.Unsupported(
            f"`sync` before `{node.path}` is not available for `{sync.op}`", at=sync.cause.at
        )
    if sync.op == "all_gather" and (sync.axis != -1 or sync.partial_gradient):
        raise errors.Unsupported(
            f"the output of `{node.path}` can be gathered along axis -1, for a consumer that "
            "is not sharded",
            at=sync.cause.at,
            hint="write axis=-1, without tensor_parallel_output_grad",
        )


def _places(item: Shard | Sync) -> list[errors.Span]:
    return [item.cause.at] if item.cause.at else []
