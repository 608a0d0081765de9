"""Stages of a pipeline, made from the costs of a model's elements and split as by Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmark.element_costs import Cost
from slapo_rewrite.simulate.hardware import Device, Link
from slapo_rewrite.simulate.pipeline import Stage, simulate
from slapo_rewrite.simulate.step_memory import states


@dataclass(frozen=True)
class Split:
    """Tensor parallelism within a stage, as Megatron has it.

    Attributes:
        ranks: How many share a stage.
        link: What connects them.
        reductions: For each element, how often its forward pass sums a tensor as large as what it
            is given (the first one: as what it sends). Its backward pass does so as often.
    """

    ranks: int
    link: Link
    reductions: Sequence[int]


@dataclass(frozen=True)
class Tie:
    """Parameters that several stages hold, whose gradients they sum.

    Attributes:
        parameters: How many.
        stages: The numbers of the stages.
    """

    parameters: int
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """The work and memory of each process of a stage.

    Attributes:
        stage: What a micro-batch takes.
        parameters: How many it holds.
        held: Bytes that one micro-batch keeps from its forward pass to its backward pass.
        working: Bytes that a pass needs beside these while it runs.
    """

    stage: Stage
    parameters: int = 0
    held: float = 0.0
    working: float = 0.0


@dataclass(frozen=True)
class SplitStep:
    """A step with all that follows its last micro-batch.

    Attributes:
        seconds: From the first instruction of any stage to the last.
        bubble: The share of the stages' time in which they wait for one another.
        memory: For each stage the most bytes that it needs.
    """

    seconds: float
    bubble: float
    memory: list[float]


def forward_seconds(
    costs: Sequence[Cost], device: Device, split: Split | None = None
) -> list[float]:
    """Seconds that each element's forward pass takes."""
    split = split or Split(1, Link(), [0] * len(costs))
    return [
        cost.flops / split.ranks / device.flops
        + _on_each(cost.moved, cost.moved_whole, split.ranks) / device.bandwidth
        + times * split.link.all_reduce(cost.given or cost.sent, split.ranks)
        for cost, times in zip(costs, split.reductions, strict=True)
    ]


def backward_seconds(
    costs: Sequence[Cost], device: Device, split: Split | None = None
) -> list[float]:
    """Seconds that each element's backward pass takes: twice its work, and as many sums."""
    split = split or Split(1, Link(), [0] * len(costs))
    half = Device(device.flops / 2, device.bandwidth / 2)
    return forward_seconds(costs, half, split)


def step_seconds(costs: Sequence[Cost], device: Device, split: Split | None = None) -> list[float]:
    """Seconds that each element takes for a micro-batch, there and back: what to cut stages by."""
    both = forward_seconds(costs, device, split), backward_seconds(costs, device, split)
    return [forward + backward for forward, backward in zip(*both, strict=True)]


def made_of(
    costs: Sequence[Cost],
    ends: Sequence[int],
    device: Device,
    *,
    split: Split | None = None,
    recomputes: bool = False,
) -> tuple[list[Share], list[Tie]]:
    """The stages of a pipeline.

    Args:
        costs: What the elements cost.
        ends: For each stage the index behind its last element.
        device: What runs them.
        split: How a stage is shared by several ranks; each then holds a part of its parameters.
        recomputes: Whether each element keeps only what it is given, and runs forward again.

    Returns:
        The stages, and the parameters that several of them hold.
    """
    ranks = split.ranks if split else 1
    forward = forward_seconds(costs, device, split)
    backward = backward_seconds(costs, device, split)
    shares = []
    holders: dict[str, list[int]] = {}
    for number, (start, end) in enumerate(pairwise([0, *ends])):
        part = costs[start:end]
        parameters = {n: size for cost in part for n, size in cost.parameters.items()}
        for name in parameters:
            holders.setdefault(name, []).append(number)
        count = sum(parameters.values()) // ranks
        held = [_on_each(cost.held, cost.held_whole, ranks) for cost in part]
        stage = Stage(
            forward=sum(forward[start:end]),
            backward=sum(backward[start:end]) + recomputes * sum(forward[start:end]),
            sent=part[-1].sent if end < len(costs) else 0,
        )
        kept = sum(cost.given for cost in part) if recomputes else sum(held)
        shares.append(Share(stage, count, kept, max(held) if recomputes else 0.0))
    sizes = {n: size for cost in costs for n, size in cost.parameters.items()}
    shared = {n: tuple(numbers) for n, numbers in holders.items() if len(numbers) > 1}
    return shares, [Tie(sizes[n] // ranks, numbers) for n, numbers in shared.items()]


def step_of(
    shares: Sequence[Share],
    ties: Sequence[Tie],
    micro_batches: int,
    device: Device,
    *,
    pipeline: Link,
    data: Link,
    replicas: int = 1,
) -> SplitStep:
    """A step in bfloat16, with the states of an Adam in float32 divided over the replicas (ZeRO 1).

    Args:
        shares: The stages, first to last.
        ties: Parameters that several of them hold.
        micro_batches: How many make up a step.
        device: What runs them.
        pipeline: What connects neighbouring stages, and those that share parameters.
        data: What connects the replicas of a stage.
        replicas: How many copies of the pipeline there are.
    """
    each = states("bf16", 1, replicas)
    step = simulate([share.stage for share in shares], micro_batches, pipeline=pipeline)
    clocks = [timeline.events[-1].end for timeline in step.stages]
    busy = sum(timeline.busy for timeline in step.stages)
    for tie in ties:
        seconds = pipeline.all_reduce(tie.parameters * each.gradient, len(tie.stages))
        end = max(clocks[number] for number in tie.stages) + seconds
        for number in tie.stages:
            clocks[number] = end
        busy += seconds * len(tie.stages)
    for number, share in enumerate(shares):
        seconds = data.all_reduce(share.parameters * each.gradient, replicas)
        # Everything is read and written once, and each replica's part sent to the others.
        seconds += 2 * share.parameters * each.each / device.bandwidth
        seconds += data.all_gather(share.parameters * each.weight, replicas)
        clocks[number] += seconds
        busy += seconds
    memory = [
        share.parameters * each.each + timeline.live * share.held + share.working
        for share, timeline in zip(shares, step.stages, strict=True)
    ]
    return SplitStep(max(clocks), 1 - busy / (max(clocks) * len(shares)), memory)


def _on_each(size: float, whole: float, ranks: int) -> float:
    """Each rank's size of data of which `whole` is on every rank, and the rest divided."""
    return whole + (size - whole) / ranks
