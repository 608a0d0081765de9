"""Plans the training of a model: counts the rewritten model, predicts all ways, sorts them."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from slapo_rewrite import errors
from slapo_rewrite.emit.one_rank import forked
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.garbage import collector_paused
from slapo_rewrite.groups import grouped
from slapo_rewrite.model.folded_step import StepShape
from slapo_rewrite.plan.candidates import Predicted, Predictor, Way, ways
from slapo_rewrite.plan.rewritten_step import Found, counted_rewrite
from slapo_rewrite.project import Project
from slapo_rewrite.schedule.choices import declared
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.simulate.balance import stage_ends
from slapo_rewrite.simulate.byte_sizes import byte_size, gib, shown_size
from slapo_rewrite.simulate.hardware import Hardware

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The precisions of float32 products, and how torch is set to them.
PRODUCTS = {
    "fp32": "float32, as is torch's default",
    "tf32": 'TF32: `torch.set_float32_matmul_precision("high")`',
}
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
# The knobs that a plan sets, if the schedule has them.
SEQUENCE, RATIO, FUSE, STAGES = "sequence_parallel", "ckpt_ratio", "fuse", "pipeline_stages"
VARIED = {
    SEQUENCE: "sequence parallelism",
    RATIO: "recomputation",
    FUSE: "fusion",
    STAGES: "pipeline parallelism",
}


@dataclass(frozen=True)
class Wanted:
    """The request for a plan."""

    source: str  # a file or an importable module
    schedule: str  # a file, or the name of a schedule that ships with the tool
    fixed: Sequence[str]  # `K=V` for each knob that is not planned
    gpus: int  # the number of GPUs
    hardware: Hardware
    memory: float  # the bytes that a rank may hold
    batch: int  # rows of a step
    sequence: int | None  # tokens of a row; None for what the schedule's `inputs` give
    node: int  # GPUs of a node
    precision: str  # of parameters and activations: `bf16`, `fp16` or `fp32`


@dataclass
class Planned:
    """The plan."""

    wanted: Wanted  # the request
    best: list[Predicted]  # the ways that fit, the fastest first
    others: list[Predicted]  # ways that do not fit, the smallest first
    refused: dict[int, str]  # numbers of tensor-parallel ranks that are impossible, and why
    assumptions: list[str]  # the assumptions, as sentences
    knobs: set[str] = field(default_factory=set)  # names of the schedule's knobs

    def settings(self, way: Way) -> list[str]:
        """The settings of `--set` for a way."""
        values = {
            RATIO: f"{way.recomputed:g}",
            SEQUENCE: str(way.sequence_parallel).lower(),
            FUSE: str(way.fused).lower(),
            STAGES: str(way.pipeline),
        }
        fixed = {item.partition("=")[0] for item in self.wanted.fixed}
        own = [f"{k}={v}" for k, v in values.items() if k in self.knobs - fixed]
        return [*self.wanted.fixed, *own]

    def as_json(self) -> dict[str, object]:
        """The plan as JSON values."""
        wanted = self.wanted
        return {
            "gpus": wanted.gpus,
            "gpu": wanted.hardware.name,
            "memory_bytes": round(wanted.memory),
            "batch": wanted.batch,
            "sequence": wanted.sequence,
            "precision": wanted.precision,
            "products": wanted.hardware.precision,
            "plans": [{**p.as_json(), "settings": self.settings(p.way)} for p in self.best[:10]],
            "do_not_fit": [p.as_json() for p in self.others[:10]],
            "refused": {str(ranks): why for ranks, why in self.refused.items()},
            "assumptions": self.assumptions,
        }


@collector_paused()
def plan(wanted: Wanted, progress: Callable[[str], None] = lambda text: None) -> Planned:
    """Plans a training run; raises `NothingFits` if no way fits the memory."""
    schedule = ScheduleFile.load(wanted.schedule)
    knobs = set(schedule.knobs)
    schedule.settings(wanted.fixed)
    planner = _Planner(wanted, schedule, progress)
    best, others = planner.run()
    planned = Planned(wanted, best, others, planner.refused, planner.assumptions(), knobs)
    if not best:
        raise _nothing(planned)
    return planned


class _Planner:
    def __init__(
        self, wanted: Wanted, schedule: ScheduleFile, progress: Callable[[str], None]
    ) -> None:
        self.wanted, self.schedule, self.progress = wanted, schedule, progress
        fixed = dict(item.split("=", 1) for item in wanted.fixed)
        self.free = set(schedule.knobs) - fixed.keys()
        self.values = schedule.settings(wanted.fixed)
        self.refused: dict[int, str] = {}
        self.left_out: list[str] = []  # rewrites that are refused, and why
        self.layers: Sequence[float] = ()
        # Cuts are the same in all rewrites, and on any number of ranks.
        self.cut = cache(lambda count: stage_ends(self.layers, count))
        self.ratios = [float(self.values.get(RATIO, 0.0))]
        if RATIO in self.free:
            choices = declared(schedule.module.schedule).get(RATIO)
            self.ratios = sorted(float(v) for v in choices.values) if choices else list(RATIOS)

    def run(self) -> tuple[list[Predicted], list[Predicted]]:
        """The ways that fit, and ways that do not."""
        fits: list[Predicted] = []
        others: list[Predicted] = []
        variants = list(self._variants())
        jobs = [(self.wanted, self._settings(v), self._sizes(v)) for v in variants]
        if FUSE in self.free:
            rules()  # once, for all processes
        self.progress(f"counting a step of {len(jobs)} rewrites")
        for variant, counted in zip(variants, counted_in_processes(jobs), strict=True):
            if isinstance(counted, errors.RewriteError):
                self.left_out.append(f"{_knobs_of(variant)}: refused, {counted.message}")
                if len(self.left_out) == len(variants):
                    raise counted
                continue
            self.progress(f"predicting{' with fusion' * variant.fused}")
            for alike, predictor in self._ways(variant, counted):
                _predict(alike, predictor, self.wanted.memory, fits, others)
        # Of ways that are equally fast, to a percent, the simplest comes first.
        fits.sort(key=lambda p: (_percent(p.seconds), p.way.zero, p.way.fused, p.seconds))
        others.sort(key=lambda p: p.memory)
        return fits, others

    def _variants(self) -> Iterator[Way]:
        """The combinations of knobs that need their own rewrite, the slowest first."""
        fuse = (True, False) if FUSE in self.free else (bool(self.values.get(FUSE)),)
        sliced = (False, True) if SEQUENCE in self.free else (bool(self.values.get(SEQUENCE)),)
        for fused in fuse:
            for sequence_parallel in sliced:
                yield Way(fused=fused, sequence_parallel=sequence_parallel)

    def _settings(self, variant: Way) -> list[str]:
        """The settings for rewriting a variant: all layers are recomputed if possible."""
        values = {
            FUSE: variant.fused,
            SEQUENCE: variant.sequence_parallel,
            RATIO: 1.0 if any(self.ratios) else 0.0,
        }
        own = [f"{name}={value}" for name, value in values.items() if name in self.free]
        return [*self.wanted.fixed, *own]

    def _sizes(self, variant: Way) -> list[int]:
        """The possible numbers of tensor-parallel ranks: powers of two, within a node."""
        wanted = self.wanted
        sizes = [1 << n for n in range(wanted.node.bit_length()) if 1 << n <= wanted.node]
        sizes = [n for n in sizes if wanted.gpus % n == 0]
        if variant.sequence_parallel and SEQUENCE in self.free:  # no difference on one rank
            sizes = [n for n in sizes if n > 1 and (wanted.sequence or 0) % n == 0]
        return sizes

    def _ways(self, variant: Way, counted: Found) -> Iterator[tuple[list[Way], Predictor]]:
        """The ways of a variant, grouped with others that only differ in recomputation."""
        wanted = self.wanted
        predictors: dict[int, Predictor] = {}
        for ranks, both in counted.items():
            if isinstance(both, str):
                if ranks == 1:
                    of = f" of {wanted.sequence} tokens a row" if wanted.sequence else ""
                    fp32 = "; some run in --precision fp32 alone" * (wanted.precision != "fp32")
                    raise errors.Unsupported(
                        f"a step{of} does not run without values, in {wanted.precision}: {both}",
                        hint="the schedule's model has to take such inputs, and must not read "
                        f"their values{fp32}",
                    )
                self.refused.setdefault(ranks, both)
                continue
            if not self.layers:  # the first count is for one rank, with full layers
                self.layers = both[0].cut_sizes
            predictors[ranks] = Predictor(
                both, wanted.hardware, wanted.precision, wanted.node, self.cut
            )
        most = 1
        if all(len(p.layers) == len(self.layers) for p in predictors.values()):
            most = max(1, len(self.layers))
        fixed = self.values.get(STAGES, 1)
        stages = [n for n in range(1, most + 1) if STAGES in self.free or n == fixed]
        own = (
            replace(way, fused=variant.fused, sequence_parallel=variant.sequence_parallel)
            for way in ways(wanted.gpus, wanted.batch, list(predictors), stages, self.ratios)
        )
        for alike in grouped((replace(way, recomputed=0.0), way) for way in own).values():
            yield alike, predictors[alike[0].tensor]

    def assumptions(self) -> list[str]:
        """The assumptions, as sentences."""
        wanted = self.wanted
        return [
            *wanted.hardware.said,
            f"a node has {wanted.node} GPUs; ranks that share a layer are neighbours, then "
            "replicas, then stages",
            f"trained in {wanted.precision} by DeepSpeed with an Adam: bytes for each parameter "
            "are 2 and 12 for the optimizer, of gradients 2, with ZeRO 1 4 (float32 sums)"
            if wanted.precision != "fp32"
            else "trained in float32 by DeepSpeed with an Adam, products of float32 in "
            + PRODUCTS.get(wanted.hardware.precision, wanted.hardware.precision),
            "pipelines run one forward, one backward, as DeepSpeed's; stages are cut as "
            "cut_evenly cuts them",
            "work and memory are counted for the rewritten model's operators, without data; "
            "attention runs in one kernel",
            "gradients are summed after the last micro-batch, with ZeRO 2 and 3 during it; ZeRO 3 "
            "gathers parameters during the work on earlier ones",
            "not counted: memory of CUDA, of NCCL and of fragments in the allocator",
            *self.left_out,
            *(
                f"not varied, since the schedule has no free knob `{knob}`: {what}"
                for knob, what in VARIED.items()
                if knob not in self.free
            ),
        ]


def _count(
    wanted: Wanted, settings: list[str], sizes: list[int], project: Project | None = None
) -> Found:
    """Rewrites once, and counts a step on each number of ranks."""
    is_gpu = wanted.hardware.name != "cpu"
    shape = StepShape(wanted.sequence, DTYPES[wanted.precision], is_gpu)
    return counted_rewrite(
        project or Project(wanted.source, wanted.schedule), settings, sizes, shape
    )


Job = tuple[Wanted, list[str], list[int]]


def _counted(job: Job) -> Found | errors.RewriteError:
    try:
        return _count(*job)
    except errors.RewriteError as error:
        return error


def counted_in_processes(jobs: Sequence[Job]) -> Iterator[Found | errors.RewriteError]:
    """Counts rewrites in forked processes, and yields the counts in order.

    The source and the schedule are read once, in this process. Counts that fail in a fork are
    repeated here, where the error can be reported. A refused rewrite yields its error.
    """
    workers = min(len(jobs), os.cpu_count() or 1)
    if workers == 1 or sys.platform != "linux":
        yield from map(_counted, jobs)
        return
    project = Project(jobs[0][0].source, jobs[0][0].schedule)
    # Dealt out back and forth, since the first take longest; a process reuses its caches.
    to_and_fro = itertools.cycle([*range(workers), *reversed(range(workers))])
    dealt = list(itertools.islice(to_and_fro, len(jobs)))
    running = []
    for worker in range(workers):
        own = [job for job, to in zip(jobs, dealt, strict=True) if to == worker]
        running.append(forked(partial(itertools.starmap, partial(_count, project=project), own)))
    for job, worker in zip(jobs, dealt, strict=True):
        found: Found | None = next(running[worker], None)
        yield _counted(job) if found is None else found
    for each in running:
        next(each, None)  # waits for its end


def _knobs_of(variant: Way) -> str:
    """The knobs of a variant, in words."""
    fused = f"{'with' if variant.fused else 'without'} {VARIED[FUSE]}"
    return f"{fused} and {VARIED[SEQUENCE]}" if variant.sequence_parallel else fused


def _percent(seconds: float) -> int:
    """A key that is usually equal for times that differ by less than a percent."""
    return round(math.log(seconds) * 100)


def _predict(
    alike: list[Way],
    predictor: Predictor,
    memory: float,
    fits: list[Predicted],
    others: list[Predicted],
) -> None:
    """Predicts the first way that fits: more recomputation, which comes later, is slower."""
    for way in alike if predictor.states(alike[0]) <= memory else ():
        if predictor.memory(way)[0] <= memory:
            fits.append(predictor.predicted(way))
            return
    others.append(predictor.predicted(alike[-1]))


def _nothing(planned: Planned) -> errors.RewriteError:
    wanted = planned.wanted
    have = f"{wanted.gpus} x {gib(wanted.memory)}"
    if not planned.others:
        stages = next((item for item in wanted.fixed if item.startswith(f"{STAGES}=")), "")
        return errors.UsageError(
            f"a batch of {wanted.batch} cannot be divided over {wanted.gpus} GPUs as the schedule "
            f"allows{f' with {stages}' if stages else ''}",
            hint="give a batch that the number of replicas divides, such as a multiple of "
            f"{wanted.gpus}" + (", and stages that divide the GPUs" if stages else ""),
        )
    least = planned.others[0]
    missing = least.memory - wanted.memory
    if wanted.memory < 2**20:  # of a GPU
        raise errors.UsageError(
            f"`--memory` of {shown_size(wanted.memory)} holds no model",
            hint="write the memory of a GPU, such as 80GiB: a number without a unit is in bytes",
        )
    return errors.NothingFits(
        f"nothing fits {have}: the smallest, {described(least.way)}, needs {gib(least.memory)} a "
        f"rank, {gib(missing)} too much",
        hint=f"of that {gib(least.states)} are parameters, gradients and optimizer: "
        + (
            "more GPUs divide them further"
            if least.states > least.memory / 2
            else "a shorter sequence, or a schedule with `ckpt_ratio`, makes the rest smaller"
        ),
    )


def described(way: Way) -> str:
    """A way in one line."""
    words = [f"tensor {way.tensor}", f"pipeline {way.pipeline}", f"data {way.data}"]
    words.append(f"ZeRO {way.zero}")
    words.append(f"{way.micro_batches} x {way.rows} rows")
    if way.recomputed:
        words.append(f"{way.recomputed:.0%} recomputed")
    words += [w for w, on in (("sequence parallel", way.sequence_parallel), ("fused", way.fused))
              if on]  # fmt: skip
    return ", ".join(words)


def memory_size(text: str) -> float:
    """Parses `80GiB`, `80GB` or a number of bytes; raises `UsageError` for anything else."""
    value = byte_size(text)
    if value is None:
        raise errors.UsageError(f"`--memory {text}` is not a size", hint="write 80GiB, say")
    return value


def unknown_gpu(name: str, known: Sequence[str]) -> Any:
    """The error for a GPU that the table does not have."""
    return errors.UsageError(
        f"there is no GPU `{name}` in the table",
        hint=errors.did_you_mean(name, known)
        or f"it has {', '.join(known)}; or use measure, or your own table, FILE.toml",
    )
