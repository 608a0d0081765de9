"""Chooses by what was measured: the tables in `rules/measured`, one a device."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.bundle import rules_folder
from slapo_rewrite.changes.imports import EAGER, WRITTEN
from slapo_rewrite.fusion.backends import Choice
from slapo_rewrite.fusion.last_axis import features_of
from slapo_rewrite.fusion.rule import Rule, RuleMatch
from slapo_rewrite.model.tree import Node
from slapo_rewrite.simulate.hardware import known_gpus

MEASURED = "measured"
# A measurement says something of sizes up to twice and down to half of its own.
REACH = 2.0
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Row:
    """How long a function takes, forwards and backwards."""

    kernel: str  # the function
    width: int  # the length of its rows: features, the size of a head, or the vocabulary
    rows: int  # how many rows there were
    dtype: str  # of its operands
    microseconds: Mapping[str, float]  # by backend

    @property
    def fastest(self) -> str:
        """The backend that takes least time; of two alike, the one that comes first."""
        return min(WRITTEN, key=lambda backend: self.microseconds.get(backend, math.inf))


@dataclass(frozen=True)
class Table:
    """What was measured on a device."""

    name: str  # what schedules call the device
    device: str = ""  # what the device calls itself; empty where nothing was measured on it
    measured: str = ""  # the day
    rows: tuple[Row, ...] = ()  # the measurements

    @classmethod
    def read(cls, path: Path) -> Table:
        """The table in a file; `rules/measured/README.md` says how it is written."""
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(Row(**row) for row in content["measurements"])
        return cls(path.stem, content["device"], content["measured"], rows)

    def nearest(self, kernel: str, width: int, dtype: str) -> Row | None:
        """The measurement of the nearest size, by their ratio, at most `REACH` away."""
        known = [
            row
            for row in self.rows
            if (row.kernel, row.dtype) == (kernel, dtype)
            and width <= REACH * row.width <= REACH * REACH * width
        ]
        return min(
            known, key=lambda row: (abs(math.log(row.width / width)), row.width), default=None
        )


def tables() -> dict[str, Table]:
    """The tables that there are, by their devices' names in schedules."""
    paths = sorted((rules_folder() / "measured").glob("*.json"))
    return {path.stem: _read(path, path.stat().st_mtime_ns) for path in paths}


@functools.cache
def _read(path: Path, written: int) -> Table:
    return Table.read(path)


@dataclass(frozen=True)
class Measured:
    """The fastest of what was measured at a match's size, else PyTorch's operations."""

    table: Table  # what was measured
    # What is trained in; None where that is the dtype of the model's parameters.
    dtype: str | None = None

    def choose(self, rule: Rule, kernel: str, found: RuleMatch) -> Choice:
        """The fastest backend, with the figures."""
        name, width = kernel.rpartition(".")[2], rule.width(found) or features_of(found)
        dtype = self.dtype or _dtype(found.node)
        if width is None:
            return Choice(EAGER, f"{EAGER}: how wide the rows of `{name}` are is not known here")
        size = f"{width} wide in {dtype}"
        row = self.table.nearest(name, width, dtype)
        if row is None:
            words = f"no measurement of `{name}` for {self.table.name} at {size}"
            return Choice(EAGER, f"{EAGER}: {words}")
        figures = ", ".join(f"{b} {row.microseconds[b]:g}" for b in row.microseconds)
        words = f"us measured on {self.table.name} ({self.table.measured}) at {row.width} wide"
        said = f"{row.fastest}: of {figures} {words}, for {size}"
        return Choice(row.fastest, said)


def measured(device: object, dtype: object) -> Measured:
    """What is chosen by for a device.

    Args:
        device: Its name; None for the GPU at hand.
        dtype: What is trained in; None for what the model's parameters have.

    Raises:
        BadArgument: There is no such device or dtype, or no GPU at hand.
    """
    if dtype is not None and dtype not in DTYPES:
        raise errors.BadArgument(
            f"`dtype` must be one of {', '.join(map(repr, DTYPES))}, not {dtype!r}",
            hint=errors.did_you_mean(str(dtype), DTYPES),
        )
    known = tables()
    table = _at_hand(known) if device is None else known.get(str(device))
    if table is None and device not in known_gpus():
        names = [*dict.fromkeys((*known, *known_gpus()))]
        raise errors.BadArgument(
            f"there is no device {device!r}",
            hint=errors.did_you_mean(str(device), names) or "there are " + ", ".join(names),
        )
    return Measured(table or Table(str(device)), None if dtype is None else str(dtype))


def _at_hand(known: Mapping[str, Table]) -> Table:
    """The table of this machine's GPU; an empty one where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise errors.BadArgument(
            "there is no GPU here to choose for",
            hint=f'say what is trained on: backend="{MEASURED}", device="h100"',
        )
    name = torch.cuda.get_device_name()
    return next((t for t in known.values() if t.device == name), Table(name))


def _dtype(node: Node | None) -> str:
    """That of a module's parameters, or of those around it."""
    while node is not None:
        for parameter in node.live.parameters():
            return str(parameter.dtype).removeprefix("torch.")
        node = node.parent
    return DTYPES[0]
