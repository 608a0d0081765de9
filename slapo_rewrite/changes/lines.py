"""What changes around one statement, and its edits."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from slapo_rewrite.changes.splice import Edit as TextEdit
from slapo_rewrite.code.edit import Edit, Written, edited
from slapo_rewrite.code.layout import fitted
from slapo_rewrite.directive import Directive, merged_causes
from slapo_rewrite.source.index import SourceFile

Causes = tuple[Directive, ...]


@dataclass(frozen=True)
class Line:
    """A new statement.

    Attributes:
        text: The statement.
        causes: The directives that ask for it.
        why: What happens there, in a few words.
        once: Whether a subclass's constructor leaves it to that of its base: no size is cut twice.
    """

    text: str
    causes: Causes
    why: str
    once: bool = False


@dataclass
class Lines:
    """What changes around one statement: nodes of it, and whole lines before or after it.

    Attributes:
        inside: Edits of the statement itself, with their causes and why.
        before: Statements before it.
        after: Statements after it.
        around: Text that changes around it.
        again: Whether a subclass repeats it although nothing in it changes.
    """

    inside: list[tuple[Edit, Causes, str]] = field(default_factory=list)
    before: list[Line] = field(default_factory=list)
    after: list[Line] = field(default_factory=list)
    around: list[TextEdit] = field(default_factory=list)
    again: bool = False

    def causes(self) -> Causes:
        """The directives behind what changes in the statement itself."""
        return merged_causes(*(causes for _, causes, _ in self.inside))


def changed(file: SourceFile, lines: Mapping[ast.stmt, Lines]) -> dict[ast.stmt, Written]:
    """What statements become in which something changes."""
    inside = {s: [edit for edit, _, _ in c.inside] for s, c in lines.items() if c.inside}
    return edited(file, inside) if inside else {}


def written(file: SourceFile, lines: Mapping[ast.stmt, Lines], line_length: int) -> list[TextEdit]:
    """The edits of the file that carry out what changes around its statements."""
    edits = []
    anew = changed(file, lines)
    for statement, change in lines.items():
        start, end = file.span(statement)
        indent = statement.col_offset
        pad = "\n" + " " * indent
        edits += change.around
        if statement in anew:
            first, last, text = anew[statement]
            if last == end:  # not a header alone
                text = fitted(text, indent, line_length)
            why = "; ".join(dict.fromkeys(why for _, _, why in change.inside))
            edits.append(TextEdit(first, last, text, change.causes(), why))
        # Lines of one cause stand together in one edit.
        for line in change.before:
            text = fitted(line.text, indent, line_length) + pad
            edits.append(TextEdit(start, start, text, line.causes, line.why))
        for line in change.after:
            place = past_comment(file, end)
            text = pad + fitted(line.text, indent, line_length)
            edits.append(TextEdit(place, place, text, line.causes, line.why))
    return edits


def past_comment(file: SourceFile, position: int) -> int:
    """Past a comment that stands behind a position on its line."""
    line_end = file.text.find("\n", position)
    rest = file.text[position : line_end if line_end >= 0 else None]
    return position + len(rest.rstrip()) if rest.strip().startswith("#") else position
