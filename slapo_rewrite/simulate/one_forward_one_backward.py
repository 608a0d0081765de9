"""A step of a pipeline by a formula: what `pipeline.simulate` comes to, in microseconds.

The slowest stage goes through all its micro-batches without waiting, but for the first one's way
there through the stages before it, and the way back of the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from slapo_rewrite.simulate.links import Link
from slapo_rewrite.simulate.pipeline import Stage


def live_micro_batches(stage: int, stages: int, micro_batches: int) -> int:
    """How many micro-batches a stage holds activations of at most."""
    return min(stages - stage, micro_batches)


def pipelined_seconds(
    stages: Sequence[Stage], micro_batches: int, pipeline: Link | None = None
) -> float:
    """Seconds of all micro-batches, without what follows: sums over replicas, the optimizer.

    Args:
        stages: The stages, first to last.
        micro_batches: How many make up a step.
        pipeline: What connects neighbouring stages.
    """
    link = pipeline or Link()
    sends = [2 * link.send(stage.sent) for stage in stages[:-1]]  # there, and the gradient back
    before, after = [0.0, *sends], [*sends, 0.0]
    busy = [s.forward + s.backward for s in stages]
    through = sum(busy) + sum(sends)
    return max(
        through + (micro_batches - 1) * (own + first + second)
        for own, first, second in zip(busy, before, after, strict=True)
    )
