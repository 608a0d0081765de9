"""What a training step takes, predicted: of the original, and of the output on one rank.

Forward passes are counted on the meta device (`model.costs`), the output's with the sizes that a
rank has; a backward pass is taken for two of them. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_rewrite.model import small_model
from slapo_rewrite.model.costs import Cost, costs_of, elements_of
from slapo_rewrite.model.meta_device import pretend_world
from slapo_rewrite.model.tree import build_model
from slapo_rewrite.review.built_models import Models
from slapo_rewrite.simulate.hardware import hardware
from slapo_rewrite.simulate.pipeline import Bytes, Stage, Step, simulate
from slapo_rewrite.simulate.stage_costs import backward_seconds, forward_seconds

# Where the tool makes the inputs up: rows of a batch, and tokens in each, as far as there are.
ROWS, TOKENS = 8, 512
GPU = hardware("h200")
DTYPE = torch.bfloat16


class NotPredicted(Exception):
    """A step cannot be counted, in words."""


@dataclass(frozen=True)
class Predicted:
    """What one model takes for a step on one GPU.

    Attributes:
        name: Which model, on what.
        memory: Bytes, by what they are for.
        seconds: Seconds, by what is done.
    """

    name: str
    memory: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def total_memory(self) -> float:
        """All bytes."""
        return sum(self.memory.values())

    @property
    def total_seconds(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Prediction:
    """What a step takes, with and without what the schedule does.

    Attributes:
        models: The original, and the output, in one process and on a rank of several.
        batch: The shapes of the inputs, in words.
        stages: A step of the pipeline; None where there is none, or no DeepSpeed to tell its order.
        micro_batches: Of how many micro-batches that is.
        remarks: What is not counted.
    """

    models: tuple[Predicted, ...]
    batch: str
    stages: Step | None
    micro_batches: int
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class _Counted:
    """A model's elements, and what they cost."""

    paths: list[str]
    costs: list[Cost]
    summed: list[float]  # seconds of the collectives in a forward pass
    parameters: int


def predicted(models: Models) -> Prediction:
    """Predicts a step.

    Args:
        models: The original's model and the output's. They are in bfloat16 afterwards.

    Raises:
        NotPredicted: The model does not run without values, or there are no inputs for it.
    """
    try:
        inputs = _inputs(models.schedule, models.original.root.live)
        original = _counted(models.original.root.live, inputs, 1)
        alone = _counted(models.alone.root.live, inputs, 1)
        rank = alone
        if models.world > 1:
            with pretend_world(models.world):
                model = build_model(models.schedule.model, models.emitted.module)
                rank = _counted(model, inputs, models.world)
    except Exception as error:  # the model's own code, and the schedule's
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NotPredicted(reason) from error
    recomputed = _recomputed(models)
    rows = [_step("the original", original, ()), _step("rewritten", alone, recomputed)]
    if models.world > 1:
        rows[1:] = [
            _step("rewritten, in one process", alone, recomputed),
            _step(f"rewritten, a rank of {models.world}", rank, recomputed),
        ]
    ends = _ends(rank.paths, models.cuts)
    micro_batches = 2 * len(ends)
    step = _pipeline(rank, ends, recomputed, micro_batches) if len(ends) > 1 else None
    return Prediction(
        tuple(rows), _described(inputs), step, micro_batches, tuple(_remarks(models, ends, step))
    )


def _inputs(schedule: Any, model: nn.Module) -> dict[str, Any]:
    """One step's arguments on the meta device; those that the tool makes up in a usual size."""
    made = small_model.training_inputs(schedule, model)
    config: Any = getattr(model, "config", None)
    tokens = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    small = (small_model.BATCH, small_model.TOKENS)

    def sized(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = tuple(value.shape)
        if not hasattr(schedule, "inputs") and shape[:1] == small[:1]:
            shape = (ROWS, tokens, *shape[2:]) if shape[:2] == small else (ROWS, *shape[1:])
        dtype = DTYPE if value.is_floating_point() else value.dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    return {name: sized(value) for name, value in made.items()}


def _counted(model: nn.Module, inputs: Mapping[str, Any], world: int) -> _Counted:
    model.to(DTYPE).train()
    paths = elements_of(model, inputs)
    listener = _Listener(len(paths), world)
    with listener.follows([model.get_submodule(path) for path in paths]), listener:
        costs = costs_of(model, inputs, paths)
    return _Counted(paths, costs, listener.seconds, sum(p.numel() for p in model.parameters()))


class _Listener(TorchDispatchMode):
    """Times the collectives of a forward pass, each for the element that was called last."""

    def __init__(self, count: int, world: int) -> None:
        super().__init__()
        self.seconds, self._world, self._now = [0.0] * count, world, 0

    @contextmanager
    def follows(self, elements: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, it is seen which element is called."""

        def enter(number: int) -> None:
            self._now = number

        with ExitStack() as stack:
            for i, element in enumerate(elements):
                hook = element.register_forward_pre_hook(lambda *_, number=i: enter(number))
                stack.callback(hook.remove)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            size = max(_size(value) for value in args[:2])
            time = GPU.inside.all_reduce if name.startswith("allreduce") else GPU.inside.all_gather
            self.seconds[self._now] += time(size, self._world)
        return results


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def _recomputed(models: Models) -> tuple[str, ...]:
    """The paths of the modules that run forward again in the backward pass."""
    whole = (d for d in models.directives if d.primitive == "checkpoint" and "(" in d.text)
    return tuple(path for d in whole if d.text.endswith("checkpoint()") for path in d.paths)


def _is_below(path: str, above: str) -> bool:
    return not above or f"{path}.".startswith(f"{above}.")


def _again(counted: _Counted, recomputed: Sequence[str]) -> list[bool]:
    """Which elements run forward a second time."""
    return [any(_is_below(path, above) for above in recomputed) for path in counted.paths]


def _step(name: str, counted: _Counted, recomputed: Sequence[str]) -> Predicted:
    forward = forward_seconds(counted.costs, GPU.device)
    again = _again(counted, recomputed)
    summed = sum(counted.summed)
    each = Bytes()
    return Predicted(
        name,
        {
            "weights": counted.parameters * each.weight,
            "gradients": counted.parameters * each.gradient,
            "optimizer": counted.parameters * each.optimizer,
            "activations": sum(cost.held for cost in counted.costs),
        },
        {
            "forward": sum(forward),
            "backward": sum(backward_seconds(counted.costs, GPU.device)),
            "recomputation": sum(t for t, twice in zip(forward, again, strict=True) if twice),
            # As many sums go back as go there, and those of what is computed again.
            "communication": 2 * summed
            + sum(t for t, twice in zip(counted.summed, again, strict=True) if twice),
        },
    )


def _ends(paths: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """For each stage the index behind its last element."""
    ends = {
        max((i for i, path in enumerate(paths, 1) if _is_below(path, cut)), default=0)
        for cut in cuts
    }
    return sorted({*ends - {0}, len(paths)})


def _pipeline(
    counted: _Counted, ends: Sequence[int], recomputed: Sequence[str], micro_batches: int
) -> Step | None:
    forward = [
        computed + summed
        for computed, summed in zip(
            forward_seconds(counted.costs, GPU.device), counted.summed, strict=True
        )
    ]
    backward = [
        computed + summed + (there if twice else 0.0)
        for computed, summed, there, twice in zip(
            backward_seconds(counted.costs, GPU.device),
            counted.summed,
            forward,
            _again(counted, recomputed),
            strict=True,
        )
    ]
    stages = []
    for start, end in pairwise([0, *ends]):
        part = counted.costs[start:end]
        sizes = {name: size for cost in part for name, size in cost.parameters.items()}
        count = sum(sizes.values())
        stages.append(
            Stage(
                forward=sum(forward[start:end]),
                backward=sum(backward[start:end]),
                sent=part[-1].sent if end < len(counted.costs) else 0,
                parameters=count,
                held=sum(cost.held for cost in part),
                optimizer=2 * Bytes().of(count, 1) / GPU.device.bandwidth,
            )
        )
    try:
        return simulate(stages, micro_batches, pipeline=GPU.inside)
    except ImportError:
        return None


def _described(inputs: Mapping[str, Any]) -> str:
    shown = [f"{name} {list(v.shape)}" for name, v in inputs.items() if isinstance(v, Tensor)]
    return ", ".join(shown)


def _remarks(models: Models, ends: Sequence[int], step: Step | None) -> Iterator[str]:
    if any(hasattr(module, "runs_triton") for module in models.emitted.modules()):
        yield "fused kernels are counted as the operators that they stand for"
    partly = [
        d.text
        for d in models.directives
        if d.primitive == "checkpoint" and not d.text.endswith("checkpoint()")
    ]
    if partly:
        yield "what a checkpoint of a part of a layer computes again is not counted"
    if len(ends) > 1 and step is None:
        yield "the stages are not timed: DeepSpeed, whose order they run in, is not installed"
