"""One thing that is compared between original and rewritten."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Check:
    """One thing that was compared on a rank.

    Attributes:
        ok: Whether it holds.
        error: The largest relative error, rewritten against original; None for yes or no.
        limit: The largest that is allowed.
        own: The original's own rounding error at that place: against itself in float64.
        reference: The rewritten model's error at that place against the original in float64.
        place: The name of the tensor with the largest error.
        detail: What is wrong, or worth knowing, in words.
        differs: Names beyond the limit with their errors, in model order.
        after: The name that follows the last of them, which is right.
    """

    name: str
    ok: bool
    error: float | None = None
    limit: float | None = None
    own: float | None = None
    reference: float | None = None
    place: str = ""
    detail: str = ""
    differs: list[tuple[str, float]] = field(default_factory=list)
    after: str = ""
