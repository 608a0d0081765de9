"""The run as a rank: compares every operation with the record of the whole model's run.

An operation that takes a size is first adapted by its rule. Its result must then have the recorded
shape, or less along split axes; its placement follows from those of the operands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_rewrite.model.meta_device import QUESTIONS, Answers, unwatched, with_values
from slapo_rewrite.model.results import tensors
from slapo_rewrite.operations import name_of
from slapo_rewrite.sharding import (
    losses,
    random_ops,
    split_ops,
    statistics,
    tied_heads,
    whole_operands,
)
from slapo_rewrite.sharding.functional_layers import spelled_call
from slapo_rewrite.sharding.packed_parts import Blocks, described, reduced
from slapo_rewrite.sharding.placements import (
    ADDED_INTO,
    ADDING,
    MULTIPLYING,
    PARTIAL,
    REPLICATE,
    SHARD,
    MeetsWhole,
    PlacementError,
    State,
)
from slapo_rewrite.sharding.rank_checks import (
    CONSTANT,
    REPEATING,
    RULES,
    check_assigned,
    check_in_place,
    check_made,
    check_numbers,
    check_operation,
    check_packing,
    sizes_in,
)
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.trace import Entry, in_order
from slapo_rewrite.sharding.tracked_sizes import shapes
from slapo_rewrite.sharding.types import (
    CALL,
    ArgumentChange,
    CannotFollow,
)
from slapo_rewrite.sharding.units import note_even

# Element-wise operations of two operands.
_ELEMENTWISE = {
    "add", "sub", "mul", "div", "__add__", "__sub__", "__mul__", "__truediv__", "__radd__",
    "__rsub__", "__rmul__", "rsub",
}  # fmt: skip


# Operations that return the elements of their operand, or some, in another shape or dtype.
_VIEWING = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute",
    "contiguous", "clone", "to", "type", "float", "half", "bfloat16", "double", "__getitem__",
    "narrow", "select", "detach", ".mT", ".T", "movedim", "swapaxes",
}  # fmt: skip

_ZEROS = {"zeros", "zeros_like", "new_zeros"}


class RankRun(TorchFunctionMode):
    """Intercepts the sharded model's operations and compares them with the whole model's record."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.answers = run, Answers()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._carry_out(
                func, *in_order(func, args, with_values(func, args, kwargs or {}))
            )
        except CannotFollow as error:
            error.place = error.place or self.run.place()
            raise

    def _carry_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        run = self.run
        if func in QUESTIONS and not run.depth:
            run.flow.tell(func.__name__, list(tensors(args)))
            if (place := run.editable_place()) is not None:
                run.followed.questions.add(place)
        if (answer := self.answers.to(func, args, run.says)) is not None:
            return answer
        if run.depth:
            return run.results.carry_out(func, args, kwargs)
        name = name_of(func)
        with unwatched():  # hides our own use of tensors from the modes below
            run.check_reading(name, (args, kwargs))
        if (spelled := spelled_call(run.linear, func, args, kwargs, run.editable)) is not None:
            layer, place, callee = spelled
            run.note_call(True)
            source = str(layer._followed_path)
            run.followed.arguments.add(ArgumentChange(place, (CALL,), callee, source))
            return layer(args[0])
        if name == "linear":
            run.note_call(False)  # the same text may call a layer that is not sharded
        if run.wanted.repeats:
            run.pass_over(func, shapes((args, kwargs)))
        rule = RULES.get(name)
        entry = run.entries[run.position] if run.position < len(run.entries) else None
        known = entry is not None and entry.function == func
        if known and (loss := losses.of_parts(run, name, args, kwargs)) is not None:
            return loss
        if known and (whole := tied_heads.logits(run, func, name, args, kwargs)) is not None:
            return whole
        blocks: Blocks | None = None
        if rule and args and isinstance(args[0], torch.Tensor) and known:
            assert entry is not None
            if len(entry.inputs[0]) != args[0].dim():
                raise CannotFollow("the number of axes depends on the sharded size")
            run.note_call(bool(run.split_axes(args[0])))
            args, kwargs, blocks = rule(run, entry, args, kwargs)
        elif name in ("cat", "concat", "concatenate") and entry is not None and known:
            blocks = split_ops.join(run, entry, args, kwargs)
        try:
            output = run.results.carry_out(func, args, kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            raise _unfit(run, name or str(func), args, kwargs, error) from error
        with unwatched():
            if shapes(output):
                entry = run.next_entry(func)
                entry.choose(tensors(output))
                try:
                    _take_in(run, name, entry, args, kwargs, output, blocks)
                except (CannotFollow, PlacementError):
                    run.position -= 1  # it did not fit
                    raise
            elif name == "__setitem__":
                check_assigned(run, run.next_entry(func), args)
            else:
                run.flow.tell(name, list(tensors((args, kwargs))))
        return output


def _unfit(run: Run, name: str, args: Any, kwargs: Any, error: Exception) -> CannotFollow:
    """The error for an operation that fails on a rank's operands."""
    given = list(tensors((args, kwargs)))
    parts = [t for t in given if run.flow.of(t).kind == SHARD]
    part = parts[0] if parts else None
    other = next((t for t in parts if run.split_axes(t) != run.split_axes(parts[0])), None)
    axes = [run.split_axes(t) for t in (part, other) if t is not None]
    whole = next((t for t in given if run.flow.of(t).kind != SHARD and t.dim()), None)
    message, hint = f"`{name}` does not fit the sharded sizes: {error}", None

    def source(tensor: torch.Tensor) -> str:
        return run.flow.of(tensor).source or "s"

    if part is not None and whole is not None:
        message = (
            f"`{name}` combines a part of shape {list(part.shape)}, of `{source(part)}`, with a "
            f"whole value of shape {list(whole.shape)}"
        )
        hint = whole_operands.advice(run, given)
    elif part is not None and other is not None and not all(axes):
        message = (
            f"`{name}` combines a part of shape {list(part.shape)}, of `{source(part)}`, with one "
            f"of shape {list(other.shape)}, of `{source(other)}`: without sharding they are "
            f"{list(run.full_shape(part))} and {list(run.full_shape(other))}"
        )
        hint = "repeat the shared value as often as a rank needs it"
    elif part is not None and other is not None:
        message = (
            f"`{name}` combines a part along axis {axes[0][0]}, of `{source(part)}`, with a part "
            f"along axis {axes[1][0]}, of `{source(other)}`"
        )
        hint = "split both along one axis"
    unfit = CannotFollow(
        message, run.source_of((args, kwargs)), hint, attributes=run.attributes_of((args, kwargs))
    )
    unfit.to_scatter = whole_operands.to_scatter(run, given)
    unfit.to_gather = whole_operands.to_gather(run, given)
    return unfit


def _take_in(
    run: Run, name: str, entry: Entry, args: Any, kwargs: Any, output: Any, blocks: Blocks | None
) -> None:
    inputs, outputs = list(tensors((args, kwargs))), list(tensors(output))
    if run.flow.leave_out(name, inputs, (args, kwargs), outputs):
        run.alive += outputs
        return
    run.note_reader(inputs)
    check_operation(run, entry, outputs, args, kwargs)
    check_numbers(run, name, entry, args, kwargs)
    check_made(run, name, entry, inputs, outputs)
    random_ops.note(run, name, args, kwargs, outputs)
    statistic = statistics.over_ranks(run, name, entry.inputs, args, kwargs)
    if blocks is not None and name == "glu":
        run.flow.set(outputs[0], run.flow.of(inputs[0]))  # a rank has matching parts of both halves
    elif statistic is not None:
        run.flow.set(outputs[0], statistic)
    else:
        _sum_into_zeros(run, name, inputs)
        _add_once(run, name, inputs)
        before = run.flow.of(inputs[0]) if inputs else None
        try:
            run.flow.operate(
                name, inputs, entry.inputs, args, kwargs, outputs, entry.outputs, run.replicas > 1
            )
        except PlacementError as error:
            if entry.is_unread or _may_be_left_out(run, name, inputs):
                run.flow.set(outputs[0], State(wrong=run.refused(error)))
                run.alive.append(outputs[0])
                return
            kind = PARTIAL if error.remedy and error.remedy.operation == "all_reduce" else SHARD
            of_kind = (t for t in inputs if run.flow.of(t).kind == kind)
            error.tensor = error.tensor if error.tensor is not None else next(of_kind, None)
            if isinstance(error, MeetsWhole):
                error.hint = whole_operands.advice(run, inputs)
                error.to_scatter = whole_operands.to_scatter(run, inputs)
            raise
        if before is not None and outputs and outputs[0] is inputs[0]:
            check_in_place(run, name, inputs[0], before)
    check_packing(run, name, entry, inputs, (args, kwargs))
    _hand_on(run, name, entry, inputs, (args, kwargs), outputs, blocks)


def _may_be_left_out(run: Run, name: str, inputs: list[torch.Tensor]) -> bool:
    """Whether a sum over parameters, sharded and whole ones, may be multiplied by zero later on."""
    states = [run.flow.of(tensor) for tensor in inputs if name in ADDING]
    is_sum = any(state.kind == PARTIAL and state.read for state in states)
    ahead = run.entries[run.position :] if is_sum else ()
    return any(0 in e.numbers and name_of(e.function) in MULTIPLYING for e in ahead)


def _sum_into_zeros(run: Run, name: str, inputs: list[torch.Tensor]) -> None:
    """Marks zeros that partial sums are added to as partial sums, which zeros are as well."""
    if name in ADDED_INTO and inputs and id(inputs[0]) in run.zeros and not inputs[0]._is_view():
        added = next((s for t in inputs[1:] if (s := run.flow.of(t)).kind == PARTIAL), None)
        if added is not None:
            run.flow.set(inputs[0], State(PARTIAL, added.source, added.replicated_shard))


def _add_once(run: Run, name: str, inputs: list[torch.Tensor]) -> None:
    """Marks a bias that is added to a partial sum as one that a single rank must add.

    The bias belongs to a module with sharded parameters, whose `forward` will read it so. If that
    is assumed already and the bias is whole all the same, it is read elsewhere.
    """
    adds = name in ADDING and any(run.flow.of(t).kind == PARTIAL for t in inputs)
    if name == "linear" and len(inputs) > 2:  # it may sum over features that are split in both
        adds |= all(-1 in [a - t.dim() for a in run.split_axes(t)] for t in inputs[:2])
    if not adds:
        return
    held = {
        id(parameter): (path, own)
        for path in run.request.parameters
        for own, parameter in run.tree.nodes[path].live.named_parameters(recurse=False)
    }
    for tensor in inputs:
        key = next((held[seen] for seen in run.seen_as(tensor) if seen in held), None)
        if key and run.flow.of(tensor).kind == REPLICATE and key not in run.wanted.once:
            run.once.add(key)
            run.flow.set(tensor, State(PARTIAL, key[0]))


def _hand_on(
    run: Run,
    name: str,
    entry: Entry,
    inputs: list[torch.Tensor],
    given: Any,
    outputs: list[torch.Tensor],
    blocks: Blocks | None,
) -> None:
    """Records a result's origin, the sizes that it was made with, and how it is packed."""
    made = tuple(sizes_in(given)) if name in CONSTANT or name in REPEATING else ()
    if name in REPEATING and run.flow.of(inputs[0]).kind == SHARD:
        _note_repeats(run, name, inputs[0], given)
        for axis in run.split_axes(inputs[0]) if name == "repeat_interleave" else ():
            if entry.outputs[0][axis : axis + 1] != entry.inputs[0][axis : axis + 1]:
                note_even(run, inputs[0], axis)
    for tensor in inputs:
        made += run.made_with.get(id(tensor), ())
    made = tuple({id(size): size for size in made}.values())  # once: each residual would double it
    origin = _origin(run, name, inputs)
    for number, tensor in enumerate(outputs):
        run.makers.setdefault(id(tensor), inputs)
        if name in _ZEROS:
            run.zeros.add(id(tensor))
        if name in _VIEWING and tensor is not inputs[0]:
            run.viewed[id(tensor)] = id(inputs[0])
        if made:
            run.made_with[id(tensor)] = made
        if origin:
            run.origins[id(tensor)] = origin
        found = blocks
        if found is None or len(outputs) > 1:
            found = _blocks_of(run, name, entry, inputs, tensor, number)
        if found:
            run.blocks[id(tensor)] = found
        run.alive.append(tensor)


def _origin(run: Run, name: str, inputs: list[torch.Tensor]) -> str | None:
    """The layer whose output alone a result is made from; scaling by a parameter does not count."""
    if name in _ELEMENTWISE and len(inputs) > 1:
        inputs = [t for t in inputs if not isinstance(t, nn.Parameter)]
        found = {run.origins.get(id(t)) for t in inputs}
        return found.pop() if len(found) == 1 else None
    return run.origins.get(id(inputs[0])) if len(inputs) == 1 else None


def _note_repeats(run: Run, name: str, tensor: torch.Tensor, given: Any) -> None:
    """Records the attributes that say how often a rank's heads are repeated."""
    args, kwargs = given
    times = list(sizes_in((args[1:], kwargs)))
    if name in ("expand", "broadcast_to"):
        sizes = args[1:] or list(kwargs.values())
        sizes = sizes[0] if isinstance(sizes[0], (list, tuple)) else sizes
        pairs = zip(reversed(sizes), reversed(tensor.shape), strict=False)
        times = list(sizes_in([size for size, have in pairs if size != have]))
    for size in times:
        found = run.repeats if run.flow.of(tensor).replicated_shard else run.followed.may_repeat
        found.update(run.undecided(size))


def _blocks_of(
    run: Run,
    name: str,
    entry: Entry,
    inputs: list[torch.Tensor],
    output: torch.Tensor,
    number: int,
) -> Blocks:
    """How the split axis of a result is packed: like that of its operands, wherever it came to."""
    found: Blocks = {}
    whole = entry.outputs[number]
    split = [a for a, n in enumerate(output.shape[: len(whole)]) if n != whole[a]]
    for tensor, shape in zip(inputs, entry.inputs, strict=False):
        for axis, packed in run.blocks.get(id(tensor), {}).items():
            if name in split_ops.IN_PIECES and shape[axis] != whole[axis]:
                pieces = [out[axis] for out in entry.outputs]
                packed = split_ops.piece_of(packed, pieces, number)
            places = [a for a in split if whole[a] == sum(packed)]
            if len(places) != 1:
                continue
            if reduced(found.setdefault(places[0], packed)) != reduced(packed):
                raise CannotFollow(
                    f"this combines {described(found[places[0]])} with {described(packed)} along a "
                    "split axis",
                    hint="shard both layers with the same `parts`",
                )
    return found
