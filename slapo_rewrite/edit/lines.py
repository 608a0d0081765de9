"""What changes around one statement, and its edits."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slapo_rewrite.edit.definition import united
from slapo_rewrite.edit.expressions import formatted
from slapo_rewrite.edit.splice import Edit, apply_edits, moved
from slapo_rewrite.edit.state import Directive
from slapo_rewrite.source.index import SourceFile

# How it is said of a line that cuts a size why it is there.
SHARE_OF = "this rank's share of"


@dataclass
class Lines:
    """What changes around one statement: parts of it, and whole lines before or after it.

    Attributes:
        inside: Edits of the statement itself.
        before: Lines before it, with their causes and why they are there.
        after: Lines after it.
        around: Edits of the loop that it stands in.
        again: Whether a subclass repeats it although nothing in it changes.
    """

    inside: list[Edit] = field(default_factory=list)
    before: list[tuple[str, tuple[Directive, ...], str]] = field(default_factory=list)
    after: list[tuple[str, tuple[Directive, ...], str]] = field(default_factory=list)
    around: list[Edit] = field(default_factory=list)
    again: bool = False


# Gives what changes around a statement, to be added to.
At = Callable[[ast.stmt], Lines]


def written(file: SourceFile, lines: Mapping[ast.stmt, Lines], line_length: int) -> list[Edit]:
    """The edits of the file that carry out what changes around its statements."""
    edits = []
    for statement, change in lines.items():
        start, end = file.span(statement)
        indent = statement.col_offset
        pad = "\n" + " " * indent
        edits += change.around
        if change.inside:
            text, _ = apply_edits(file.text[start:end], moved(change.inside, -start))
            causes = united(*(e.causes for e in change.inside))
            why = "; ".join(dict.fromkeys(e.why for e in change.inside))
            edits.append(Edit(start, end, _fitted(text, indent, line_length), causes, why))
        # Lines of one cause stand together in one edit.
        for text, causes, why in change.before:
            edits.append(
                Edit(start, start, formatted(text, indent, line_length) + pad, causes, why)
            )
        for text, causes, why in change.after:
            line_end = _end_of_line(file, end)
            edits.append(
                Edit(line_end, line_end, pad + formatted(text, indent, line_length), causes, why)
            )
    return edits


def _end_of_line(file: SourceFile, position: int) -> int:
    """Past a comment that stands behind the statement."""
    line_end = file.text.find("\n", position)
    rest = file.text[position : line_end if line_end >= 0 else None]
    return position + len(rest.rstrip()) if rest.strip().startswith("#") else position


def _fitted(text: str, indent: int, line_length: int) -> str:
    """The statement as it is where it fits on its line, else as black lays it out."""
    if "\n" not in text and indent + len(text) <= line_length:
        return text
    return formatted(text, indent, line_length)
