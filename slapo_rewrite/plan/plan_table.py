"""Renders a plan as text."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from slapo_rewrite.plan.candidates import Predicted
from slapo_rewrite.plan.planning import Planned, described
from slapo_rewrite.simulate.byte_sizes import gib

SHOWN = 10
# Common ways, by name.
OBVIOUS: dict[str, Callable[[Predicted], bool]] = {
    "replicas alone": lambda p: p.way.tensor == p.way.pipeline == 1 and p.way.zero < 3,
    "replicas of parts (ZeRO 3)": lambda p: p.way.tensor == p.way.pipeline == 1 and p.way.zero == 3,
    "tensor parallelism without a pipeline": lambda p: p.way.tensor > 1 and p.way.pipeline == 1,
    "a pipeline without tensor parallelism": lambda p: p.way.tensor == 1 and p.way.pipeline > 1,
    "nothing recomputed": lambda p: not p.way.recomputed,
    "everything recomputed": lambda p: p.way.recomputed == 1,
    "without sequence parallelism": lambda p: p.way.tensor > 1 and not p.way.sequence_parallel,
    "without fusion": lambda p: not p.way.fused,
    "with fusion": lambda p: p.way.fused,
}


def rendered(planned: Planned, width: int = 118) -> str:
    """A table of the best ways, why common others are worse, and the assumptions."""
    table = Table(box=None, title=_title(planned), title_justify="left")
    for column in ("", "tensor", "pipe", "data", "ZeRO", "rows", "recomputed", "", "ms", "of best",
                   "bubble", "memory", "bound by"):  # fmt: skip
        table.add_column(column, justify="left" if column == "bound by" else "right")
    best = planned.best[0].seconds
    decimals = max(0, 2 - math.floor(math.log10(best * 1e3)))  # three digits of it
    for number, each in enumerate(planned.best[:SHOWN], 1):
        way = each.way
        knobs = "seq" * way.sequence_parallel + " fused" * way.fused
        table.add_row(
            str(number),
            *map(str, (way.tensor, way.pipeline, way.data, way.zero)),
            f"{way.micro_batches}x{way.rows}",
            f"{way.recomputed:.0%}",
            knobs.strip(),
            f"{each.seconds * 1e3:,.{decimals}f}",
            f"{each.seconds / best:.2f}x",
            f"{each.bubble:.0%}",
            gib(each.memory),
            f"{each.bound} {each.shares[each.bound]:.0%}",
        )
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    lines += ["", *_others(planned), "", "assumed:", *(f"  {a}" for a in planned.assumptions)]
    return "\n".join(lines)


def _title(planned: Planned) -> str:
    wanted = planned.wanted
    ways = len(planned.best) + len(planned.others)
    tokens = f" of {wanted.sequence} tokens" if wanted.sequence else ""
    rows = f"{wanted.batch} row{'s' * (wanted.batch > 1)}"
    return (
        f"{rows}{tokens} a step on {wanted.gpus} x {wanted.hardware.title}, "
        f"{gib(wanted.memory)} each: {len(planned.best)} of {ways} ways fit"
    )


def _others(planned: Planned) -> Iterator[str]:
    """Why common other ways are slower, or do not fit."""
    first = planned.best[0]
    yield f"best: {described(first.way)}; of a step " + ", ".join(
        f"{share:.0%} {kind}" for kind, share in first.shares.items() if share >= 0.01
    )
    named: set[int] = set()  # each way is shown once, under its first name
    for name, belongs in OBVIOUS.items():
        if belongs(first):
            continue
        found = next(filter(belongs, [*planned.best, *planned.others]), None)
        if found is None or id(found) in named:
            continue
        named.add(id(found))
        if found in planned.best:
            worse = {k: found.shares[k] * found.seconds - first.shares[k] * first.seconds
                     for k in first.shares}  # fmt: skip
            kind = max(worse, key=lambda k: worse[k])
            yield (
                f"{name}: {found.seconds / first.seconds:.2f} times as long, for {kind} mostly "
                f"({described(found.way)})"
            )
        else:
            yield f"{name}: does not fit, {gib(found.memory)} at least ({described(found.way)})"
    for ranks, why in planned.refused.items():
        yield f"{ranks} ranks cannot share the layers: {why}"
