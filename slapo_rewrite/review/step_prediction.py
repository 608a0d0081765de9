"""Predicts the time and memory of a step, like `plan`, for the original and for a rank's output.

Steps are counted on the meta device, the output's with the sizes of a rank, with its recomputation,
and with its pipeline cuts. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from slapo_rewrite.errors import first_line
from slapo_rewrite.model.folded_step import StepShape
from slapo_rewrite.model.short_build import Shortening
from slapo_rewrite.model.sized_inputs import positions_of, rows_of, sized_inputs
from slapo_rewrite.plan.candidates import Predicted, Predictor, Way
from slapo_rewrite.plan.rewritten_step import Countable
from slapo_rewrite.review.built_models import Models
from slapo_rewrite.simulate.hardware import hardware
from slapo_rewrite.simulate.pipeline import Stage, Step, live_micro_batches, simulate
from slapo_rewrite.simulate.step_memory import states

# The rows of a batch, and at most the tokens of each, if the tool makes the inputs.
ROWS, TOKENS = 8, 512
GPU, NODE, PRECISION = hardware("h200"), 8, "bf16"


class NotPredicted(Exception):
    """A step cannot be counted; holds the reason."""


@dataclass(frozen=True)
class ModelStep:
    """The prediction of one model's step, with one micro-batch on one GPU."""

    name: str  # the model and its ranks
    predicted: Predicted  # what is predicted

    @property
    def memory(self) -> Mapping[str, float]:
        """The bytes by use; activations are the rest of the peak memory."""
        kept = states(PRECISION, self.predicted.way.zero, self.predicted.way.data)
        parameters = self.predicted.states / kept.each
        own = {
            "weights": parameters * kept.weight,
            "gradients": parameters * kept.gradient,
            "optimizer": parameters * kept.optimizer,
        }
        return {**own, "activations": self.predicted.memory - self.predicted.states}

    @property
    def seconds(self) -> Mapping[str, float]:
        """The seconds by kind of work."""
        return {
            kind: share * self.predicted.seconds for kind, share in self.predicted.shares.items()
        }


@dataclass(frozen=True)
class Stages:
    """The prediction of a step of the output's pipeline."""

    predicted: Predicted  # the prediction of the whole pipeline
    stages: Sequence[Stage]  # the times of a micro-batch in each stage
    live: Sequence[int]  # the most micro-batches in flight in each stage
    memory: Sequence[float]  # the peak bytes of a rank of each stage
    timeline: Step | None  # the work over time; None without DeepSpeed, which defines its order


@dataclass(frozen=True)
class Prediction:
    """The predictions of a step, with and without the schedule."""

    # The original, and the output, in one process and on a rank of several.
    models: tuple[ModelStep, ...]
    batch: str  # the shapes of the inputs, as text
    stages: Stages | None  # of the pipeline; None without one
    remarks: tuple[str, ...]  # what is not shown

    @property
    def spent(self) -> list[str]:
        """The kinds of work that take time in any of the models."""
        kinds = self.models[0].seconds
        return [kind for kind in kinds if any(model.seconds[kind] for model in self.models)]


def predicted(models: Models) -> Prediction:
    """Predicts a step; raises `NotPredicted` if the model does not run on the meta device."""
    schedule, emitted, world = models.schedule, models.emitted, models.world
    original = Countable(schedule, models.source, (), Shortening.of(models.original))
    short = Shortening.of(models.rank)
    output = Countable(schedule, emitted.module, emitted.modules(), short)
    try:
        rows, sequence = _sizes(models)
        given = sized_inputs(schedule, models.original.root.live, rows, sequence)
        shape = StepShape(sequence, torch.bfloat16, is_gpu=True)
        steps = [("the original", original, 1), ("rewritten", output, 1)]
        if world > 1:
            steps[1:] = [
                ("rewritten, in one process", output, 1),
                (f"rewritten, a rank of {world}", output, world),
            ]
        predictors = [_predictor(models, step, ranks, shape) for _, step, ranks in steps]
    except Exception as error:  # the model's own code, and the schedule's
        raise NotPredicted(first_line(error)) from error
    found = tuple(
        ModelStep(name, predictor.predicted(Way(tensor=ranks, rows=rows)))
        for (name, _, ranks), predictor in zip(steps, predictors, strict=True)
    )
    stages = _stages(predictors[-1], models, rows)
    return Prediction(found, _described(given), stages, tuple(_remarks(models, stages)))


def _sizes(models: Models) -> tuple[int, int | None]:
    """The rows of a micro-batch, and tokens per row (None: as the schedule's `inputs` returns)."""
    model = models.original.root.live
    if hasattr(models.schedule, "inputs"):
        return rows_of(models.schedule, model), None
    return ROWS, min(TOKENS, positions_of(model) or TOKENS)


def _predictor(models: Models, step: Countable, ranks: int, shape: StepShape) -> Predictor:
    (counted,) = step.counted(ranks, shape, nullcontext)
    predictor = Predictor((counted, None), GPU, PRECISION, NODE, lambda _: _ends(models, predictor))
    return predictor


def _ends(models: Models, predictor: Predictor) -> list[int]:
    """The number of layers up to the end of each stage; empty if a stage ends elsewhere."""
    layers = predictor.layers
    if not models.cuts or any(cut not in layers for cut in models.cuts):
        return []
    return [*sorted(layers.index(cut) + 1 for cut in models.cuts), len(layers)]


def _stages(predictor: Predictor, models: Models, rows: int) -> Stages | None:
    ends = _ends(models, predictor)
    if not ends:
        return None
    way = Way(models.world, len(ends), rows=rows, micro_batches=2 * len(ends))
    stages = predictor.stages(way)
    numbers = range(len(ends))
    live = [live_micro_batches(number, len(ends), way.micro_batches) for number in numbers]
    memory = [predictor.stage_memory(way, number)[0] for number in numbers]
    try:
        link = predictor.between_stages(way)
        timeline = simulate(stages, way.micro_batches, pipeline=link)
    except ImportError:
        timeline = None
    return Stages(predictor.predicted(way), stages, live, memory, timeline)


def _described(inputs: Mapping[str, object]) -> str:
    shown = [f"{name} {list(v.shape)}" for name, v in inputs.items() if isinstance(v, Tensor)]
    return ", ".join(shown)


def _remarks(models: Models, stages: Stages | None) -> Iterator[str]:
    if models.cuts and stages is None:
        yield "Stages are not shown: one ends elsewhere than behind a layer of a list"
    elif stages is not None and stages.timeline is None:
        yield "What each stage does when is not shown: DeepSpeed, whose order that is, is missing"
