"""Statements that follow one another in a block: their text, and what is put in their place.

Text is given and taken as it reads at column 0; where it goes, it is indented, and laid out anew
where a line would be too long.
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
    """Statements that follow one another in a block."""

    file: SourceFile
    statements: tuple[ast.stmt, ...]
    start: int  # where their text begins: with the first, or with the comments above it
    end: int  # where it ends, the comment behind the last one included

    @classmethod
    def of(cls, file: SourceFile, statements: Sequence[ast.stmt]) -> Run:
        """The statements alone, with the comment behind the last one."""
        start, end = file.span(statements[0])[0], file.span(statements[-1])[1]
        return cls(file, tuple(statements), start, past_comment(file, end))

    @property
    def column(self) -> int:
        """Where they are indented to."""
        return self.statements[0].col_offset

    def with_comments(self) -> Run:
        """The same with the comments directly above, at the statements' own column."""
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
        """Their text, with edits of the file inside of it."""
        text, _ = apply_edits(self.file.text[self.start : self.end], moved(edits, -self.start))
        return reindented(text, self.column, 0)

    def text_with(self, texts: Mapping[ast.expr, str]) -> str:
        """Their text with expressions in the places of parts of them."""
        inside = {id(node) for statement in self.statements for node in ast.walk(statement)}
        by_statement: dict[ast.stmt, dict[ast.expr, str]] = {}
        for node, text in texts.items():
            if id(node) in inside:
                by_statement.setdefault(self.file.statement_of(node), {})[node] = text
        written = {s: substituted(self.file, s, own) for s, own in by_statement.items()}
        return self.text([Edit.instead_of(self.file, s, text) for s, text in written.items()])

    def replaced(self, text: str) -> Edit:
        """Statements in their place."""
        return Edit(self.start, self.end, at_column(text, self.column, self.file.line_length))


def compound(*parts: str) -> str:
    """A compound statement: its headers, each with the statements below it.

    `compound("if a:", "x = 1", "else:", "x = 2")`
    """
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return "\n".join(f"{header}\n    {reindented(body, 0, 4)}" for header, body in pairs)


def or_else(file: SourceFile, branch: ast.If, text: str) -> Edit:
    """A branch above another, which is taken where the first one is not: `elif`."""
    start, column = file.span(branch)[0], branch.col_offset
    above = at_column(text, column, file.line_length)
    return Edit(start, start, f"{above}\n{' ' * column}el")


def in_else(file: SourceFile, branch: ast.If, text: str, opened: bool = False) -> Edit:
    """A statement in the `else` that a branch gets; in one that it has got if that is `opened`."""
    end, pad = past_comment(file, file.span(branch)[1]), "\n" + " " * branch.col_offset
    inner = formatted(text, branch.col_offset + 4, file.line_length)
    return Edit(end, end, f"{'' if opened else f'{pad}else:'}{pad}    {inner}")


def definition_text(file: SourceFile, definition: ast.FunctionDef, edits: Sequence[Edit]) -> str:
    """A definition with its decorators as it stands in the file, with edits of the file in it."""
    decorators = definition.decorator_list
    start = file.span(decorators[0])[0] - 1 if decorators else file.span(definition)[0]
    end = file.span(definition)[1]
    text, _ = apply_edits(file.text[start:end], moved(edits, -start))
    return " " * definition.col_offset + text


def header_text(file: SourceFile, definition: ast.FunctionDef) -> str:
    """A method as it stands in the file, up to the colon before its body, of a class at the margin.

    A class may stand in a branch.
    """
    end = file.offset(definition.body[0].lineno, 0)
    header = file.text[file.span(definition)[0] : end].rstrip()
    # Comments between the header and the body do not belong to it.
    while header.rsplit("\n", 1)[-1].lstrip().startswith("#"):
        header = header.rsplit("\n", 1)[0].rstrip()
    return " " * 4 + reindented(f"{header} ...", definition.col_offset, 4).removesuffix(" ...")


def behind(file: SourceFile, definition: ast.stmt, text: str, gap: int) -> Edit:
    """A definition behind another of the same block, parted by so many blank lines."""
    end = past_comment(file, file.span(definition)[1])
    pad = " " * definition.col_offset
    body = pad + reindented(text.strip("\n"), 0, definition.col_offset)
    return Edit(end, end, "\n" * (gap + 1) + body)


def apart(file: SourceFile, definition: ast.stmt, gap: int) -> list[Edit]:
    """The blank lines that what follows a definition lacks, where a new one stands between them."""
    end = past_comment(file, file.span(definition)[1])
    rest = file.text[end:]
    following = rest.lstrip()
    start = end + rest.rfind("\n", 0, len(rest) - len(following)) + 1
    lines = rest[: start - end].count("\n")
    if not following or lines > gap:
        return []
    return [Edit(start, start, "\n" * (gap + 1 - lines))]


def above(file: SourceFile, definition: ast.stmt, text: str) -> Edit:
    """A definition at module level above another, its decorators and its comments."""
    start = file.offset(comments_above(file, first_line(definition)), 0)
    return Edit(start, start, text.rstrip("\n") + "\n\n\n")


def without_decorator(file: SourceFile, decorator: ast.expr) -> Edit:
    """A decorator gone with its lines, of which a comment behind it is a part."""
    start = file.offset(decorator.lineno, 0)
    return Edit(start, file.offset((decorator.end_lineno or decorator.lineno) + 1, 0), "")


def comments_above(file: SourceFile, line: int) -> int:
    """The first of the lines of comments right above a line; the line itself without any."""
    while file.line(line - 1).lstrip().startswith("#"):
        line -= 1
    return line


def comments_before(file: SourceFile, node: ast.stmt) -> list[str]:
    """The comments on the lines before a statement."""
    return [file.line(n).strip() for n in range(comments_above(file, node.lineno), node.lineno)]


def comment_after(file: SourceFile, node: ast.AST) -> str:
    """The comment behind a statement, or an argument that is the last on its line."""
    _, end = file.span(node)
    rest = file.text[end:].partition("\n")[0].strip().removeprefix(",").strip()
    return f"  {rest}" if rest.startswith("#") else ""


def past_comment(file: SourceFile, position: int) -> int:
    """Past a comment that stands behind a position on its line."""
    line_end = file.text.find("\n", position)
    rest = file.text[position : line_end if line_end >= 0 else None]
    return position + len(rest.rstrip()) if rest.strip().startswith("#") else position
