"""Grids of throughputs that are made up: shapes, optima and names of many kinds."""

import itertools
import math

import numpy as np

from slapo_rewrite.tune.knob_space import Axis, KnobSpace
from slapo_rewrite.tune.replay_grid import Grid


def grid(axes: dict, throughput, name: str = "grid", takes_too_long=None) -> Grid:
    """A grid by a function of the knobs."""
    points = [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]
    space = KnobSpace([Axis(name, tuple(values)) for name, values in axes.items()])
    ends = takes_too_long or (lambda **point: False)
    figures = [0.0 if ends(**point) else throughput(**point) for point in points]
    return Grid(name, space, figures, frozenset(i for i, p in enumerate(points) if ends(**p)))


def batches(names=("batch_size", "ckpt_ratio"), memory=60.0, noise=0.0, overhead=20.0, seed=0):
    """A step takes a third more where all is recomputed, and some time whatever the batch."""
    random = np.random.default_rng(seed)
    axes = dict(
        zip(names, ([8 * n for n in range(2, 14)], [0.0, 0.25, 0.5, 0.75, 1.0]), strict=True)
    )

    def throughput(**point):
        batch, ratio = point.values()
        value = batch / (overhead + batch * (1 + ratio / 3)) * math.exp(random.normal(0, noise))
        return value if batch * (1 - 0.8 * ratio) <= memory else 0.0

    return grid(axes, throughput)


def words(seed=0):
    """Knobs with words and booleans, more memory for larger chunks, best in the middle of one."""
    random = np.random.default_rng(seed)
    attention = {"eager": 1.0, "sdpa": 1.25, "flash": 1.4}
    axes = {
        "attention": list(attention),
        "fused": [True, False],
        "chunk": [1, 2, 4, 8, 16, 32],
        "offload": [0.0, 0.5, 1.0],
    }

    def throughput(attention_, fused, chunk, offload):
        away = math.log2(chunk) - 3
        value = attention[attention_] * (1.1 if fused else 1) * math.exp(-0.05 * away**2)
        return value * (1 - 0.1 * offload) * math.exp(random.normal(0, 0.004))

    def fits(attention_, fused, chunk, offload):
        return chunk * (2 if attention_ == "eager" else 1) * (1 - 0.7 * offload) <= 8

    def either(attention, fused, chunk, offload):
        point = (attention, fused, chunk, offload)
        return throughput(*point) if fits(*point) else 0.0

    return grid(axes, either)


def proportional():
    """Nothing but the batch counts, and the range of its effect is far beyond what is expected."""
    ratios = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    axes = {"batch_size": [8 * n for n in range(1, 14)], "ckpt_ratio": ratios}
    return grid(axes, lambda batch_size, ckpt_ratio: batch_size * (1 - 0.3 * ckpt_ratio))


def reverse():
    """Names that tell nothing, and what saves memory is the larger value of one knob."""

    def throughput(tiles, resident):
        value = (1 + 0.4 * resident) * (1.2 - tiles / 100)
        return value if 10 * resident + 20 - tiles <= 17 else 0.0

    return grid({"tiles": list(range(1, 21)), "resident": [n / 5 for n in range(6)]}, throughput)


def timed(seconds=60.0, memory=60.0, recomputed=1.0, batch_counts=True):
    """Runs of so many steps end in time if steps are short: what saves memory takes longer."""

    def throughput(batch_size, ckpt_ratio):
        value = batch_size / (20.0 + batch_size * (1 + ckpt_ratio * recomputed / 3))
        return value if batch_size * (1 - 0.8 * ckpt_ratio) <= memory else 0.0

    def takes_too_long(batch_size, ckpt_ratio):
        return (batch_size if batch_counts else 48) * (1 + ckpt_ratio * recomputed) > seconds

    axes = {"batch_size": [8 * n for n in range(1, 14)], "ckpt_ratio": [n / 6 for n in range(7)]}
    return grid(axes, throughput, "timed", takes_too_long)


def hills(one=(0.2, 0.2), other=(0.8, 0.75), width=0.18, noise=0.0, most=2.0):
    """Two, of which the one is lower; where both knobs add up to more than `most`, memory lacks."""
    random = np.random.default_rng(0)
    axes = {"tiles": list(range(12)), "share": [n / 6 for n in range(7)]}

    def throughput(tiles, share):
        x = tiles / 11
        far = [((x - a) ** 2 + (share - b) ** 2) / (2 * width**2) for a, b in (one, other)]
        value = 0.35 + 0.65 * max(0.73 * math.exp(-far[0]), math.exp(-far[1]))
        return value * math.exp(random.normal(0, noise)) if x + share <= most else 0.0

    return grid(axes, throughput)


HILLS = {
    "apart": hills,
    "narrow": lambda: hills(width=0.12),
    "noisy": lambda: hills(noise=0.02),
    "one beside the border": lambda: hills(most=1.6),
    "on a line": lambda: hills((0.15, 0.5), (0.85, 0.5)),
}
KINDS = {
    "batches": batches,
    "other names": lambda: batches(("tokens", "kept_out")),
    "noisy": lambda: batches(noise=0.01, seed=1),
    "dear steps": lambda: batches(overhead=200.0),
    "cheap steps": lambda: batches(overhead=1.0),
    "much memory": lambda: batches(memory=1e9),
    "little memory": lambda: batches(memory=17.0),
    "words": words,
    "proportional": proportional,
    "reverse": reverse,
}
