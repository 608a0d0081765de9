"""Checks `torch.autograd.Function`s whose operands are sharded.

Torch's own backward follows from the operations of `forward`; that of a `torch.autograd.Function`
is arbitrary code. Its `forward` and `backward` run once on whole values, for a record, and then on
a rank's values. The gradient of a part must have the placement of that part, and the gradient of a
whole value must be whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slapo_rewrite import errors
from slapo_rewrite.model.meta_device import NeedsGraph
from slapo_rewrite.model.results import tensors
from slapo_rewrite.operations import name_of
from slapo_rewrite.sharding import random_ops
from slapo_rewrite.sharding.placements import (
    PARTIAL,
    REDUCE,
    REPLICATE,
    SHARD,
    PlacementError,
    State,
)
from slapo_rewrite.sharding.rank_checks import sizes_in
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.trace import Trace
from slapo_rewrite.sharding.types import MissingCollective

# The types of arguments that are accepted: not modules or functions, which may do anything.
_PLAIN = (torch.Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


class _Unfollowed(Exception):
    """The reason why a function cannot be followed."""


class _Context:
    """The `ctx` argument of `forward` and `backward`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()

    def save_for_backward(self, *kept: torch.Tensor | None) -> None:
        self.saved_tensors = kept

    def save_for_forward(self, *kept: torch.Tensor | None) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_dirty(self, *changed: torch.Tensor) -> None:
        raise _Unfollowed("it changes its inputs")


class _Record(Trace):
    """The record of a function's `forward` and `backward`, on whole values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled():
            raise _Unfollowed("its `backward` calls autograd")
        if random_ops.draws(name_of(func), args, kwargs or {}):
            raise _Unfollowed("it draws random numbers")
        return super().__torch_function__(func, types, args, kwargs)


def made_of_parts(run: Run, cls: Any, args: Sequence[Any], states: Sequence[State]) -> list[Any]:
    """The outputs of a function for sharded operands, with their placements recorded.

    Raises:
        PlacementError: An output is a partial sum, or it is not known whether the gradients are
            right.
    """
    try:
        return _followed(run, cls, args)
    except (Exception, NeedsGraph) as error:
        raise refused(cls, states, errors.first_line(error)) from None


def _followed(run: Run, cls: Any, args: Sequence[Any]) -> list[Any]:
    if not all(isinstance(each, _PLAIN) for each in args) or any(sizes_in([*args])):
        raise _Unfollowed("its inputs are not only tensors and constants")
    needs = tuple(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
    before = run.entries, run.position, {*run.followed.arguments}, {*run.followed.draws}
    with torch.no_grad():
        run.depth += 1
        try:
            whole = [
                torch.ones(run.full_shape(each), dtype=each.dtype, device=each.device)
                if isinstance(each, torch.Tensor)
                else each
                for each in args
            ]
            record = _Record(run.tree, run.results, run.editable, (), (), run.says)
            with record:
                _there_and_back(None, cls, whole, needs)
        finally:
            run.depth -= 1
        run.entries, run.position = record.around(()).entries, 0
        try:
            made, gradients = _there_and_back(run, cls, args, needs)
            is_all = run.position == len(run.entries)
        finally:
            run.entries, run.position = before[:2]
    if not is_all or (run.followed.arguments, run.followed.draws) != before[2:]:
        raise _Unfollowed("it computes something else on a part")
    for number, (given, gradient) in enumerate(zip(args, gradients, strict=True)):
        if needs[number] and gradient is not None and not _is_alike(run, given, gradient):
            raise _Unfollowed(f"the gradient of its argument {number + 1} does not fit it")
    return made


def _there_and_back(
    run: Run | None, cls: Any, args: Sequence[Any], needs: tuple[bool, ...]
) -> tuple[list[Any], Sequence[Any]]:
    """Runs `forward`, then `backward` on gradients with the outputs' placements."""
    context = _Context(needs)
    if cls.setup_context is not torch.autograd.Function.setup_context:
        output = cls.forward(*args)
        cls.setup_context(context, tuple(args), output)
    else:
        output = cls.forward(context, *args)
    made = list(tensors(output))
    gradients = [torch.ones_like(each) for each in made]
    if run is not None:
        for each, gradient in zip(made, gradients, strict=True):
            if run.flow.of(each).kind == PARTIAL:
                raise _Unfollowed("its result is a partial sum on each rank")
            run.same(each, gradient)
    back = cls.backward(context, *gradients)
    return made, back if isinstance(back, tuple) else (back,)


def _is_alike(run: Run, given: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a gradient is known to have the same placement as its value."""
    one, other = (
        (
            run.flow.of(tensor).kind,
            run.flow.of(tensor).replicated_shard,
            tensor.shape,
            run.split_axes(tensor),
            run.blocks.get(id(tensor)),
        )
        for tensor in (given, gradient)
    )
    return run.flow.knows(gradient) and one == other


def refused(cls: type, states: Sequence[State], why: str) -> PlacementError:
    """The error for a function that is given, or makes, parts or partial sums."""
    state = next(state for state in states if state.kind != REPLICATE)
    is_part = state.kind == SHARD
    return PlacementError(
        f"`{cls.__name__}` works on {'a part' if is_part else 'a partial sum'}, and its "
        f"`backward` is not known to be right there: {why}",
        "gather the value before" if is_part else REDUCE,
        state.source,
        remedy=MissingCollective.whole_of(state.border, state.axis)
        if is_part
        else MissingCollective.sum_of(state.border),
    )
