"""Sinks statements that stand around a branch into its arms."""

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
    """Statements around a branch that are to stand in its arms."""

    file: SourceFile
    branch: ast.If
    before: Sequence[ast.stmt]  # what stands above it, without gaps
    after: Sequence[ast.stmt]  # what stands below it, without gaps

    def edits(self) -> list[Edit]:
        """What changes in the file for that, in order."""
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
        """The lines of statements, and a blank line that would part nothing then."""
        first, last = self._lines(statements)
        if not self.file.line(first - 1).strip() and not self.file.line(last + 1).strip():
            last += 1
        return Edit(self.file.offset(first, 0), self.file.offset(last + 1, 0), "")

    def _lines(self, statements: Sequence[ast.stmt]) -> tuple[int, int]:
        """The first line, with the comments above it, and the last."""
        last = statements[-1].end_lineno or statements[-1].lineno
        return comments_above(self.file, statements[0].lineno), last

    def _text(self, statements: Sequence[ast.stmt]) -> str:
        """Statements with their comments, as they stand in an arm."""
        if not statements:
            return ""
        first, last = self._lines(statements)
        lines = "\n".join(self.file.line(n) for n in range(first, last + 1))
        column = self.branch.body[0].col_offset
        return " " * column + reindented(lines.lstrip(), self.branch.col_offset, column) + "\n"

    def _below(self, arm: Sequence[ast.stmt]) -> str:
        """The text of what stands below, for the end of an arm."""
        text = self._text(self.after)
        end = self.branch.end_lineno or self.branch.lineno
        parted = not self.file.line(end + 1).strip()
        return f"\n{text}" if text and parted and arm else text

    def _ends(self, arm: Sequence[ast.stmt]) -> tuple[int, int]:
        """Where the lines of an arm begin and end."""
        head = arm[0].lineno - 1
        while not self.file.line(head).partition("#")[0].rstrip().endswith(":"):
            head -= 1
        return self.file.offset(head + 1, 0), self._line_end(arm[-1])

    def _line_end(self, statement: ast.stmt) -> int:
        return self.file.offset((statement.end_lineno or statement.lineno) + 1, 0)


def leaves(block: Sequence[ast.stmt]) -> bool:
    """Whether what stands behind a block is not reached from it."""
    last = block[-1]
    if isinstance(last, ast.If) and last.orelse:
        return leaves(last.body) and leaves(last.orelse)
    return isinstance(last, _LEAVING)


def is_alone(file: SourceFile, statement: ast.stmt) -> bool:
    """Whether a statement has its lines for itself."""
    start, end = file.span(statement)
    first = file.offset(statement.lineno, 0)
    last = file.offset((statement.end_lineno or statement.lineno) + 1, 0)
    rest = file.text[end:last].strip()
    return not file.text[first:start].strip() and (not rest or rest.startswith("#"))


def are_next(file: SourceFile, first: ast.stmt, second: ast.stmt) -> bool:
    """Whether nothing stands between two statements, nor a comment on them."""
    lines = range(first.lineno, (second.end_lineno or second.lineno) + 1)
    return second.lineno == (first.end_lineno or first.lineno) + 1 and not any(
        "#" in file.line(number) for number in lines
    )
