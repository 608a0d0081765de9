"""What parts of a step take on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slapo_rewrite.simulate.hardware import Device, Link

if TYPE_CHECKING:
    from slapo_rewrite.model.costs import Cost
    from slapo_rewrite.model.step_profile import Part


def part_seconds(part: Part, rows: int, device: Device) -> tuple[float, float]:
    """Seconds of a part of a step that go into products, and into other operators."""
    return part.flops.of(rows) / device.flops, part.moved.of(rows) / device.bandwidth


def sent_seconds(part: Part, rows: int, link: Link, ranks: int) -> float:
    """Seconds of its collectives, among so many ranks."""
    sent = 0.0
    for kind, size in part.sent.items():
        # A reduce-scatter takes as long as an all-gather.
        time = link.all_reduce if "allreduce" in kind else link.all_gather
        sent += time(size.of(rows), ranks)
    if part.calls:
        sent += (part.calls - len(part.sent)) * link.latency
    return sent


def step_seconds(costs: Sequence[Cost], device: Device) -> list[float]:
    """Seconds that each element takes for a micro-batch: what to cut stages by.

    Its backward pass is twice the work of the one forward.
    """
    return [3 * (cost.flops / device.flops + cost.moved / device.bandwidth) for cost in costs]
