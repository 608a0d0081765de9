"""Backends of functions that rules call: Triton kernels, PyTorch operations, a user's module."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.bundle import rules_folder
from slapo_rewrite.changes.imports import EAGER, INDUCTOR, TRITON
from slapo_rewrite.fusion.kernel_forms import in_torch, kernel_function
from slapo_rewrite.fusion.last_axis import features_of
from slapo_rewrite.fusion.rule import Rule, RuleMatch
from slapo_rewrite.model.tree import Node
from slapo_rewrite.simulate.hardware import known_gpus


@dataclass(frozen=True)
class Choice:
    """The backend of a function at one place."""

    # One of `imports.WRITTEN`, or the name of a module that the output imports.
    backend: str = TRITON
    why: str = ""  # the reason for the choice, in words; empty if it was requested


@dataclass(frozen=True)
class Always:
    """The same backend for every place."""

    backend: str = TRITON

    def choose(self, rule: Rule, kernel: str, found: RuleMatch) -> Choice:
        """The backend of a rule's function, given by the dotted name of its kernel."""
        return Choice(self.backend)


MEASURED = "measured"
# A measurement is valid for sizes from half to twice its own.
REACH = 2.0
# Times within this factor count as equal, since repeated measurements differ by as much.
ALIKE = 1.03
SIMPLEST = (EAGER, TRITON, INDUCTOR)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Row:
    """A measurement: the time of a function's forward and backward pass."""

    kernel: str  # the function
    width: int  # the length of its rows: features, head size, or vocabulary size
    rows: int  # the number of rows
    dtype: str  # the dtype of its operands
    microseconds: Mapping[str, float]  # by backend

    @property
    def fastest(self) -> str:
        """The fastest backend; the simplest of those with equal times."""
        alike = ALIKE * min(self.microseconds.values())
        return next(name for name in SIMPLEST if self.microseconds.get(name, math.inf) <= alike)


@dataclass(frozen=True)
class Table:
    """The measurements on a device."""

    name: str  # the name of the device in schedules
    device: str = ""  # the name that the device reports; empty without measurements
    measured: str = ""  # the date
    rows: tuple[Row, ...] = ()  # the measurements

    @classmethod
    def read(cls, path: Path) -> Table:
        """Reads a table from a file; `rules/measured/README.md` documents the format."""
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
    """The available tables, by their devices' names in schedules."""
    paths = sorted((rules_folder() / "measured").glob("*.json"))
    return {path.stem: _read(path, path.stat().st_mtime_ns) for path in paths}


@functools.cache
def _read(path: Path, written: int) -> Table:
    return Table.read(path)


@dataclass(frozen=True)
class Measured:
    """The fastest backend measured at a match's size, else PyTorch's operations."""

    table: Table  # the measurements
    # The dtype of training; None for that of the model's parameters.
    dtype: str | None = None

    def choose(self, rule: Rule, kernel: str, found: RuleMatch) -> Choice:
        """The fastest backend, with the measured times as reason."""
        name, width = kernel.rpartition(".")[2], rule.width(found) or features_of(found)
        dtype = self.dtype or _dtype(found.node)
        if width is None:
            return Choice(EAGER, f"{EAGER}: the width of the rows of `{name}` is not known here")
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
    """The choice by measurements for a device.

    By default, the device is this machine's GPU, and the dtype that of the model's parameters.
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
    """The table of this machine's GPU, or an empty table if it has not been measured."""
    import torch

    if not torch.cuda.is_available():
        raise errors.BadArgument(
            "there is no GPU here to choose kernels for",
            hint=f'name the GPU that you train on: backend="{MEASURED}", device="h100"',
        )
    name = torch.cuda.get_device_name()
    return next((t for t in known.values() if t.device == name), Table(name))


def _dtype(node: Node) -> str:
    """The dtype of a module's parameters, or of those of a module around it."""
    parameters = (p for above in node.outwards() for p in above.live.parameters())
    return next((str(p.dtype).removeprefix("torch.") for p in parameters), DTYPES[0])


# The greatest error relative to the largest value, in float32: reordered sums stay below it.
LIMIT = 1e-4
ROWS, WIDTH = 6, 8


@dataclass
class Plugged:
    """A user's module as backend; each function is checked before its first use."""

    module: types.ModuleType
    _checked: set[str] = field(default_factory=set)

    def choose(self, rule: Rule, kernel: str, found: RuleMatch) -> Choice:
        """The module, after checking that its function computes the same as the kernel."""
        if kernel not in self._checked:
            self._check(kernel)
            self._checked.add(kernel)
        return Choice(self.module.__name__)

    def _check(self, kernel: str) -> None:
        home, name = self.module.__name__, kernel.rpartition(".")[2]
        function = getattr(self.module, name, None)
        if not callable(function):
            public = [each for each in vars(self.module) if not each.startswith("_")]
            raise errors.BadArgument(
                f"`{home}` has no function `{name}`, which the rule calls",
                hint=errors.did_you_mean(name, public)
                or (
                    "define it there, or use this backend for rules with functions there: "
                    f's.apply(..., backend="{home}")'
                ),
            )
        want, have = (_parameters(f) for f in (kernel_function(kernel), function))
        if want != have:
            raise errors.BadArgument(
                f"`{home}.{name}` takes other arguments than `{name}`",
                hint=f"it is called as {name}({', '.join(want)})",
            )
        self._check_numbers(kernel, function)

    def _check_numbers(self, kernel: str, function: Callable[..., Any]) -> None:
        from slapo_rewrite.model.kernel_samples import Maker, largest_error, samples

        home, name = self.module.__name__, kernel.rpartition(".")[2]
        reference = in_torch(kernel)
        assert reference is not None, f"{kernel} has no other form"
        for sample in samples(name, Maker(ROWS, WIDTH)):
            given = ", ".join([*(["..."] if sample.args else []), *sample.kwargs])
            try:
                error, what = largest_error(function, reference, sample)
            except Exception as failed:
                raise errors.OtherNumbers(
                    f"`{home}.{name}({given})` fails on a CPU: {type(failed).__name__}: {failed}",
                    hint="outputs also run on CPUs: call PyTorch's operations there, as "
                    f"`{kernel}` does",
                ) from failed
            if error > LIMIT:
                raise errors.OtherNumbers(
                    f"`{home}.{name}({given})` computes something else than `{name}`: {what} "
                    f"differs by {error:.1e} of the largest value",
                    hint="this was measured on small inputs in float32, on a CPU; the reference is "
                    f"`{reference.__module__}.{name}`",
                )


Backends = Always | Measured | Plugged


def plugged(name: str) -> Plugged | None:
    """The backend of a module's dotted name; None if there is no such module."""
    try:
        return Plugged(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise _failing(name, error) from error
    except Exception as error:
        raise _failing(name, error) from error


def _failing(name: str, error: Exception) -> errors.BadArgument:
    return errors.BadArgument(
        f"the module `{name}` cannot be imported: {type(error).__name__}: {error}"
    )


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The text of a function's parameters, without annotations."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    shown = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
    by_name = [n for n, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if by_name and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        shown.insert(by_name[0], "*")
    return shown
