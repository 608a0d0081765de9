"""A simulated step, to be read."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from slapo_rewrite.simulate.pipeline import Step

WAITS, OTHER = ".", "*"


def summary(step: Step) -> str:
    """A table with a row for each stage: what its time goes into, and its memory."""
    kinds = ("forward", "backward", "transfers", "replicas", "ties", "optimizer")
    of = {"transfers": ("activation", "gradient"), "replicas": ("gradients", "weights")}
    table = Table(title=f"{step.seconds * 1e3:.1f} ms, bubble {step.bubble:.1%}", box=None)
    for column in ("stage", *kinds, "waits", "live", "memory"):
        table.add_column(column, justify="right")
    for number, timeline in enumerate(step.stages):
        shares = [timeline.seconds(*of.get(kind, (kind,))) for kind in kinds]
        shares.append(step.seconds - timeline.seconds())
        times = [f"{seconds * 1e3:.1f}" for seconds in shares]
        memory = f"{timeline.memory / 1e9:.2f} GB"
        table.add_row(str(number), *times, str(timeline.live), memory)
    out = io.StringIO()
    Console(file=out, width=110, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def drawn(step: Step, width: int = 100) -> str:
    """A line for each stage, the step's time from left to right.

    A digit is the forward pass of a micro-batch, by the last digit of its number, a letter the
    backward pass, `a` for 0 to `j` for 9; `*` is everything else that a stage does, `.` is waiting.
    """
    lines = []
    for timeline in step.stages:
        line = [WAITS] * width
        for event in timeline.events:
            first, end = (round(t / step.seconds * width) for t in (event.start, event.end))
            marks = {"forward": "0123456789", "backward": "abcdefghij"}.get(event.what, OTHER * 10)
            line[first:end] = marks[event.number % 10] * (end - first)
        lines.append("".join(line))
    return "\n".join(lines)
