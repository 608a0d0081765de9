"""Sinks statements around a branch into its arms."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from slapo_rewrite.code.build import reindented
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.runs import comments_above
from slapo_rewrite.code.splice import Edit

_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Sunk:
    """Statements around a branch to be moved into its arms."""

    file: SourceFile
    branch: ast.If
    before: Sequence[ast.stmt]  # the statements directly above it
    after: Sequence[ast.stmt]  # the statements directly below it

    def edits(self) -> list[Edit]:
        """The edits of the file, in order."""
        found = [self._gone(s) for s in (self.before, self.after) if s]
        for arm in (self.branch.body, self.branch.orelse):
            after = "" if arm and leaves(arm) else self._below(arm)
            if arm:
                first, last = self._ends(arm)
                found += [
                    Edit(at, at, t) for at, t in ((first, self._text(self.before)), (last, after))
                ]
            else:
                end = self._line_end(self.branch)
                head = " " * self.branch.col_offset + "else:\n"
                found.append(Edit(end, end, head + self._text(self.before) + after))
        return sorted(found, key=lambda placed: (placed.start, placed.end))

    def _gone(self, statements: Sequence[ast.stmt]) -> Edit:
        """Removes the lines of statements, and a blank line that would separate nothing."""
        first, last = self._lines(statements)
        if not self.file.line(first - 1).strip() and not self.file.line(last + 1).strip():
            last += 1
        return Edit(self.file.offset(first, 0), self.file.offset(last + 1, 0), "")

    def _lines(self, statements: Sequence[ast.stmt]) -> tuple[int, int]:
        """The first line, with the comments above it, and the last."""
        last = statements[-1].end_lineno or statements[-1].lineno
        return comments_above(self.file, statements[0].lineno), last

    def _text(self, statements: Sequence[ast.stmt]) -> str:
        """The text of statements with their comments, for an arm."""
        if not statements:
            return ""
        first, last = self._lines(statements)
        lines = "\n".join(self.file.line(n) for n in range(first, last + 1))
        column = self.branch.body[0].col_offset
        return " " * column + reindented(lines.lstrip(), self.branch.col_offset, column) + "\n"

    def _below(self, arm: Sequence[ast.stmt]) -> str:
        """The text of the statements below, for the end of an arm."""
        text = self._text(self.after)
        end = self.branch.end_lineno or self.branch.lineno
        parted = not self.file.line(end + 1).strip()
        return f"\n{text}" if text and parted and arm else text

    def _ends(self, arm: Sequence[ast.stmt]) -> tuple[int, int]:
        """The offsets of the beginning and end of an arm's lines."""
        head = arm[0].lineno - 1
        while not self.file.line(head).partition("#")[0].rstrip().endswith(":"):
            head -= 1
        return self.file.offset(head + 1, 0), self._line_end(arm[-1])

    def _line_end(self, statement: ast.stmt) -> int:
        return self.file.offset((statement.end_lineno or statement.lineno) + 1, 0)


def leaves(block: Sequence[ast.stmt]) -> bool:
    """Whether a block never continues with the statement after it."""
    last = block[-1]
    if isinstance(last, ast.If) and last.orelse:
        return leaves(last.body) and leaves(last.orelse)
    return isinstance(last, _LEAVING)


def is_alone(file: SourceFile, statement: ast.stmt) -> bool:
    """Whether a statement shares its lines with no other."""
    start, end = file.span(statement)
    first = file.offset(statement.lineno, 0)
    last = file.offset((statement.end_lineno or statement.lineno) + 1, 0)
    rest = file.text[end:last].strip()
    return not file.text[first:start].strip() and (not rest or rest.startswith("#"))


def are_next(file: SourceFile, first: ast.stmt, second: ast.stmt) -> bool:
    """Whether two statements are on adjacent lines, without comments."""
    lines = range(first.lineno, (second.end_lineno or second.lineno) + 1)
    return second.lineno == (first.end_lineno or first.lineno) + 1 and not any(
        "#" in file.line(number) for number in lines
    )
