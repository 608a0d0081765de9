"""Resizes the arguments of a training step, for runs on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slapo_rewrite.model import small_config, small_model
from slapo_rewrite.model.results import tensors


def sized_inputs(
    schedule: Any, model: nn.Module, rows: int | None, tokens: int | None
) -> dict[str, Any]:
    """The arguments of a step with other numbers of rows and tokens, on the meta device.

    The first axis of a tensor is the batch axis. Further axes are token axes if they are as long as
    the second axis of the first integer tensor.
    """
    made = small_model.training_inputs(schedule, model)
    found = [value for value in made.values() if isinstance(value, Tensor) and value.dim()]
    given = found[0].shape[0] if found else 0
    long = tokens_of(made)

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        for axis, size in enumerate(shape):
            if axis == 0 and size == given and rows is not None:
                shape[0] = rows
            elif axis and tokens is not None and size == long:
                shape[axis] = tokens
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return {name: resized(value) for name, value in made.items()}


def tokens_of(inputs: Mapping[str, Any]) -> int | None:
    """The number of tokens per row: the second axis of the first integer tensor."""
    found = (value for value in inputs.values() if isinstance(value, Tensor))
    return next((t.shape[1] for t in found if t.dim() > 1 and not t.is_floating_point()), None)


def rows_of(schedule: Any, model: nn.Module) -> int:
    """The number of rows of the schedule's own inputs."""
    made = small_model.training_inputs(schedule, model)
    return next((t.shape[0] for t in tensors(made) if t.dim()), 1)


def positions_of(model: nn.Module) -> int | None:
    """The number of positions of a Hugging Face model; None if its config does not say."""
    config: Any = getattr(model, "config", None)
    numbers = [getattr(config, name, None) for name in small_config.POSITIONS]
    return min((n for n in numbers if isinstance(n, int) and n > 0), default=None)
