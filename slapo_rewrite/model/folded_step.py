"""Counts the training step of a deep model on a model with two layers of each kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from slapo_rewrite.errors import first_line
from slapo_rewrite.model import small_config, small_model
from slapo_rewrite.model.results import in_dtype
from slapo_rewrite.model.sized_inputs import sized_inputs
from slapo_rewrite.model.step_profile import ROWS, NotLaunched, Profile, counted_step


@dataclass(frozen=True)
class Counted:
    """The counts of a model with two layers of each kind, and the depth of the real model."""

    profile: Profile  # the counts of a step
    # By path of a list: for each of its layers, the position of its representative.
    stands_for: Mapping[str, tuple[int, ...]]
    names: Mapping[str, int]  # all parameters of the full model, with their sizes
    # The size of each layer by which `cut_evenly` balances stages; empty if counted on several
    # ranks.
    cut_sizes: Sequence[float] = ()


class DoesNotRun(Exception):
    """A model cannot be built on that many ranks, or its step does not run; holds the reason."""


class StepFails(DoesNotRun):
    """The step itself fails: it may need layers that were removed, by their number for example."""


@dataclass(frozen=True)
class StepShape:
    """The settings of a counted step."""

    sequence: int | None  # tokens per row; None: as the schedule's `inputs` returns
    dtype: torch.dtype  # of parameters and activations
    is_gpu: bool  # whether it is counted as on a GPU


class FoldedStep:
    """A training step of a model, which can be counted several times.

    Converts the model to the dtype. `kernels` are the modules whose Triton kernels count as run, as
    on a GPU.

    Raises:
        DoesNotRun: The inputs cannot be made, or the rows are too long.
    """

    def __init__(
        self,
        schedule: Any,
        model: nn.Module,
        layers: Mapping[str, Sequence[nn.Module]],
        shape: StepShape,
        kernels: Iterable[ModuleType],
    ) -> None:
        self.schedule, self.layers, self.kernels = schedule, layers, kernels
        self.is_gpu = shape.is_gpu
        check_positions(model, shape.sequence)
        try:
            self.given = sized_inputs(schedule, model, ROWS, shape.sequence)
            self.model = model.to(shape.dtype).train()
        except Exception as error:  # the schedule's own code
            raise DoesNotRun(first_line(error)) from error
        self.inputs = in_dtype(self.given, shape.dtype)

    def count(self) -> Profile:
        """Counts the step; raises `StepFails` if it does not run."""
        loss = partial(small_model.loss_of, self.schedule, inputs=self.given)
        try:
            with launching_nothing(self.kernels) if self.is_gpu else nullcontext():
                return counted_step(self.model, self.inputs, loss, self.layers, is_gpu=self.is_gpu)
        except Exception as error:  # the model's own code
            raise StepFails(first_line(error)) from error


@contextmanager
def launching_nothing(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Takes modules' Triton code paths without launching; kernels count their arguments."""
    with ExitStack() as stack:
        # Autocast knows no meta device, and is off.
        stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda *_: False))
        for module in modules:
            for name, value in list(vars(module).items()):
                if name == "runs_triton" and getattr(module, "triton", True) is not None:
                    stack.enter_context(patch.object(module, name, lambda *_: True))
                elif type(value).__name__ == "JITFunction":
                    stack.enter_context(patch.object(module, name, NotLaunched()))
        yield


def check_positions(model: nn.Module, sequence: int | None) -> None:
    """Raises `DoesNotRun` for too few positions, which a run without values cannot notice."""
    config: Any = getattr(model, "config", None)
    numbers = [getattr(config, name, None) for name in small_config.POSITIONS]
    tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    for number in numbers:
        # Some tables have two rows before the first position.
        if isinstance(number, int) and number < (sequence or 0) and tables & {number, number + 2}:
            raise DoesNotRun(f"the model has {number} positions")
