"""Speeds of GPUs and links, from the table `hardware.toml`, and the time a step takes on them.

A link is modelled by a latency and a bandwidth.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_rewrite import errors

if TYPE_CHECKING:
    from slapo_rewrite.model.costs import Cost
    from slapo_rewrite.model.step_profile import Part

HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Link:
    """The connection between the processes of one mesh axis."""

    latency: float = 0.0  # seconds that every transfer takes, whatever its size
    bandwidth: float = math.inf  # bytes per second that one process sends, or receives

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise ValueError(f"a link needs a latency of 0 or more and a bandwidth above 0: {self}")

    def send(self, size: float) -> float:
        """Seconds that one process takes to send `size` bytes to another."""
        return self.latency + size / self.bandwidth

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a ring all-reduce of `size` bytes among `ranks` processes; 0 for one."""
        return self._ring(2 * size, ranks)

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds of a ring all-gather whose result is `size` bytes; 0 for one process."""
        return self._ring(size, ranks)

    def _ring(self, size: float, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        return self.latency + size * (ranks - 1) / ranks / self.bandwidth


@dataclass(frozen=True)
class Device:
    """The speed of one GPU that a model's operators reach."""

    flops: float  # per second, of matrix products
    bandwidth: float  # bytes of memory read or written per second
    # Like `flops`, for products in half and in single precision; None: `flops` holds.
    half: float | None = None
    single: float | None = None
    # Speed of the kinds of products (`Product`), relative to `flops`.
    attention: float = 1.0
    masked: float = 1.0
    unaligned: float = 1.0
    plain: float = 1.0
    operator: float = 0.0  # seconds that the host takes to start an operator


@dataclass(frozen=True)
class Hardware:
    """A cluster: nodes with GPUs of one kind."""

    name: str  # the GPU's name for `--gpu`
    title: str
    device: Device  # speed of one GPU
    memory: float  # bytes of one GPU
    inside: Link  # between GPUs of a node
    outside: Link  # between GPUs of different nodes
    precision: str  # of matrix products: `bf16`, `fp16`, `fp32` or `tf32`
    said: tuple[str, ...] = ()  # lines for output: the figures' source and the assumptions


def no_such_products(title: str, precision: str) -> errors.UsageError:
    """The refusal of a precision that a device does not support."""
    return errors.UsageError(f"{title} computes nothing in {precision}", hint="--precision fp32")


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def own_table(path: Path) -> dict[str, Any]:
    """Reads a user's table of one GPU; what it leaves out is filled in from the tool's table."""
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise errors.BadHardware(f"`{path}` is not TOML: {error}") from None
    except (OSError, ValueError) as error:
        raise errors.BadHardware(
            f"cannot read `{path}`: {getattr(error, 'strerror', error)}"
        ) from None
    table = _table()
    hint = f"write it as the tool's own: {Path(__file__).with_suffix('.toml')}"
    gpus = own.get("gpus")
    if not isinstance(gpus, dict) or len(gpus) != 1:
        raise errors.BadHardware(f"`{path}` has to have one table [gpus.NAME]", hint=hint)
    (name,) = gpus
    like = {f"gpus.{name}": (gpus[name], table["gpus"]["h100"])}
    like |= {key: (own[key], table[key]) for key in own.keys() - {"gpus"} if key in table}
    if unknown := own.keys() - table.keys():
        raise errors.BadHardware(
            f"`{path}` has [{min(unknown)}]", hint=errors.did_you_mean(min(unknown), table) or hint
        )
    for where, (row, model) in like.items():
        _check_row(path, where, row, model, hint)
    row = {"source": str(path), **gpus[name]}
    return {key: {**table[key], **own.get(key, {})} for key in table} | {"gpus": {name: row}}


# Kinds of products whose share of the peak differs from the usual one, `flops`.
SLOWER = ("attention", "masked", "unaligned")
REACHED = {
    "flops": "of flops",
    "attention": "in attention",
    "masked": "in attention with a mask, a bias or values of another width",
    "unaligned": "in products whose rows are not aligned to 16 bytes",
    "bandwidth": "of bandwidth",
    "link": "of link",
}
OPTIONAL = ("fp32", "tf32", "source")  # keys that a GPU's row may leave out


def _check_row(path: Path, where: str, row: Any, like: dict[str, Any], hint: str) -> None:
    """Refuses keys that are missing or unknown, and values of another type than in `like`."""
    if not isinstance(row, dict):
        raise errors.BadHardware(f"`{path}`: `{where}` is no table", hint=hint)
    for key, value in row.items():
        if key not in like:
            raise errors.BadHardware(
                f"`{path}`: [{where}] has `{key}`", hint=errors.did_you_mean(key, like) or hint
            )
        is_right = isinstance(value, str)
        if not isinstance(like[key], str):
            is_right = type(value) in (int, float) and 0 < value < math.inf
        if not is_right:
            needed = "a text" if isinstance(like[key], str) else "a number above 0"
            raise errors.BadHardware(f"`{path}`: `{key}` of [{where}] is not {needed}", hint=hint)
    missing = [key for key in like if key not in row and key not in OPTIONAL]
    if where.startswith("gpus.") and missing:
        raise errors.BadHardware(f"`{path}`: [{where}] has no `{missing[0]}`", hint=hint)
    if row.get("precision", "bf16") not in (*HALF, "fp32", "tf32"):
        raise errors.BadHardware(
            f"`{path}`: `precision` of [{where}] is `{row['precision']}`",
            hint="it is bf16, fp16, fp32 or tf32",
        )


def known_gpus() -> list[str]:
    """The names of the GPUs in the tool's table."""
    return list(_table()["gpus"])


@functools.cache
def hardware(name: str, precision: str | None = None) -> Hardware:
    """The hardware of a row of the tool's table.

    The precision of matrix products defaults to the row's own: the half precision in which models
    are trained on such a GPU.
    """
    return _of_table(_table(), name, precision)


def own_hardware(path: Path, precision: str | None = None) -> Hardware:
    """The hardware of a user's own table, with matrix products in this precision."""
    table = own_table(path)
    return _of_table(table, next(iter(table["gpus"])), precision)


def _of_table(table: dict[str, Any], name: str, precision: str | None) -> Hardware:
    row, reached, network = table["gpus"][name], table["reached"], table["network"]
    precision = precision or row["precision"]
    flops = row.get("flops" if precision in HALF else precision)
    if flops is None:
        raise no_such_products(row["title"], precision)
    share = ", ".join(f"{reached[what]:.0%} {said}" for what, said in REACHED.items())
    return Hardware(
        name,
        row["title"],
        replace(
            _device(flops * reached["flops"], row["bandwidth"] * reached["bandwidth"], table),
            half=row["flops"] * reached["flops"],
            single=None if precision == "tf32" else row.get("fp32", flops) * reached["flops"],
        ),
        row["memory"],
        Link(table["node"]["latency"], row["link"] * reached["link"]),
        Link(network["latency"], network["bandwidth"] * reached["link"]),
        precision,
        (
            f"{row['title']}: {flops / 1e12:.3g} Tflop/s ({precision}), "
            f"{row['bandwidth'] / 1e12:.2f} TB/s, links {row['link'] / 1e9:.0f} GB/s a direction "
            f"({row['source']})",
            f"network {network['bandwidth'] * 8 / 1e9:.0f} Gb/s for each GPU",
            f"of these figures a model gets {share}; the host takes "
            f"{table['host']['operator'] * 1e6:.0f} us to start an operator",
        ),
    )


def _device(flops: float, bandwidth: float, table: dict[str, Any]) -> Device:
    slower = {what: table["reached"][what] / table["reached"]["flops"] for what in SLOWER}
    return Device(flops, bandwidth, **slower, operator=table["host"]["operator"])


def own_device(flops: float, bandwidth: float) -> Device:
    """A GPU with measured speeds of products and memory; the rest comes from the tool's table."""
    return _device(flops, bandwidth, _table())


def part_seconds(part: Part, rows: int, device: Device) -> tuple[float, float]:
    """Seconds that a part of a step takes for matrix products, and for memory traffic."""
    of_width = {2: device.half, 4: device.single}
    seconds = 0.0
    for product, amount in part.products.items():
        flops = of_width.get(product.width) or device.flops
        seconds += amount.of(rows) / (flops * getattr(device, product.kind))
    return seconds, part.moved.of(rows) / device.bandwidth


def sent_seconds(part: Part, rows: int, link: Link, ranks: int) -> float:
    """Seconds that the collectives of a part of a step take among so many ranks."""
    sent = 0.0
    for kind, size in part.sent.items():
        # A reduce-scatter takes as long as an all-gather.
        time = link.all_reduce if "allreduce" in kind else link.all_gather
        sent += time(size.of(rows), ranks)
    if part.calls:
        sent += (part.calls - len(part.sent)) * link.latency
    return sent


def step_seconds(costs: Sequence[Cost], device: Device) -> list[float]:
    """Seconds that each element takes for a micro-batch; stages are cut by these.

    The backward pass is counted as twice the work of the forward pass.
    """
    return [3 * (cost.flops / device.flops + cost.moved / device.bandwidth) for cost in costs]
