"""What a trial came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["ok", "out of memory", "timed out", "failed"]
TIMED_OUT: Final = "timed out"


@dataclass(frozen=True)
class Trial:
    """A point that was tried.

    Attributes:
        number: Which of the space's points.
        kind: How it ended.
        throughput: What the command reported, 0 unless `kind` is "ok".
    """

    number: int
    kind: Kind
    throughput: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it has a throughput."""
        return self.kind == "ok"


def best_of(trials: Iterable[Trial]) -> Trial | None:
    """The trial with the highest throughput, the first of equals; None if none has one."""
    return max((t for t in trials if t.counts), key=lambda t: t.throughput, default=None)
