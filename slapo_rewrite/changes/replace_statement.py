"""A statement of a method written otherwise, as its text says."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from slapo_rewrite.changes.change import Asked, Change
from slapo_rewrite.changes.class_text import ClassText


@dataclass(frozen=True)
class ReplaceStatement(Change):
    """In a method: a statement, or what is around it, written otherwise.

    Attributes:
        statement: The statement.
        edits: From where to where in the file, and what stands there then.
        what: What the new text is, in a word.
        after: A statement to stand behind it.
    """

    statement: ast.stmt
    edits: tuple[tuple[int, int, str], ...]
    what: str
    after: str = ""

    prefix = "Fused"
    is_parallel = False

    def write(self, text: ClassText, here: Sequence[Asked]) -> None:
        """Puts the text there."""
        (asked,) = here
        why = f"`{self.what}`"
        for start, end, written in self.edits:
            text.splice(self.statement, start, end, written, asked.causes, why)
        if self.after:
            text.insert_after(self.statement, self.after, asked.causes, why)
