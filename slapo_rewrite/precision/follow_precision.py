"""Runs the model to find which values have to be cast, and where.

The model runs in training, in eval mode, and such that it fills a cache. In each run operations are
computed in their precision: products in half precision, if their module computes in it; norms,
softmax, losses and sums in float32; all others in that of their operands. If an operand has another
precision, a cast is needed in a method of the model: at the operation itself, or at the call of a
function that is not a method of the model's own classes.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from slapo_rewrite.errors import first_line
from slapo_rewrite.hugging_face import KEEPS_TOKENS
from slapo_rewrite.model.meta_device import Answers, carry_out, with_values
from slapo_rewrite.model.results import tensors
from slapo_rewrite.precision.call_stack import CallStack
from slapo_rewrite.precision.casts import HALVES, CannotCast, Precisions, Wanted, keeping
from slapo_rewrite.precision.precision_run import PrecisionRun
from slapo_rewrite.sharding.module_state import state_kept
from slapo_rewrite.sharding.operation_places import first_argument, place_in_traceback, raised_by
from slapo_rewrite.sharding.trace import device_of
from slapo_rewrite.sharding.types import CannotRun

ALREADY = "the model computes in half precision itself"
AS_IT_IS = "leave `autocast` out, or build the model in float32"


def follow_precision(
    model: nn.Module,
    paths: Mapping[int, str],
    inputs: Mapping[str, Any],
    editable: Callable[[str], str | None],
    wanted: Wanted,
) -> Precisions:
    """Finds the casts that are needed; raises `CannotCast` if the model cannot be computed so.

    The model is on the meta device or a small one, and does not change. `paths` has its modules'
    paths by `id`, and `editable` returns the current text of a file that may be changed, or None.
    """
    found, device = Precisions(), device_of(model)
    if any(t.dtype in HALVES for t in (*model.parameters(), *model.buffers())):
        raise CannotCast(ALREADY, None, AS_IT_IS)
    given = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), dict(inputs))
    stack, was_training = CallStack(paths, editable), model.training
    try:
        for way in _ways(model):
            model.train(way.training)
            options = {**given, **way.options}
            try:
                _run(model, options, _PlainRun(stack))
            except CannotRun:
                if way.options:
                    continue
                raise
            # A cast at the call of a function takes effect inside of it in the next run.
            known = -1
            while known < len(found.given):
                known, mode = len(found.given), PrecisionRun(stack, wanted, found)
                try:
                    _run(model, options, mode)
                except CannotRun as error:
                    raise _failed(error, stack) from error
            if mode.out_of_reach is not None:
                raise mode.out_of_reach
    finally:
        model.train(was_training)
    found.check()
    return found


@dataclass(frozen=True)
class _Way:
    """A mode of calling the model."""

    training: bool  # whether it is in training mode
    # Keyword arguments beside those of a training step.
    options: Mapping[str, Any] = field(default_factory=dict)


def _ways(model: nn.Module) -> list[_Way]:
    """A training step, one in eval mode, and one that fills a cache for further tokens."""
    ways = [_Way(True), _Way(False)]
    if KEEPS_TOKENS in inspect.signature(model.forward).parameters:
        ways.append(_Way(False, {KEEPS_TOKENS: True}))
    return ways


def _failed(error: CannotRun, stack: CallStack) -> CannotCast:
    """The error for a model that fails in half precision, with the module that fails."""
    cause: Any = error.__cause__
    owner = ""
    for frame, _ in traceback.walk_tb(cause.__traceback__):
        owner = stack.paths.get(id(first_argument(frame)), owner)
    return CannotCast(
        f"with products in half precision `{owner or 's'}` fails: {first_line(cause)}",
        place_in_traceback(cause, stack.editable),
        f"keep it in float32: {keeping(owner)}",
    )


def _run(model: nn.Module, inputs: Mapping[str, Any], mode: TorchFunctionMode) -> None:
    try:
        with torch.enable_grad(), device_of(model), state_kept(model), mode:
            model(**inputs)
    except CannotCast:
        raise
    except Exception as error:
        raise CannotRun(f"{type(error).__name__}: {error}", raised_by(error)) from error


class _PlainRun(TorchFunctionMode):
    """Runs the model unchanged; raises `CannotCast` for values in half precision."""

    def __init__(self, stack: CallStack) -> None:
        super().__init__()
        self.stack, self.answers = stack, Answers()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = with_values(func, args, kwargs or {})
        if (answer := self.answers.to(func, args)) is not None:
            return answer
        output = carry_out(func, args, kwargs)
        if any(t.dtype in HALVES for t in tensors(output)):
            call = self.stack.call()
            raise CannotCast(ALREADY, call.place if call else None, AS_IT_IS)
        return output
