"""Who asked for a change: a call in the schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slapo_rewrite.errors import Span


@dataclass(frozen=True)
class Directive:
    """One primitive call of the schedule.

    Attributes:
        number: Position in the schedule's order.
        primitive: The primitive's name.
        at: Where the schedule calls it.
        text: The call as the schedule writes it, on one line.
        paths: The module paths that it was called on.
        inferred: The collective that was inferred from it for these paths, if it infers any.
    """

    number: int
    primitive: str
    at: Span | None
    text: str
    paths: tuple[str, ...]
    inferred: str | None = None


def merged_causes(*causes: Iterable[Directive]) -> tuple[Directive, ...]:
    """Directives without repetition, in the schedule's order."""
    found = {d.number: d for group in causes for d in group}
    return tuple(found[n] for n in sorted(found))
