"""Measures every backend of each function that rules call: the tables in `rules/measured`.

The figures are microseconds of the forward and backward pass of the Triton kernel, of the reference
compiled by `torch.compile`, and of the reference, on the first of the function's samples. Before,
each is compared with the reference in float64: a backend that fails, or differs by more than twice
the reference's own error, gets no figure and is named.
"""

from __future__ import annotations

import datetime
import importlib
import json
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from slapo_rewrite.model.kernel_samples import SAMPLES, Maker, Sample, results, samples
from slapo_rewrite.simulate.hardware import known_gpus

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "rules" / "measured"
ROWS, COMPARED, TINY = 16384, 1024, 8
# Each stands for the widths from half of it to twice.
HIDDEN = (1024, 4096)
VOCABULARIES = (32000, 128256)
OTHERS = {"rotary": (64, 128), "masked_softmax": (512, 2048)}  # of a head; tokens attended to
DTYPES = (torch.bfloat16, torch.float32)
AGAIN = "eager again"
SLACK = 2.0  # times the reference's own error, and a little where that has none
LEAST = 1e-5
STEADY = 0.03  # how far two times of the same may lie apart


class Timer(Protocol):
    """Times calls, like the clock of `benchmark.kernels`."""

    device: str

    def median_s(self, calls: list[Callable[[], Any]]) -> float:
        """Seconds of one call."""
        ...


def widths(function: str, tiny: bool) -> tuple[int, ...]:
    """The widths that a function is measured at."""
    if tiny:
        return (TINY,)
    return VOCABULARIES if "cross_entropy" in function else OTHERS.get(function, HIDDEN)


def forms(function: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernel and the reference of a function."""
    for path in sorted((ROOT / "slapo_rewrite/runtime/eager").glob("*.py")):
        module = importlib.import_module(f"slapo_rewrite.runtime.eager.{path.stem}")
        found = vars(module).get(function)
        if getattr(found, "__module__", None) == module.__name__:
            kernels = importlib.import_module(f"slapo_rewrite.runtime.kernels.{path.stem}")
            return getattr(kernels, function), getattr(module, function)
    raise KeyError(function)


def backends(function: str, compiled: bool) -> dict[str, Callable[..., Any]]:
    """The backends to measure, by name."""
    kernel, reference = forms(function)
    inductor = {"inductor": torch.compile(reference, dynamic=False)} if compiled else {}
    return {"eager": reference, "triton": kernel, **inductor, AGAIN: reference}


def error(function: Callable[..., Any], given: Sample, exact: dict[str, torch.Tensor]) -> float:
    """The largest difference from what is exact, relative to the largest value."""
    found = results(function, given)
    if found.keys() != exact.keys():
        return float("inf")
    pairs = ((found[name].double(), wanted) for name, wanted in exact.items())
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def step(function: Callable[..., Any], sample: Sample) -> Callable[[], Any]:
    """A call of a function, forwards and backwards."""
    leaves = [*sample.leaves().values()]
    seeds: list[torch.Tensor] = []

    def call() -> Any:
        outputs = function(*sample.args, **sample.kwargs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if not seeds:
            seeds.extend(torch.ones_like(o) for o in outputs)
        return torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)

    call()  # compiles
    return call


def measured(
    function: str, maker: Maker, timer: Timer, cache_bytes: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of each backend, and of those that have none the reason.

    Args:
        function: The name.
        maker: Makes the inputs.
        timer: Times.
        cache_bytes: Inputs rotate over more bytes than these.
    """
    torch.compiler.reset()  # of one function it compiles a few sizes only
    rows, width = min(maker.rows, COMPARED), maker.width
    small = samples(function, Maker(rows, width, maker.dtype, maker.device))[0]
    whole = samples(function, Maker(rows, width, torch.float64, maker.device))[0]
    reference = forms(function)[1]
    exact = results(reference, whole)
    limit = SLACK * error(reference, small, exact) + LEAST
    first = samples(function, maker)[0]
    size = sum(leaf.numel() * leaf.element_size() for leaf in first.leaves().values())
    copies = 1 if timer.device != "cuda" else min(-(-cache_bytes // size), 8)
    sets = [first, *(samples(function, maker)[0] for _ in range(1, copies))]
    figures, failed = {}, {}
    for name, form in backends(function, timer.device == "cuda").items():
        try:
            if (found := error(form, small, exact)) > limit:
                failed[name] = f"its error is {found:.1e}, where {limit:.1e} are allowed"
                continue
            seconds = timer.median_s([step(form, given) for given in sets])
            figures[name] = float(f"{seconds * 1e6:.3g}")
        except Exception as raised:  # a backend that fails must not end the others
            failed[name] = f"{type(raised).__name__}: {raised}"[:200]
    again, eager = figures.pop(AGAIN, math.inf), figures.get("eager", math.inf)
    if timer.device == "cuda" and not abs(again / eager - 1) <= STEADY:
        return {}, {**failed, AGAIN: f"{again:g} us, and {eager:g} us before"}
    return figures, failed


def measurements(only: str, tiny: bool, timer: Timer, cache_bytes: int, deadline: float) -> Any:
    """A row for each function, dtype and width."""
    for dtype in DTYPES:  # all of what is trained in first
        for function, width in (
            (f, w) for f in SAMPLES if f.startswith(only) for w in widths(f, tiny)
        ):
            if time.monotonic() > deadline:
                print(f"{function}: out of time", file=sys.stderr)
                return
            maker = Maker(TINY if tiny else ROWS, width, dtype, timer.device)
            row = {"kernel": function, "width": width, "rows": maker.rows}
            row["dtype"] = str(dtype).removeprefix("torch.")
            figures, failed = measured(function, maker, timer, cache_bytes)
            said = ", ".join(f"{name} {value:g}" for name, value in figures.items())
            print(f"{function} {width} {row['dtype']}: {said or 'nothing'} us", file=sys.stderr)
            for name, reason in failed.items():
                print(f"{function} {width} by {name}: {reason}", file=sys.stderr)
            if figures:
                yield row | {"microseconds": figures}


def table(device: str, versions: dict[str, Any], rows: list[Any]) -> str:
    """The text of a table, a measurement a line."""
    today = datetime.date.today().isoformat()
    head = {"device": device, "measured": today, "versions": versions}
    text = json.dumps(head, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{text},\n "measurements": [\n{lines}\n ]\n}}\n'


def short_name(device: str) -> str:
    """The name of a device in schedules: `NVIDIA H100 80GB HBM3 -> h100`."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return next((gpu for gpu in known_gpus() if gpu in words), "_".join(words))
