"""Checks that the model's outputs and buffers are whole on every rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slapo_rewrite.model.results import result_pairs
from slapo_rewrite.sharding.placements import PARTIAL, REPLICATE, SHARD, gather_line
from slapo_rewrite.sharding.rank_checks import KIND
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import CannotFollow, MissingCollective


def compare_outputs(expected: Any, got: Any, run: Run) -> None:
    """Raises `CannotFollow` if any output on a rank, also a nested one, differs from the whole."""
    for name, want, have in result_pairs(expected, got, ""):
        if isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor):
            _compare_output(name or "output", want, have, run)
        elif want != have:
            raise CannotFollow(
                f"the model's `{name or 'output'}` is {have} on a rank instead of {want}",
                hint="take the number from an attribute set in `__init__`, or another whole value",
                position=sys.maxsize,
            )


def kept_buffers(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """The buffers in the state dict, by module path and name."""
    return {
        (path, name): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def compare_buffers(
    expected: Mapping[tuple[str, str], torch.Tensor],
    got: Mapping[tuple[str, str], torch.Tensor],
    run: Run,
) -> None:
    """Raises `CannotFollow` if a run leaves a part or partial sum in a buffer that is not split."""
    split = {(p, shard.name) for p, shards in run.request.parameters.items() for shard in shards}
    for key, want in expected.items():
        path, name = key
        if key in split or path in run.request.layers or (have := got.get(key)) is None:
            continue
        state = run.flow.of(have)
        if have.shape != want.shape or state.kind != REPLICATE:
            raise CannotFollow(
                f"`forward` writes {KIND[state.kind]} of shape {list(have.shape)} into the buffer "
                f"`{path}.{name}`, which has shape {list(want.shape)}".replace("`.", "`"),
                state.source,
                "store a value that is the same on every rank, or split the buffer as well: "
                f'.shard("{name}", axis=...)',
                position=sys.maxsize,
            )


def _compare_output(name: str, want: torch.Tensor, have: torch.Tensor, run: Run) -> None:
    state = run.flow.of(have)
    name = f"output {name}" if name.isdigit() else name
    if state.kind == SHARD and id(have) in run.fed:
        return  # a loss takes it as a part, which the user then gets as well
    if want.shape != have.shape or state.kind == SHARD:
        sizes = enumerate(zip(want.shape, have.shape, strict=False))
        axis = next((a for a, (w, h) in sizes if w != h), -1)
        raise CannotFollow(
            f"the model's `{name}` has shape {list(have.shape)} on a rank instead of "
            f"{list(want.shape)}",
            state.source,
            f"gather it: {gather_line(axis, want.dim())} on the module that makes it",
            position=sys.maxsize,
            remedy=MissingCollective.whole_of(state.border, state.axis)
            if state.kind == SHARD
            else None,
        )
    if state.kind == PARTIAL:
        raise CannotFollow(
            f"the model's `{name}` is a partial sum on each rank",
            state.source,
            'add it up: .sync("fwd_post", "all_reduce")',
            position=sys.maxsize,
            remedy=MissingCollective.sum_of(state.border),
        )
    if any(path == state.grad_reduced for path, _ in run.wanted.shared):
        raise CannotFollow(
            f"the model's `{name}` is computed from a parameter of `{state.grad_reduced}` that is "
            "used on parts elsewhere: its gradient would be summed over the ranks for both uses",
            None,
            "do not return it, or gather the values that it is used on elsewhere",
            position=sys.maxsize,
        )
    if state.grad_reduced is not None:
        raise CannotFollow(
            f"the model's `{name}` is computed inside `{state.grad_reduced}`, whose `bwd_post` "
            "sync would count its gradient once for each rank",
            state.grad_reduced,
            "put the sync on a module whose input goes only into sharded layers",
            position=sys.maxsize,
        )
