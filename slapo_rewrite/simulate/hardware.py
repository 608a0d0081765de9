"""What GPUs and the links between them do: the table `hardware.toml`."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_rewrite.simulate.links import Link


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
        precision: What models are trained in: `bf16`, `fp16` or `fp32`.
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


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def known_gpus() -> list[str]:
    """The names in the table."""
    return list(_table()["gpus"])


@functools.cache
def hardware(name: str) -> Hardware:
    """A row of the table.

    Raises:
        KeyError: There is none of that name.
    """
    table = _table()
    row, reached, network = table["gpus"][name], table["reached"], table["network"]
    share = ", ".join(f"{reached[what]:.0%} of {what}" for what in reached)
    return Hardware(
        name,
        row["title"],
        Device(row["flops"] * reached["flops"], row["bandwidth"] * reached["bandwidth"]),
        row["memory"],
        Link(table["node"]["latency"], row["link"] * reached["link"]),
        Link(network["latency"], network["bandwidth"] * reached["link"]),
        row["precision"],
        (
            f"{row['title']}: {row['flops'] / 1e12:.0f} Tflop/s ({row['precision']}), "
            f"{row['bandwidth'] / 1e12:.2f} TB/s, NVLink {row['link'] / 1e9:.0f} GB/s a direction "
            f"({row['source']})",
            f"network {network['bandwidth'] * 8 / 1e9:.0f} Gb/s for each GPU",
            f"of these figures a model gets {share}",
        ),
    )
