"""Text edits as values, and the pass that applies them."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.directive import Causes


@dataclass(frozen=True)
class Edit:
    """The replacement of text by other text."""

    start: int  # the offset of the first replaced character
    end: int  # the offset after the last; equal to `start` for an insertion
    text: str  # the new text
    causes: Causes = ()  # the directives that asked for it
    why: str = ""  # the reason, in a few words

    @classmethod
    def instead_of(cls, file: SourceFile, node: ast.AST, text: str) -> Edit:
        """The replacement of a node by a text, without causes."""
        return cls(*file.span(node), text)

    def caused_by(self, causes: Causes, why: str) -> Edit:
        """The same with causes and a reason."""
        return replace(self, causes=causes, why=why)


@dataclass(frozen=True)
class Change:
    """Lines of a result that an edit wrote."""

    first: int  # first line, 1-based
    last: int  # last line
    causes: Causes  # the directives that asked for it
    why: str  # the reason


def apply_edits(
    text: str, edits: Iterable[Edit], earlier: Sequence[Change] = ()
) -> tuple[str, list[Change]]:
    """Applies edits to a text; returns the result and the lines that each edit wrote.

    Insertions at one place keep their order. The lines of `earlier` edits come first in the result.
    """
    pieces: list[str] = []
    changes: list[Change] = []
    spans: list[_Span] = []
    position, line, length = 0, 1, 0
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
        # An insertion of whole lines starts with the line break of the line before it.
        lead = len(edit.text) - len(edit.text.lstrip("\n"))
        tail = len(edit.text) - len(edit.text.rstrip("\n"))
        last = line + edit.text.count("\n")
        is_gap = edit.start == edit.end and not edit.text.strip()
        if edit.causes and not is_gap:
            changes.append(
                Change(line + lead, max(line + lead, last - tail), edit.causes, edit.why)
            )
        line = last
        length += len(kept)
        spans.append(_Span(edit.start, edit.end, length, length + len(edit.text)))
        length += len(edit.text)
        position, previous = edit.end, edit
    pieces.append(text[position:])
    result = "".join(pieces)
    return result, [*_moved_lines(earlier, text, result, spans), *changes]


@dataclass(frozen=True)
class _Span:
    """The offsets of an edit's text, before and after all edits."""

    start: int
    end: int
    new_start: int
    new_end: int


def _moved_lines(
    changes: Sequence[Change], before: str, after: str, spans: Sequence[_Span]
) -> Iterator[Change]:
    """The lines that earlier edits wrote, moved by later edits."""
    if not changes:
        return
    old, new = _line_starts(before), _line_starts(after)
    for change in changes:
        first, last = old[change.first - 1], [*old, len(before) + 1][change.last] - 1
        while before[first : first + 1] == " ":  # a statement starts after its indentation
            first += 1
        # Text inserted at the very beginning or end does not belong to the lines.
        head = next((s for s in reversed(spans) if s.start <= first), _Span(0, 0, 0, 0))
        tail = next((s for s in reversed(spans) if s.start < last), _Span(0, 0, 0, 0))
        begin = head.new_start if first < head.end else head.new_end + first - head.end
        end = tail.new_end if last <= tail.end else tail.new_end + last - tail.end
        yield replace(change, first=bisect_right(new, begin), last=bisect_right(new, end))


def _line_starts(text: str) -> list[int]:
    return [0, *(n + 1 for n, character in enumerate(text) if character == "\n")]


def moved(edits: Iterable[Edit], by: int) -> list[Edit]:
    """The edits with offsets shifted, for a text that starts elsewhere."""
    return [replace(edit, start=edit.start + by, end=edit.end + by) for edit in edits]
