"""Edits as values, and the one pass that applies them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.directive import Directive


@dataclass(frozen=True)
class Edit:
    """Text in the place of other text.

    Attributes:
        start: First character replaced.
        end: One past the last; equal to `start` for an insertion.
        text: What stands there afterwards.
        causes: The directives that asked for it.
        why: What happens here, in a few words.
    """

    start: int
    end: int
    text: str
    causes: tuple[Directive, ...]
    why: str


@dataclass(frozen=True)
class Change:
    """Lines of a result that an edit wrote.

    Attributes:
        first: First line, 1-based.
        last: Last line.
        causes: The directives that asked for it.
        why: What happened here.
    """

    first: int
    last: int
    causes: tuple[Directive, ...]
    why: str


def apply_edits(text: str, edits: Iterable[Edit]) -> tuple[str, list[Change]]:
    """`text` with every edit carried out, and the lines that each one wrote.

    Insertions at one place stand in the order in which they are given.

    Raises:
        ConflictingEdits: Two edits replace the same text.
    """
    pieces: list[str] = []
    changes: list[Change] = []
    position, line = 0, 1
    previous: Edit | None = None
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        if previous is not None and edit.start < position:
            raise errors.ConflictingEdits(
                f"two lines of the schedule change the same place: {previous.why}, and {edit.why}",
                at=edit.causes[0].at if edit.causes else None,
                cause=previous.causes,
            )
        kept = text[position : edit.start]
        pieces += [kept, edit.text]
        line += kept.count("\n")
        # An insertion of whole lines begins with the break that ends the line before it.
        lead = len(edit.text) - len(edit.text.lstrip("\n"))
        tail = len(edit.text) - len(edit.text.rstrip("\n"))
        last = line + edit.text.count("\n")
        if edit.causes:
            changes.append(
                Change(line + lead, max(line + lead, last - tail), edit.causes, edit.why)
            )
        line = last
        position, previous = edit.end, edit
    pieces.append(text[position:])
    return "".join(pieces), changes


def moved(edits: Iterable[Edit], by: int) -> list[Edit]:
    """The edits at other positions, for a text that starts elsewhere."""
    return [Edit(e.start + by, e.end + by, e.text, e.causes, e.why) for e in edits]
