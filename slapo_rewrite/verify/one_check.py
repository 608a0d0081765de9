"""The result of one comparison of original and rewritten model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Check:
    """The result of one comparison on a rank."""

    name: str
    ok: bool  # whether the check passed
    # The largest relative error, rewritten against original; None if none is measured.
    error: float | None = None
    limit: float | None = None  # the largest error that passes
    # The original's own rounding error in that tensor: against itself in float64.
    own: float | None = None
    # The rewritten model's error in that tensor against the original in float64.
    reference: float | None = None
    place: str = ""  # the name of the tensor with the largest error
    detail: str = ""  # text for output: what is wrong, or worth knowing
    # Names beyond the limit with their errors, in model order.
    differs: list[tuple[str, float]] = field(default_factory=list)
    after: str = ""  # the compared name after the last of them, whose tensor is right
