"""Stages of a pipeline, made of what a model's elements cost and shared as Megatron shares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmark.element_costs import Cost
from slapo_rewrite.simulate.hardware import Device
from slapo_rewrite.simulate.links import Link
from slapo_rewrite.simulate.pipeline import Bytes, Stage, Tie


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
    replicas: int = 1,
    memory: Bytes | None = None,
    recomputes: bool = False,
) -> tuple[list[Stage], list[Tie]]:
    """The stages of a pipeline.

    Args:
        costs: What the elements cost.
        ends: For each stage the index behind its last element.
        device: What runs them.
        split: How a stage is shared by several ranks; each then holds a part of its parameters.
        replicas: How many replicas share the optimizer's states.
        memory: What a parameter needs.
        recomputes: Whether each element keeps only what it is given, and runs forward again.

    Returns:
        The stages, and the parameters that several of them hold.
    """
    ranks = split.ranks if split else 1
    forward = forward_seconds(costs, device, split)
    backward = backward_seconds(costs, device, split)
    stages = []
    holders: dict[str, list[int]] = {}
    for number, (start, end) in enumerate(pairwise([0, *ends])):
        part = costs[start:end]
        parameters = {n: size for cost in part for n, size in cost.parameters.items()}
        for name in parameters:
            holders.setdefault(name, []).append(number)
        count = sum(parameters.values()) // ranks
        held = [_on_each(cost.held, cost.held_whole, ranks) for cost in part]
        states = (memory or Bytes()).of(count, replicas)
        stages.append(
            Stage(
                forward=sum(forward[start:end]),
                backward=sum(backward[start:end]) + recomputes * sum(forward[start:end]),
                sent=part[-1].sent if end < len(costs) else 0,
                parameters=count,
                held=sum(cost.given for cost in part) if recomputes else sum(held),
                working=max(held) if recomputes else 0.0,
                optimizer=2 * states / device.bandwidth,  # everything is read and written once
            )
        )
    sizes = {n: size for cost in costs for n, size in cost.parameters.items()}
    shared = {n: tuple(numbers) for n, numbers in holders.items() if len(numbers) > 1}
    return stages, [Tie(sizes[n] // ranks, numbers) for n, numbers in shared.items()]


def _on_each(size: float, whole: float, ranks: int) -> float:
    """What each rank has of something of which a part is whole on all of them."""
    return whole + (size - whole) / ranks
