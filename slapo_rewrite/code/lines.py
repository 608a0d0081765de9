"""Collects the changes in and around a statement, and turns them into edits."""

from __future__ import annotations

import ast
import io
import itertools
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from slapo_rewrite import errors
from slapo_rewrite.code.edit import Edit, Written, edited
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.layout import fitted
from slapo_rewrite.code.runs import comments_above, past_comment
from slapo_rewrite.code.sinking import is_alone
from slapo_rewrite.code.splice import Edit as TextEdit
from slapo_rewrite.directive import Causes, merged_causes

PARTED = "a separate line for each statement"


@dataclass(frozen=True)
class Line:
    """A new statement."""

    text: str  # the statement
    causes: Causes  # the directives that ask for it
    why: str  # the reason, in a few words
    # Whether a subclass's constructor leaves it to its base's: no size may be divided twice.
    once: bool = False
    # The tests under which it stands: a subclass's constructor repeats them.
    tests: tuple[ast.expr, ...] = ()


@dataclass
class Lines:
    """The changes of one statement: edits of its nodes, and lines before or after it."""

    # Edits of the statement itself, with their causes and why.
    inside: list[tuple[Edit, Causes, str]] = field(default_factory=list)
    before: list[Line] = field(default_factory=list)  # statements before it
    after: list[Line] = field(default_factory=list)  # statements after it
    # Text edits around it, with their causes and why.
    around: list[TextEdit] = field(default_factory=list)
    gone: tuple[Causes, str] | None = None  # if the statement is removed, the causes and why
    moved: bool = True  # whether its comments are moved elsewhere when it is removed
    again: bool = False  # whether a subclass repeats it although it has no edits

    def causes(self) -> Causes:
        """The directives behind edits of the statement itself."""
        return merged_causes(*(causes for _, causes, _ in self.inside))


def changed(file: SourceFile, lines: Mapping[ast.stmt, Lines]) -> dict[ast.stmt, Written]:
    """The new texts of statements with edits."""
    inside = {s: [edit for edit, _, _ in c.inside] for s, c in lines.items() if c.inside}
    return edited(file, inside) if inside else {}


def written(file: SourceFile, lines: Mapping[ast.stmt, Lines]) -> list[TextEdit]:
    """The text edits of the file for the changes of its statements."""
    edits = list(removals(file, {s: c for s, c in lines.items() if c.gone}))
    anew = changed(file, {s: c for s, c in lines.items() if not c.gone})
    parted: dict[tuple[int, int], TextEdit] = {}
    for statement, change in lines.items():
        start, end = file.span(statement)
        indent = statement.col_offset
        new = [line.causes for line in (*change.before, *change.after)]
        if new or (statement in anew and _is_crowded(file, statement, anew)):
            indent, breaks = _on_own_lines(file, statement)
            causes = merged_causes(*(new or [change.causes()]))
            for each in breaks:
                parted.setdefault((each.start, each.end), each.caused_by(causes, PARTED))
        pad = "\n" + " " * indent
        for edit in change.around:
            _check_alone(file, statement, edit.causes)
            edits.append(edit)
        # A line before a statement with edits for the same reason is one change with these.
        own = change.causes(), "; ".join(dict.fromkeys(why for _, _, why in change.inside))
        above = ""
        for line in change.before:
            text = fitted(line.text, indent, file.line_length) + pad
            if statement in anew and (line.causes, line.why) == own:
                above += text
            else:
                edits.append(TextEdit(start, start, text, line.causes, line.why))
        if statement in anew:
            first, last, text = anew[statement]
            if last == end:  # not just a header
                comment = file.text[end : past_comment(file, end)]
                text = fitted(text, indent, file.line_length, comment, file.text[first:last])
            lost = [] if change.moved else comments(file.text[first:last])
            lost = [f"{comment}{pad}" for comment in lost if comment not in text]
            edits.append(TextEdit(first, last, "".join([*lost, above, text]), *own))
        for line in change.after:
            place = past_comment(file, end)
            text = pad + fitted(line.text, indent, file.line_length)
            edits.append(TextEdit(place, place, text, line.causes, line.why))
    return [*edits, *parted.values()]


def _beside(file: SourceFile, statement: ast.stmt) -> list[ast.stmt]:
    """The statements of a block that share lines with a statement, itself included."""
    block = file.block_of(statement)
    first = last = block.index(statement)
    while first and block[first - 1].end_lineno == block[first].lineno:
        first -= 1
    while last + 1 < len(block) and block[last].end_lineno == block[last + 1].lineno:
        last += 1
    return block[first : last + 1]


def _is_crowded(file: SourceFile, statement: ast.stmt, anew: Mapping[ast.stmt, Written]) -> bool:
    """Whether statements that share a line no longer fit it after their edits."""
    beside = _beside(file, statement)
    texts = [anew[s][2] if s in anew else file.segment(s) for s in beside]
    width = beside[0].col_offset + len("; ".join(texts))
    return len(beside) > 1 and width > file.line_length


def _on_own_lines(file: SourceFile, statement: ast.stmt) -> tuple[int, list[TextEdit]]:
    """Moves a statement to lines of its own: its column there, and the line breaks for that.

    It may share its lines with other statements, and with the header of their block.
    """
    if is_alone(file, statement):
        return statement.col_offset, []
    above = next((o for _, o in file.around(statement) if isinstance(o, ast.stmt)), None)
    beside = _beside(file, statement)
    group = [file.span(each) for each in beside]
    line = file.offset(beside[0].lineno, 0)
    lead = file.text[line : group[0][0]]
    column, breaks = len(lead), []
    if above is not None and (header := lead.strip()):
        # The last line of a header of several lines has another indentation.
        column = 4 + (lead.index(header) if header.startswith("case") else above.col_offset)
        breaks.append((line + len(lead.rstrip()), group[0][0]))
    breaks += [(end, start) for (_, end), (start, _) in itertools.pairwise(group)]
    return column, [TextEdit(*place, "\n" + " " * column) for place in breaks]


def removals(file: SourceFile, lines: Mapping[ast.stmt, Lines]) -> Iterator[TextEdit]:
    """Removes statements with their lines.

    Comments on these stay, unless they are moved; then those above are removed as well. A blank
    line after them is removed if it would separate nothing.
    """
    ends: dict[int, TextEdit] = {}
    for statement in sorted(lines, key=file.span):
        gone = lines[statement].gone
        assert gone is not None
        causes, why = gone
        _check_alone(file, statement, causes)
        first, stop = _lines_of(file, statement)
        indent = file.text[first : file.span(statement)[0]]
        kept = "".join(f"{indent}{comment}\n" for comment in comments(file.text[first:stop]))
        if lines[statement].moved:
            kept, first = "", file.offset(comments_above(file, statement.lineno), 0)
        above = kept or _text_above(file.text, first, ends)
        is_blank = not file.text[stop + 1 :].partition("\n")[0].strip()
        if is_blank and _idle_after(above, file.text[stop:]):
            stop = file.text.find("\n", stop + 1)
        edit = TextEdit(first, stop + 1, kept, causes, why)
        ends[edit.end] = edit
        yield edit


def _lines_of(file: SourceFile, statement: ast.stmt) -> tuple[int, int]:
    """The offsets of the beginning and end of a statement's lines."""
    start, end = file.span(statement)
    stop = file.text.find("\n", end)
    return file.text.rfind("\n", 0, start) + 1, len(file.text) if stop < 0 else stop


def _check_alone(file: SourceFile, statement: ast.stmt, causes: Causes) -> None:
    """Raises if a statement to be removed or replaced shares its lines with others."""
    if not is_alone(file, statement):
        raise errors.Unsupported(
            "a statement that changes as a whole shares its line with another",
            at=file.at(statement),
            cause=causes,
            hint="write each statement on a separate line",
        )


def _text_above(text: str, first: int, ends: Mapping[int, TextEdit]) -> str:
    """The text above a line after the edits."""
    while (edit := ends.get(first)) is not None:
        if edit.text:
            return edit.text
        first = edit.start
    return text[:first]


def _idle_after(above: str, below: str) -> bool:
    """Whether a blank line between two texts is superfluous.

    It is if there is one already, at the beginning of a body, or after a comment on the second.
    """
    line = above.removesuffix("\n").rpartition("\n")[2].strip()
    if line.startswith("#"):
        return not below.lstrip().startswith("#")
    return not line or line.endswith(":")


def comments(text: str) -> list[str]:
    """The comments in some lines of source, in order."""
    if "#" not in text:
        return []
    source = textwrap.dedent(text) + "\n"
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            found += [token.string] if token.type == tokenize.COMMENT else []
    except (tokenize.TokenError, IndentationError):
        pass  # the text is part of an expression; all comments before its end were found
    return found
