"""Writes expressions in the places of matches: statements that are no more needed go."""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.changes.splice import Edit, apply_edits
from slapo_rewrite.code.build import parenthesised
from slapo_rewrite.code.layout import formatted
from slapo_rewrite.directive import Directive
from slapo_rewrite.patterns.standing import Replaced
from slapo_rewrite.source.index import SourceFile

_ALONE = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.keyword, ast.Tuple, ast.List)


@dataclass(frozen=True)
class Writing:
    """An expression in the place of a match.

    Attributes:
        replaced: What it takes the place of.
        statement: The statement of that.
        text: The expression.
        cause: The directive that asks for it.
        why: What happens there, in a few words.
        moved: Whether what was there goes elsewhere, with its comments.
    """

    replaced: Replaced
    statement: ast.stmt
    text: str
    cause: Directive
    why: str
    moved: bool = False


def place_edits(
    file: SourceFile, writings: Sequence[Writing], line_length: int
) -> dict[ast.stmt, list[Edit]]:
    """The edits that put expressions in the places of matches, by statement.

    Args:
        file: The file of the matches.
        writings: The expressions; no two take the place of the same text.
        line_length: The file's own.

    Raises:
        Unsupported: A statement that is to go shares its line with another.
    """
    by_statement: dict[ast.stmt, list[Writing]] = {}
    for writing in writings:
        by_statement.setdefault(writing.statement, []).append(writing)
    edits = {s: list(_changed(file, s, here, line_length)) for s, here in by_statement.items()}
    for writing in writings:
        for node, name in _reads(file, writing, inside=False):
            edits[file.statement_of(node)] = [
                Edit(*file.span(node), name, (writing.cause,), writing.why)
            ]
    gone = {s: writing for writing in writings for s in writing.replaced.removed}
    ends: dict[int, Edit] = {}
    for statement in sorted(gone, key=lambda s: file.span(s)):
        writing = gone[statement]
        edit = removed(file, statement, writing.cause, writing.why, writing.moved, ends)
        edits[statement], ends[edit.end] = [edit], edit
    return edits


def _changed(
    file: SourceFile, statement: ast.stmt, writings: list[Writing], line_length: int
) -> Iterator[Edit]:
    """The edits of one statement that holds results of matches."""
    causes = tuple(dict.fromkeys(w.cause for w in writings))
    why = ", ".join(dict.fromkeys(w.why for w in writings))
    start, end = file.span(statement)
    inner: list[Edit] = []
    comments: list[str] = []
    lead: list[str] = []
    indent = _column(file, start)
    for writing in writings:
        for node, name in _reads(file, writing, inside=True):
            begin, stop = file.span(node)
            inner.append(Edit(begin - start, stop - start, name, (), why))
        if writing.replaced.above:
            text = writing.replaced.target + writing.text
            lead.append(formatted(text, indent, line_length))
            continue
        begin, stop, text = _expression(file, statement, writing)
        inner.append(Edit(begin - start, stop - start, text, (), why))
        if not writing.moved:
            comments += [c for c in _comments(file.text[begin:stop]) if c not in text]
    if hasattr(statement, "body") and not isinstance(writings[0].replaced.node, ast.stmt):
        yield from (Edit(e.start + start, e.end + start, e.text, causes, why) for e in inner)
        return
    text, _ = apply_edits(file.text[start:end], inner)
    lines = text.splitlines()
    if len(lines) > 1 or indent + len(lines[0]) > line_length:
        text = formatted(text, indent, line_length)
    above = "".join(f"{line}\n{' ' * indent}" for line in (*comments, *lead))
    yield Edit(start, end, above + text, causes, why)


def _reads(file: SourceFile, writing: Writing, *, inside: bool) -> Iterator[tuple[ast.AST, str]]:
    """The expressions that become names of results, in the statement of the call or elsewhere."""
    start, end = file.span(writing.statement)
    for node, name in writing.replaced.reads:
        begin, stop = file.span(node)
        if (start <= begin and stop <= end) is inside:
            yield node, name


def _expression(file: SourceFile, statement: ast.stmt, writing: Writing) -> tuple[int, int, str]:
    """What is replaced, from where to where, and by what."""
    node = writing.replaced.node
    begin, end = file.span(node)
    if isinstance(node, ast.stmt):
        return begin, end, writing.replaced.target + writing.text
    parent = next(
        (p for p in ast.walk(statement) if any(c is node for c in ast.iter_child_nodes(p))), None
    )
    called = isinstance(parent, ast.Call) and node is not parent.func
    if not called:  # parentheses around the old expression would be idle
        begin, end = _with_parentheses(file.text, begin, end)
    text = writing.text
    if not (called or isinstance(parent, _ALONE)):
        text = parenthesised(text)
    return begin, end, text


def _with_parentheses(text: str, begin: int, end: int) -> tuple[int, int]:
    while True:
        left, right = text[:begin].rstrip(), text[end:]
        after = len(right) - len(right.lstrip())
        if not (left.endswith("(") and right.lstrip().startswith(")")):
            return begin, end
        before = left[:-1].rstrip(" ")
        if before and (before[-1].isalnum() or before[-1] in "_)]"):
            word = before.split()[-1].rpartition("\n")[2]
            if word not in ("return", "in", "and", "or", "not", "is", "if", "else", "yield"):
                return begin, end  # the parentheses of a call
        begin, end = len(left) - 1, end + after + 1


def removed(
    file: SourceFile,
    statement: ast.stmt,
    cause: Directive,
    why: str,
    moved: bool = False,
    ends: Mapping[int, Edit] | None = None,
) -> Edit:
    """A statement gone with its lines; the comments on them stay, unless they go with it.

    A blank line after it goes where none parts anything from anything then.

    Args:
        file: The file.
        statement: The statement.
        cause: Who asks.
        why: What happens there.
        moved: Whether the comments go with it, those above it as well.
        ends: The edits that take away statements before it, by their ends.

    Raises:
        Unsupported: It shares its line with another.
    """
    start, end = file.span(statement)
    first = file.text.rfind("\n", 0, start) + 1
    stop = file.text.find("\n", end)
    stop = len(file.text) if stop < 0 else stop
    rest = file.text[end:stop].strip()
    if file.text[first:start].strip() or (rest and not rest.startswith("#")):
        raise errors.Unsupported(
            "a statement that has to go shares its line with another",
            at=file.at(statement),
            cause=cause,
            hint="give each statement a line of its own",
        )
    indent = file.text[first:start]
    kept = "".join(f"{indent}{comment}\n" for comment in _comments(file.text[first:stop]))
    if moved:
        kept, first = "", _above(file.text, first)
    above = kept or _text_above(file.text, first, ends or {})
    if _blank_after(file.text, stop) and _idle_after(above, file.text[stop:]):
        stop = file.text.find("\n", stop + 1)
    return Edit(first, stop + 1, kept, (cause,), why)


def _above(text: str, first: int) -> int:
    """Where the comments above a line begin."""
    while text[:first].removesuffix("\n").rpartition("\n")[2].lstrip().startswith("#"):
        first = text[:first].removesuffix("\n").rfind("\n") + 1
    return first


def _text_above(text: str, first: int, ends: Mapping[int, Edit]) -> str:
    """What stands above a line when the edits are made."""
    while (edit := ends.get(first)) is not None:
        if edit.text:
            return edit.text
        first = edit.start
    return text[:first]


def _idle_after(above: str, below: str) -> bool:
    """Whether a blank line between two texts is none that one would write.

    There is one already, a body begins, or a comment ends the first, which is then on the second.
    """
    line = above.removesuffix("\n").rpartition("\n")[2].strip()
    if line.startswith("#"):
        return not below.lstrip().startswith("#")
    return not line or line.endswith(":")


def _blank_after(text: str, stop: int) -> bool:
    return not text[stop + 1 :].partition("\n")[0].strip()


def _comments(text: str) -> list[str]:
    """The comments in some lines of source, in order."""
    if "#" not in text:
        return []
    source = textwrap.dedent(text) + "\n"
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            found += [token.string] if token.type == tokenize.COMMENT else []
    except (tokenize.TokenError, IndentationError):
        pass  # part of an expression: what was found up to its end is all
    return found


def _column(file: SourceFile, start: int) -> int:
    return start - file.text.rfind("\n", 0, start) - 1
