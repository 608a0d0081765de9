"""What communication takes, by the model of a start-up time and a bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What connects the processes of one axis.

    Attributes:
        latency: Seconds that an operation takes however little it moves.
        bandwidth: Bytes a second that one process sends, or receives.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise ValueError(f"a link needs a latency of 0 or more and a bandwidth above 0: {self}")

    def send(self, size: float) -> float:
        """Seconds that one process takes to send `size` bytes to another."""
        return self.latency + size / self.bandwidth

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds that `ranks` processes take to sum `size` bytes in a ring; none for one."""
        return self._ring(2 * size, ranks)

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds that they take to give one another their parts of `size` bytes."""
        return self._ring(size, ranks)

    def _ring(self, size: float, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        return self.latency + size * (ranks - 1) / ranks / self.bandwidth
