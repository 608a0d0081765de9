"""What GPUs and the links between them do, by the table `hardware.toml`, and take for a step.

Links are modelled by a start-up time and a bandwidth.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_rewrite import errors

if TYPE_CHECKING:
    from slapo_rewrite.model.costs import Cost
    from slapo_rewrite.model.step_profile import Part

HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Link:
    """What connects the processes of one axis.

    Attributes:
        latency: Seconds that an operation takes however little it moves.
        bandwidth: Bytes a second that one process sends, or receives.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise ValueError(f"a link needs a latency of 0 or more and a bandwidth above 0: {self}")

    def send(self, size: float) -> float:
        """Seconds that one process takes to send `size` bytes to another."""
        return self.latency + size / self.bandwidth

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds that `ranks` processes take to sum `size` bytes in a ring; none for one."""
        return self._ring(2 * size, ranks)

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds that they take to give one another their parts of `size` bytes."""
        return self._ring(size, ranks)

    def _ring(self, size: float, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        return self.latency + size * (ranks - 1) / ranks / self.bandwidth


@dataclass(frozen=True)
class Device:
    """What one GPU does, as a model's operators get it.

    Attributes:
        flops: Of matrix products, a second.
        bandwidth: Bytes of memory read or written, a second.
    """

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """GPUs in nodes.

    Attributes:
        name: What `--gpu` calls them.
        title: What they are.
        device: What one does.
        memory: Bytes that one has.
        inside: What connects those of a node.
        outside: What connects those of different nodes.
        precision: What matrix products are computed in: `bf16`, `fp16`, `fp32` or `tf32`.
        said: Where the figures are from, and what is assumed of them, in words.
    """

    name: str
    title: str
    device: Device
    memory: float
    inside: Link
    outside: Link
    precision: str
    said: tuple[str, ...] = ()


def no_such_products(title: str, precision: str) -> errors.UsageError:
    """The refusal of a precision that a device computes nothing in."""
    return errors.UsageError(f"{title} computes nothing in {precision}", hint="--precision fp32")


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def known_gpus() -> list[str]:
    """The names in the table."""
    return list(_table()["gpus"])


@functools.cache
def hardware(name: str, precision: str | None = None) -> Hardware:
    """A row of the table.

    Args:
        name: The row's.
        precision: What matrix products are computed in; without it the half precision that models
            are trained in on such a GPU.

    Raises:
        KeyError: There is none of that name.
        UsageError: Such a GPU does not compute in this precision.
    """
    table = _table()
    row, reached, network = table["gpus"][name], table["reached"], table["network"]
    precision = precision or row["precision"]
    flops = row.get("flops" if precision in HALF else precision)
    if flops is None:
        raise no_such_products(row["title"], precision)
    share = ", ".join(f"{reached[what]:.0%} of {what}" for what in reached)
    return Hardware(
        name,
        row["title"],
        Device(flops * reached["flops"], row["bandwidth"] * reached["bandwidth"]),
        row["memory"],
        Link(table["node"]["latency"], row["link"] * reached["link"]),
        Link(network["latency"], network["bandwidth"] * reached["link"]),
        precision,
        (
            f"{row['title']}: {flops / 1e12:.3g} Tflop/s ({precision}), "
            f"{row['bandwidth'] / 1e12:.2f} TB/s, NVLink {row['link'] / 1e9:.0f} GB/s a direction "
            f"({row['source']})",
            f"network {network['bandwidth'] * 8 / 1e9:.0f} Gb/s for each GPU",
            f"of these figures a model gets {share}",
        ),
    )


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
