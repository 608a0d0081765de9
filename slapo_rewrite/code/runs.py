"""Runs of consecutive statements: their text, and edits that replace or extend them.

Texts are passed and returned at column 0. An edit indents its text, and formats it if a line would
be too long.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slapo_rewrite.code.blocks import first_line
from slapo_rewrite.code.build import reindented
from slapo_rewrite.code.edit import substituted
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.layout import at_column, formatted
from slapo_rewrite.code.splice import Edit, apply_edits, moved


@dataclass(frozen=True)
class Run:
    """Consecutive statements of a block."""

    file: SourceFile
    statements: tuple[ast.stmt, ...]
    start: int  # the offset of the first statement, or of the comments above it
    end: int  # the offset of the end, after a comment behind the last statement

    @classmethod
    def of(cls, file: SourceFile, statements: Sequence[ast.stmt]) -> Run:
        """The run without comments above it, with the comment behind the last statement."""
        start, end = file.span(statements[0])[0], file.span(statements[-1])[1]
        return cls(file, tuple(statements), start, past_comment(file, end))

    @property
    def column(self) -> int:
        """The statements' column."""
        return self.statements[0].col_offset

    def with_comments(self) -> Run:
        """The run with the comments directly above it, at the same column."""
        file, start = self.file, self.start
        line = self.statements[0].lineno - 1
        while (text := file.line(line)).lstrip().startswith("#"):
            indent = len(text) - len(text.lstrip())
            if indent != self.column:
                break
            start = file.offset(line, 0) + indent
            line -= 1
        return replace(self, start=start)

    def text(self, edits: Sequence[Edit] = ()) -> str:
        """The text at column 0, with edits of the file applied."""
        text, _ = apply_edits(self.file.text[self.start : self.end], moved(edits, -self.start))
        return reindented(text, self.column, 0)

    def text_with(self, texts: Mapping[ast.expr, str]) -> str:
        """The text with some expressions replaced."""
        inside = {id(node) for statement in self.statements for node in ast.walk(statement)}
        by_statement: dict[ast.stmt, dict[ast.expr, str]] = {}
        for node, text in texts.items():
            if id(node) in inside:
                by_statement.setdefault(self.file.statement_of(node), {})[node] = text
        written = {s: substituted(self.file, s, own) for s, own in by_statement.items()}
        return self.text([Edit.instead_of(self.file, s, text) for s, text in written.items()])

    def replaced(self, text: str) -> Edit:
        """Replaces the statements by a text."""
        return Edit(self.start, self.end, at_column(text, self.column, self.file.line_length))


def compound(*parts: str) -> str:
    """A compound statement of headers, each followed by its body.

    Example: `compound("if a:", "x = 1", "else:", "x = 2")`.
    """
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return "\n".join(f"{header}\n    {reindented(body, 0, 4)}" for header, body in pairs)


def or_else(file: SourceFile, branch: ast.If, text: str) -> Edit:
    """Inserts a branch before another, which becomes its `elif`."""
    start, column = file.span(branch)[0], branch.col_offset
    above = at_column(text, column, file.line_length)
    return Edit(start, start, f"{above}\n{' ' * column}el")


def in_else(file: SourceFile, branch: ast.If, text: str, opened: bool = False) -> Edit:
    """Adds an `else` with a statement to a branch; only the statement if the `else` is `opened`."""
    end, pad = past_comment(file, file.span(branch)[1]), "\n" + " " * branch.col_offset
    inner = formatted(text, branch.col_offset + 4, file.line_length)
    return Edit(end, end, f"{'' if opened else f'{pad}else:'}{pad}    {inner}")


def definition_text(file: SourceFile, definition: ast.FunctionDef, edits: Sequence[Edit]) -> str:
    """The text of a definition with its decorators, with edits of the file applied."""
    decorators = definition.decorator_list
    start = file.span(decorators[0])[0] - 1 if decorators else file.span(definition)[0]
    end = file.span(definition)[1]
    text, _ = apply_edits(file.text[start:end], moved(edits, -start))
    return " " * definition.col_offset + text


def header_text(file: SourceFile, definition: ast.FunctionDef) -> str:
    """The header of a method, up to the colon, for a class at column 0.

    The original class may be indented, inside a branch.
    """
    end = file.offset(definition.body[0].lineno, 0)
    header = file.text[file.span(definition)[0] : end].rstrip()
    # Comments between the header and the body do not belong to it.
    while header.rsplit("\n", 1)[-1].lstrip().startswith("#"):
        header = header.rsplit("\n", 1)[0].rstrip()
    return " " * 4 + reindented(f"{header} ...", definition.col_offset, 4).removesuffix(" ...")


def behind(file: SourceFile, definition: ast.stmt, text: str, gap: int) -> Edit:
    """Inserts a definition after another of the same block, with `gap` blank lines between them."""
    end = past_comment(file, file.span(definition)[1])
    pad = " " * definition.col_offset
    body = pad + reindented(text.strip("\n"), 0, definition.col_offset)
    return Edit(end, end, "\n" * (gap + 1) + body)


def apart(file: SourceFile, definition: ast.stmt, gap: int) -> list[Edit]:
    """Inserts blank lines missing after a definition, if a new one is inserted behind it."""
    end = past_comment(file, file.span(definition)[1])
    rest = file.text[end:]
    following = rest.lstrip()
    start = end + rest.rfind("\n", 0, len(rest) - len(following)) + 1
    lines = rest[: start - end].count("\n")
    if not following or lines > gap:
        return []
    return [Edit(start, start, "\n" * (gap + 1 - lines))]


def above(file: SourceFile, definition: ast.stmt, text: str) -> Edit:
    """Inserts a definition at module level above another, its decorators and its comments."""
    start = file.offset(comments_above(file, first_line(definition)), 0)
    return Edit(start, start, text.rstrip("\n") + "\n\n\n")


def without_decorator(file: SourceFile, decorator: ast.expr) -> Edit:
    """Removes a decorator with its lines, including a comment behind it."""
    start = file.offset(decorator.lineno, 0)
    return Edit(start, file.offset((decorator.end_lineno or decorator.lineno) + 1, 0), "")


def comments_above(file: SourceFile, line: int) -> int:
    """The first line of the comments right above a line; the line itself if there are none."""
    while file.line(line - 1).lstrip().startswith("#"):
        line -= 1
    return line


def comments_before(file: SourceFile, node: ast.stmt) -> list[str]:
    """The comments on the lines before a statement."""
    return [file.line(n).strip() for n in range(comments_above(file, node.lineno), node.lineno)]


def comment_after(file: SourceFile, node: ast.AST) -> str:
    """The comment behind a statement, or behind the last argument on a line."""
    _, end = file.span(node)
    rest = file.text[end:].partition("\n")[0].strip().removeprefix(",").strip()
    return f"  {rest}" if rest.startswith("#") else ""


def past_comment(file: SourceFile, position: int) -> int:
    """The position after a comment that follows on the same line; the position itself without."""
    line_end = file.text.find("\n", position)
    rest = file.text[position : line_end if line_end >= 0 else None]
    return position + len(rest.rstrip()) if rest.strip().startswith("#") else position
