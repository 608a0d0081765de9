"""Plots the trials, and the model's predictions for untried points."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from slapo_rewrite.tune.knob_space import KnobSpace, Trial, best_of, shown, shown_value
from slapo_rewrite.tune.predicted_first import expected_throughputs

LETTERS = 16  # the characters of a title per inch


def draw(space: KnobSpace, made: Sequence[Trial], path: Path) -> None:
    """Writes a heat map: a cell for each pair of values of the two knobs with the most values.

    Other knobs have the best point's values. Cells are coloured by the expected throughput; tried
    ones show the measured throughput, the best one in bold.
    """
    with matplotlib.rc_context({"text.parse_math": False}):  # a knob may be any text: `$HOME`
        _draw(space, made, path)


def _draw(space: KnobSpace, made: Sequence[Trial], path: Path) -> None:
    best = best_of(made)
    if best is None:
        return
    at = space.points[best.number]
    axes = sorted(space.axes, key=lambda axis: -len(axis.values))[:2]
    across, down = axes[0], axes[1] if len(axes) > 1 else None
    rows = down.values if down else (None,)
    expected = expected_throughputs(space, made)
    shape = (len(rows), len(across.values))
    figures, words = np.full(shape, np.nan), np.full(shape, "", object)
    best_cell = (-1, -1)
    trials = {trial.number: trial for trial in made}
    for number, point in enumerate(space.points):
        shown_knobs = {axis.name for axis in axes}
        if any(point[name] != at[name] for name in point if name not in shown_knobs):
            continue
        row = rows.index(point[down.name]) if down else 0
        column = across.values.index(point[across.name])
        figures[row, column] = expected[number]
        if number == best.number:
            best_cell = (row, column)
        if trial := trials.get(number):
            figures[row, column] = trial.throughput if trial.counts else np.nan
            words[row, column] = f"{trial.throughput:.4g}" if trial.counts else f"{trial.kind}"
    width = max(4.0, 1.5 + 0.8 * shape[1])
    figure, plot = plt.subplots(figsize=(width, 1.8 + 0.5 * shape[0]), layout="constrained")
    image = plot.imshow(figures, aspect="auto", cmap="viridis")
    middle = (np.nanmin(figures) + np.nanmax(figures)) / 2
    for (row, column), text in np.ndenumerate(words):
        dark = figures[row, column] < middle
        plot.text(
            column,
            row,
            text.replace(" ", "\n"),
            ha="center",
            va="center",
            fontsize=8,
            fontweight="bold" if (row, column) == best_cell else "normal",
            color="white" if dark else "black",
        )
    plot.set_xticks(range(shape[1]), [shown_value(value) for value in across.values])
    plot.set_yticks(range(shape[0]), [shown_value(v) if down else "" for v in rows])
    plot.set_xlabel(across.name)
    plot.set_ylabel(down.name if down else "")
    others = [name for name in at if name not in {axis.name for axis in axes}]
    title = f"{len(made)} of {len(space)} points tried; best: {shown(at)}"
    lines = [title, *([f"with {shown(at, others)}"] if others else [])]
    wrapped = [textwrap.fill(line, int(LETTERS * width)) for line in lines]
    figure.suptitle("\n".join(wrapped), fontsize=8)
    figure.colorbar(image).set_label("throughput: as written,\nelse as expected", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
