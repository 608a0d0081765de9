"""One thing that is compared between original and rewritten."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Check:
    """One thing that was compared on a rank."""

    name: str
    ok: bool  # whether it holds
    # The largest relative error, rewritten against original; None for yes or no.
    error: float | None = None
    limit: float | None = None  # the largest that is allowed
    # The original's own rounding error at that place: against itself in float64.
    own: float | None = None
    # The rewritten model's error at that place against the original in float64.
    reference: float | None = None
    place: str = ""  # the name of the tensor with the largest error
    detail: str = ""  # what is wrong, or worth knowing, in words
    # Names beyond the limit with their errors, in model order.
    differs: list[tuple[str, float]] = field(default_factory=list)
    after: str = ""  # the name that follows the last of them, which is right
