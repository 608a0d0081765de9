"""Plots time against memory, with the Pareto front of the ways."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogFormatter

from slapo_rewrite.plan.candidates import Predicted
from slapo_rewrite.plan.planning import Planned

LABELS = 6


def front(predicted: Sequence[Predicted]) -> list[Predicted]:
    """The Pareto front: ways faster than all others with at most their memory, by memory."""
    found: list[Predicted] = []
    for each in sorted(predicted, key=lambda p: (p.memory, p.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    return found


def draw(planned: Planned, path: Path) -> None:
    """Writes the plot, in the format of the file's suffix."""
    figure, plot = plt.subplots(figsize=(8, 5), layout="constrained")
    gib = 2.0**30
    bounds = sorted({p.bound for p in planned.best})
    for bound in bounds:
        some = [p for p in planned.best if p.bound == bound]
        plot.scatter(
            [p.memory / gib for p in some], [p.seconds for p in some], s=12, label=bound, alpha=0.7
        )
    best = front(planned.best)
    plot.step([p.memory / gib for p in best], [p.seconds for p in best], where="post", lw=1, c="k")
    for each in best[-LABELS:]:
        way = each.way
        text = f"t{way.tensor} p{way.pipeline} d{way.data} z{way.zero}"
        plot.annotate(text, (each.memory / gib, each.seconds), fontsize=7, xytext=(3, 3),
                      textcoords="offset points")  # fmt: skip
    plot.axvline(planned.wanted.memory / gib, ls="--", lw=1, c="gray")
    plot.set_yscale("log")
    for formatted in (plot.yaxis.set_major_formatter, plot.yaxis.set_minor_formatter):
        formatted(LogFormatter(minor_thresholds=(2, 0.5)))  # 90, not 9 x 10^1
    plot.set_xlabel("memory of the fullest rank, GiB")
    plot.set_ylabel("seconds a step")
    plot.set_title(
        f"{planned.wanted.batch} rows on {planned.wanted.gpus} x {planned.wanted.hardware.title}",
        fontsize=9,
    )
    plot.legend(title="bound by", fontsize=7, title_fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)
