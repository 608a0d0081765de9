"""The transform: every change of a statement, composed on libcst nodes and printed once.

What changes is decided on `ast`. An `Edit` names a node of that tree and gives what stands in its
place as a function of the libcst node there. Only the statements that hold a change are parsed
with libcst; the two trees are joined by place, and the functions are composed per node, inner ones
first. What is not touched never passes a printer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from slapo_rewrite.code.build import fitting
from slapo_rewrite.source.index import SourceFile

Span = tuple[int, int]
Found = TypeVar("Found", bound=cst.CSTNode)


@dataclass(frozen=True)
class Edit:
    """One node of a statement, written otherwise.

    Attributes:
        node: The node of the file's `ast`: an expression of the statement, or the statement.
        make: Gives what stands there, from the libcst node with what changes inside of it.
        outer: Whether it goes around what other edits make of the same node.
    """

    node: ast.expr | ast.stmt
    make: Callable[[Any], cst.CSTNode]
    outer: bool = False


class NoPlaceError(Exception):
    """No libcst node stands where a node of `ast` does."""


def edited(file: SourceFile, statement: ast.stmt, edits: Sequence[Edit]) -> tuple[int, int, str]:
    """From where to where a statement is written anew, and its text then.

    Args:
        file: The file.
        statement: One that holds all that is edited; of a compound one, its header changes.
        edits: What changes, in any order; of one node, those that are `outer` last.

    Raises:
        NoPlaceError: An edited node cannot be found, as inside an f-string.
    """
    part = _Part(file, statement)
    wanted: dict[cst.CSTNode, list[Edit]] = {}
    for edit in sorted(edits, key=lambda e: e.outer):
        wanted.setdefault(part.node_of(edit.node), []).append(edit)
    made = part.module.visit(_Transform(wanted, part.spans))
    assert not wanted, "an edit was not carried out"
    text = made.code.rstrip("\n")
    check_printed(text, made)
    start, end, text = part.start + len(part.lead), part.end, part.restored(text)
    return _trimmed(file, start, end, text) if part.header else (start, end, text)


def _trimmed(file: SourceFile, start: int, end: int, text: str) -> tuple[int, int, str]:
    """A change without the lines at its beginning and end that are as before."""
    before, after = file.text[start:end].split("\n"), text.split("\n")
    while len(before) > 1 and len(after) > 1 and before[0] == after[0]:
        start += len(before.pop(0)) + 1
        after.pop(0)
    while len(before) > 1 and len(after) > 1 and before[-1] == after[-1]:
        end -= len(before.pop()) + 1
        after.pop()
    return start, end, "\n".join(after)


def check_printed(text: str, tree: cst.Module) -> None:
    """Parses printed text back, and compares it with the tree that it comes from.

    A node in a tighter context than before needs parentheses: `return a, b` is not
    `all_reduce(a, b)`.
    """
    if not _is_same(cst.parse_module(text), tree):
        raise AssertionError(f"printed otherwise than meant: {text}")


class _Part:
    """A statement of a file as a libcst tree: all of a simple one, the header of a compound one.

    Attributes:
        module: The libcst tree.
        spans: Where its nodes stand in its text.
    """

    def __init__(self, file: SourceFile, statement: ast.stmt) -> None:
        self.file, self.statement = file, statement
        self.start, self.end = file.span(statement)
        decorators = _decorators(statement)
        if decorators:
            self.start = file.text.rindex("@", 0, file.span(decorators[0])[0])
        body: list[ast.stmt] = getattr(statement, "body", [])
        self.header = bool(body) and body[0].lineno > statement.lineno
        text = file.text[self.start : self.end]
        if self.header:
            first = min([body[0].lineno, *(d.lineno for d in _decorators(body[0]))])
            text = file.text[self.start : file.offset(first, 0)]
            self.end = self.start + len(text.rstrip())
            text += " " * (statement.col_offset + 4) + "pass"
        # An `elif` is the only statement of an `else`.
        self.chained = isinstance(statement, ast.If) and text.startswith("elif")
        if self.chained:
            text, self.start = text[2:], self.start + 2
        # What can be decorated begins more than one line, all of them indented alike.
        named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        indent = statement.col_offset if isinstance(statement, named) else 0
        self.lead = f"if True:\n{' ' * indent}" if indent else ""
        self.start -= len(self.lead)
        text = self.lead + text
        self.text = text
        self.module = cst.parse_module(text)
        self.spans = dict(_spans(self.module, text))
        self._by_span: dict[Span, cst.CSTNode] = {
            span: node for node, span in self.spans.items() if isinstance(node, cst.BaseExpression)
        }

    def node_of(self, node: ast.expr | ast.stmt) -> cst.CSTNode:
        """The libcst node at the place of one of `ast`."""
        if node is self.statement:
            tree: cst.CSTNode = self.module.body[0]
            if isinstance(tree, cst.If) and self.lead:
                tree = tree.body.body[0]
            return tree.body[0] if isinstance(tree, cst.SimpleStatementLine) else tree
        start, end = (each - self.start for each in self.file.span(node))
        found = self._by_span.get((start, end))
        while found is None and self.text[start:end][:1] == "(" and self.text[end - 1] == ")":
            # `ast` counts parentheses to tuples, and those of a call to a generator alone in it.
            inner = self.text[start + 1 : end - 1]
            start += 1 + len(inner) - len(inner.lstrip())
            end -= 1 + len(inner) - len(inner.rstrip())
            found = self._by_span.get((start, end))
        if found is None:
            raise NoPlaceError(self.file.segment(node))
        return found

    def restored(self, text: str) -> str:
        """The text as it stands in the file: without what was added to parse it."""
        text = text.removeprefix(self.lead)
        if self.header:
            text = text.rpartition("\n")[0].rstrip()
        return text


class _Transform(cst.CSTTransformer):
    """Composes the edits; goes where one is and nowhere else."""

    def __init__(
        self, edits: dict[cst.CSTNode, list[Edit]], spans: dict[cst.CSTNode, Span]
    ) -> None:
        super().__init__()
        self.edits = edits
        self.wanted = [spans[node] for node in edits]
        self.spans = spans
        self.parents: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        self.parents.append(node)
        if not isinstance(node, (cst.BaseExpression, cst.BaseStatement)):
            return True
        start, end = self.spans[node]
        return any(start <= a and b <= end for a, b in self.wanted)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        self.parents.pop()
        made = updated_node
        for edit in self.edits.pop(original_node, ()):
            made = edit.make(made)
        if made is updated_node or not isinstance(made, cst.BaseExpression):
            return made
        return fitting(made, self.parents[-1] if self.parents else None)


def _spans(module: cst.Module, text: str) -> Iterator[tuple[cst.CSTNode, Span]]:
    """Where the nodes of a statement stand in its text, parentheses around them left out."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    for node, place in wrapper.resolve(PositionProvider).items():
        start, end = place.start, place.end
        yield node, (starts[start.line - 1] + start.column, starts[end.line - 1] + end.column)


def _decorators(statement: ast.stmt) -> list[ast.expr]:
    return getattr(statement, "decorator_list", [])


_LAYOUT = (
    cst.BaseParenthesizableWhitespace,
    cst.TrailingWhitespace,
    cst.EmptyLine,
    cst.Comment,
    cst.Newline,
    cst.Comma,
    cst.Semicolon,
    cst.LeftParen,
    cst.RightParen,
)


def _is_same(one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether two trees say the same, however they are laid out."""
    if type(one) is not type(other) or getattr(one, "value", None).__class__ is str:
        return type(one) is type(other) and one.value == other.value  # type: ignore[attr-defined]
    mine, theirs = (
        [child for child in node.children if not isinstance(child, _LAYOUT)]
        for node in (one, other)
    )
    return len(mine) == len(theirs) and all(map(_is_same, mine, theirs))
