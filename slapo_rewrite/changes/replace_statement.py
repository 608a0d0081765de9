"""Changes of a statement: edits in it, lines around it, or its removal."""

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
    """In a method: changes in and around a statement."""

    statement: ast.stmt
    what: str  # the name of the new text, in a word
    edits: tuple[Edit, ...] = ()  # edits in it
    before: tuple[str, ...] = ()  # statements to insert before it
    after: tuple[str, ...] = ()  # statements to insert after it
    gone: bool = False  # whether it is removed
    # Whether its comments move elsewhere when it is removed; otherwise they stay.
    moved: bool = False
    # Text edits that replace statements from this one on, or insert beside it.
    splices: tuple[TextEdit, ...] = ()

    prefix = "Fused"
    is_parallel = False

    def joined(self, other: ReplaceStatement) -> ReplaceStatement:
        """Both changes as one."""
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
        """Adds the changes to the class's text."""
        self.add_to(text.at(self.statement), text.causes)

    def add_to(self, lines: Lines, causes: Causes) -> None:
        """Adds the changes to the others of the statement."""
        why = f"`{self.what}`"
        lines.inside += [(edit, causes, why) for edit in self.edits]
        lines.before += [Line(text, causes, why) for text in self.before]
        lines.after += [Line(text, causes, why) for text in self.after]
        lines.around += [splice.caused_by(causes, why) for splice in self.splices]
        lines.moved = self.moved
        if self.gone:
            lines.gone = (causes, why)
