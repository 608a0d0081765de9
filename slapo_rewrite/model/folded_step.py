"""A step of a model that has two layers of each kind: what is counted of a deep one."""

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
    """What was counted of a model of two layers of each kind, and how deep the real one is."""

    profile: Profile  # what a step takes
    # By the path of each list, for each of its layers which of those that were kept stands for it.
    stands_for: Mapping[str, tuple[int, ...]]
    names: Mapping[str, int]  # all parameters of the full model: how many numbers each is
    # What `cut_evenly` makes stages even by: a size for each layer; none where it was counted on
    # several ranks.
    cut_sizes: Sequence[float] = ()


class DoesNotRun(Exception):
    """A model cannot be built on so many ranks, or its step does not run, in words."""


class StepFails(DoesNotRun):
    """The step itself fails: it may need the layers that were left out, by their number say."""


@dataclass(frozen=True)
class StepShape:
    """What a step is counted of."""

    sequence: int | None  # how many tokens a row has; None for what the schedule's `inputs` give
    dtype: torch.dtype  # of parameters and activations
    is_gpu: bool  # whether it is to be counted as on a GPU


class FoldedStep:
    """A step of a model, to be counted in one way or several.

    The model is in the dtype afterwards. `kernels` are the modules whose kernels are taken to run,
    as on a GPU.

    Raises:
        DoesNotRun: There are no inputs for it, or the rows are too long.
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
        """Counts it; `StepFails` where it does not run."""
        loss = partial(small_model.loss_of, self.schedule, inputs=self.given)
        try:
            with launching_nothing(self.kernels) if self.is_gpu else nullcontext():
                return counted_step(self.model, self.inputs, loss, self.layers, is_gpu=self.is_gpu)
        except Exception as error:  # the model's own code
            raise StepFails(first_line(error)) from error


@contextmanager
def launching_nothing(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Fused kernels of modules are taken, as on a GPU, and count what they are given and give."""
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
    """Without values, nothing tells that a table of positions is too short (`DoesNotRun`)."""
    config: Any = getattr(model, "config", None)
    numbers = [getattr(config, name, None) for name in small_config.POSITIONS]
    tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    for number in numbers:
        # Some tables have two rows before the first position.
        if isinstance(number, int) and number < (sequence or 0) and tables & {number, number + 2}:
            raise DoesNotRun(f"the model has {number} positions")
