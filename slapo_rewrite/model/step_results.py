"""The results of training steps, and the differences between two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from slapo_rewrite.model.results import result_pairs

# Gradients this small, relative to the largest one, are rounding errors.
FLOOR = 1e-6
# An error larger than that of the original with rounded weights by this factor is not rounding.
BEYOND = 10

KEPT_IS_CHANGED = (
    "nothing was written; a value that `save` keeps is changed in place: create a new tensor (no "
    "`inplace=True`, no `+=`), or remove the value from `save`"
)


class OtherNumbersError(Exception):
    """The output computes other numbers than the original.

    Attributes:
        world: The number of ranks.
        name: The result that differs: a parameter's gradient, a buffer or an output.
        error: The difference, relative to the largest number of the result.
    """

    hint = (
        "nothing was written; remove lines of the schedule one by one to find the one that causes "
        "this, and please report it"
    )

    def __init__(self, world: int, name: str, error: float, what: str) -> None:
        super().__init__(world, name, error, what)
        self.world, self.name, self.error, self.what = world, name, error, what

        if "selective activation checkpoint has been mutated" in what:  # as torch says it
            self.hint = KEPT_IS_CHANGED

    def __str__(self) -> str:
        ranks = "in one process" if self.world == 1 else f"on {self.world} ranks"
        off = f" `{self.name}` is off by {self.error:.1%}" if self.name else ""
        return f"{ranks} {self.what}{off}"


class OtherStartError(OtherNumbersError):
    """The output's constructor initialises other weights."""

    hint = (
        "nothing was written; a constructor that compares a layer's class, as in `type(m) is "
        "nn.Linear`, does not find the split layer: use `isinstance(m, nn.Linear)`"
    )


class HalfPrecisionError(OtherNumbersError):
    """The output does not run with its casts, or a value overflows."""

    hint = (
        "nothing was written; keep the module or operation that computes these values in float32: "
        '.autocast(keep=["PATH", "matmul"])'
    )


class OtherUpdateError(OtherNumbersError):
    """The output computes other numbers if its backward pass updates parameters."""

    hint = (
        "nothing was written; the backward pass updates each parameter as soon as its gradient is "
        "complete, so nothing may read a parameter after that without a gradient, as "
        "`weight.detach()` does: remove `step_in_backward`"
    )


@dataclass
class Step:
    """The results of a step: outputs in training and in eval mode, gradients, and buffers after it.

    Gradients and buffers are full tensors, by the original's names.
    """

    evaluated: Any
    outputs: Any
    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    draws: bool  # whether the step draws random numbers


def worst(want: Step, have: Step, rounded: Step | None = None) -> tuple[float, str, str]:
    """The largest difference, with the result's name and kind.

    `rounded` are the original's results with rounded weights: differences that occur there as well
    do not count. A gradient that is zero apart from rounding (a key's bias before a softmax) may
    have any relative error if a part of the model computes in float32.
    """
    found = _differences(want, have)
    own = {(name, what): gap for gap, name, what in _differences(want, rounded or want)}
    beyond = [each for each in found if each[0] > BEYOND * own.get(each[1:], 0.0)]
    return max(beyond, key=lambda each: each[0], default=(0.0, "", ""))


def _differences(want: Step, have: Step) -> list[tuple[float, str, str]]:
    found = []
    for what, one, other in (
        ("the output (in eval mode)", want.evaluated, have.evaluated),
        ("the output", want.outputs, have.outputs),
    ):
        for name, a, b in result_pairs(one, other, ""):
            both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            if both and not (one is want.outputs and is_part(a, b)):
                found.append((error(a, b), name or "output", what))
    if want.loss is not None and have.loss is not None:
        found.append((error(want.loss, have.loss), "loss", "the"))
    sizes = (float(g.abs().max()) for g in want.gradients.values() if g.numel())
    floor = FLOOR * max(sizes, default=0.0)
    for what, ours, theirs in (
        ("the gradient of", want.gradients, have.gradients),
        ("after a step the buffer", want.buffers, have.buffers),
    ):
        for name, tensor in ours.items():
            if name in theirs:
                found.append((error(tensor, theirs[name], floor), name, what))
    return found


def is_part(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether a tensor may be a rank's shard of another, as logits for a sharded loss are."""
    sizes = zip(whole.shape, part.shape, strict=False)
    differ = [have < want for want, have in sizes if have != want]
    return whole.dim() == part.dim() and differ == [True]


def error(want: torch.Tensor, have: torch.Tensor, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest number; equal NaNs are equal."""
    if want.shape != have.shape:
        return 1.0
    if not want.numel():
        return 0.0
    a, b = (tensor.detach().to_dense().to(torch.float64) for tensor in (want, have))
    gap, scale = float((a - b).abs().max()), float(a.abs().max())
    if not (math.isfinite(gap) and math.isfinite(scale)):
        same = (a == b) | (a.isnan() & b.isnan())
        gap = float((a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf).max())
        scale = float(a.abs().masked_fill(~a.isfinite(), 0.0).max())
    return gap / max(scale, floor, 1e-12)
