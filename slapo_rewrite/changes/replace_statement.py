"""A statement of a method written otherwise: parts of it, lines around it, or none of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.places import Place
from slapo_rewrite.code.edit import Edit
from slapo_rewrite.code.lines import Line, Lines
from slapo_rewrite.code.splice import Edit as TextEdit
from slapo_rewrite.directive import Causes


@dataclass(frozen=True)
class ReplaceStatement(Change):
    """In a method: a statement, or what is around it, written otherwise."""

    statement: ast.stmt
    what: str  # what the new text is, in a word
    edits: tuple[Edit, ...] = ()  # what changes in it
    before: tuple[str, ...] = ()  # statements to stand before it
    after: tuple[str, ...] = ()  # statements to stand behind it
    gone: bool = False  # whether it is taken away
    # Whether comments of what goes are elsewhere then; they stay above it otherwise.
    moved: bool = False
    # Text in the place of statements from this one on, or beside it.
    splices: tuple[TextEdit, ...] = ()

    prefix = "Fused"
    is_parallel = False

    def joined(self, other: ReplaceStatement) -> ReplaceStatement:
        """What both of them change."""
        what = ", ".join(dict.fromkeys([self.what, other.what]))
        return ReplaceStatement(
            self.statement,
            what,
            self.edits + other.edits,
            self.before + other.before,
            self.after + other.after,
            self.gone or other.gone,
            self.moved and other.moved,
            self.splices + other.splices,
        )

    def write_at(self, text: ClassText, place: Place) -> None:
        """Puts it there."""
        self.add_to(text.at(self.statement), text.causes)

    def add_to(self, lines: Lines, causes: Causes) -> None:
        """Adds what changes to what else changes around the statement."""
        why = f"`{self.what}`"
        lines.inside += [(edit, causes, why) for edit in self.edits]
        lines.before += [Line(text, causes, why) for text in self.before]
        lines.after += [Line(text, causes, why) for text in self.after]
        lines.around += [splice.caused_by(causes, why) for splice in self.splices]
        lines.moved = self.moved
        if self.gone:
            lines.gone = (causes, why)
