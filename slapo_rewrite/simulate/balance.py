"""Cuts a sequence into stages of about the same cost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf


def stage_ends(costs: Sequence[float], n: int) -> list[int]:
    """Where to cut a sequence into `n` stages: for each, the index after its last element.

    The cost of the dearest stage is minimized; among the cuts that reach this minimum, the one
    with the least sum of the stages' squared costs is taken. Raises `ValueError` if there are fewer
    elements than stages, or a cost is negative.
    """
    if not 1 <= n <= len(costs):
        raise ValueError(f"{len(costs)} elements cannot be cut into {n} stages")
    if not all(0 <= cost < inf for cost in costs):
        raise ValueError(f"a cost is a number of 0 or more: {list(costs)}")
    totals = [0.0, *accumulate(costs)]
    most = _dearest_stage(totals, n)
    # For each number of elements: the least sum of squares, and where the last stage starts.
    best: list[tuple[float, int]] = [(0.0, 0)] + [(inf, 0)] * len(costs)
    starts = []
    for _ in range(n):
        following = [(inf, 0)] * len(totals)
        for end in range(1, len(totals)):
            for start in range(end - 1, -1, -1):
                stage = totals[end] - totals[start]
                if stage > most:
                    break
                following[end] = min(following[end], (best[start][0] + stage**2, start))
        best = following
        starts.append([start for _, start in best])
    ends = [len(costs)]
    for before in reversed(starts[1:]):
        ends.append(before[ends[-1]])
    return ends[::-1]


def _dearest_stage(totals: Sequence[float], n: int) -> float:
    """The minimum, over all cuts into `n` stages, of the dearest stage's cost."""

    def fits(most: float) -> bool:
        end = 0
        for _ in range(n):
            end = bisect_right(totals, most, lo=end, key=lambda total: total - totals[end]) - 1
        return end == len(totals) - 1

    stages = sorted({end - start for i, start in enumerate(totals) for end in totals[i + 1 :]})
    return stages[bisect_left(stages, True, key=fits)]
