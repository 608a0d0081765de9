"""The transform: composes all changes of a statement on libcst nodes, and prints it once.

Changes are decided on the `ast` tree. An `Edit` names an `ast` node, and a function from the libcst
node at that position to its replacement. Only statements with edits are parsed with libcst. The
two trees are matched by position, and the functions of each node are composed, inner nodes first.
Text without edits is never printed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from slapo_rewrite.code.blocks import first_line
from slapo_rewrite.code.build import bare, code, conditional, fitting, parsed
from slapo_rewrite.code.file import SourceFile

Span = tuple[int, int]
# White space and comments at the beginning and at the end of a parenthesised text.
_LEAD = re.compile(r"^(?:\s|#[^\n]*\n)+")
_TAIL = re.compile(r"\s*(?:#[^\n]*\n\s*)*$")


@dataclass(frozen=True)
class Edit:
    """The replacement of one node of a statement."""

    # The node of the file's `ast`: an expression of the statement, or the statement.
    node: ast.expr | ast.stmt
    # Returns the replacement of the libcst node, in which inner edits are made already.
    make: Callable[[Any], cst.CSTNode]
    outer: bool = False  # whether it applies after other edits of the same node


@dataclass(frozen=True)
class Put:
    """Replaces an expression or a simple statement by a text."""

    text: str

    def __call__(self, made: cst.CSTNode) -> cst.CSTNode:
        """Parses the text, as an expression or a statement like the old node."""
        if isinstance(made, cst.BaseExpression):
            return parsed(self.text)
        line = cst.ensure_type(cst.parse_statement(self.text), cst.SimpleStatementLine)
        return line.body[0]


@dataclass(frozen=True)
class NoneIf:
    """Replaces a value by None if a condition holds."""

    condition: str

    def __call__(self, made: cst.BaseExpression) -> cst.BaseExpression:
        """`value` -> `None if condition else value`."""
        return conditional(parsed("None"), self.condition, made)


class NoPlaceError(Exception):
    """There is no libcst node at the position of an `ast` node."""


# The offsets of the replaced text of a statement, and the new text.
Written = tuple[int, int, str]


def edited(file: SourceFile, edits: Mapping[ast.stmt, Sequence[Edit]]) -> dict[ast.stmt, Written]:
    """The new texts of statements, given the edits of nodes in each.

    Only the header of a compound statement can change. For one node, `outer` edits come last.
    Raises `NoPlaceError` for a node that cannot be found, as inside an f-string.
    """
    parts = {statement: _Part(file, statement) for statement in edits}
    trees = _Trees(list(parts.values()))
    wanted: dict[cst.CSTNode, list[Edit]] = {}
    for statement, changes in edits.items():
        for edit in sorted(changes, key=lambda e: e.outer):
            wanted.setdefault(trees.node_of(parts[statement], edit.node), []).append(edit)
    made = trees.module.visit(_Transform(wanted, trees.spans))
    assert not wanted, "an edit was not carried out"
    check_printed(made)
    texts = (made.code_for_node(each).rstrip("\n") for each in made.body)
    return {s: part.restored(text) for (s, part), text in zip(parts.items(), texts, strict=True)}


def substituted(file: SourceFile, node: ast.expr | ast.stmt, texts: Mapping[ast.expr, str]) -> str:
    """The text of an expression or a simple statement with some of its expressions replaced."""
    found: list[cst.CSTNode] = []

    def keep(made: cst.CSTNode) -> cst.CSTNode:
        found.append(made)
        return made

    edits = [Edit(part, Put(text)) for part, text in texts.items()]
    edited(file, {file.statement_of(node): [*edits, Edit(node, keep, outer=True)]})
    (made,) = found
    return code(bare(made) if isinstance(made, cst.BaseExpression) else made)


def check_printed(tree: cst.Module) -> None:
    """Prints a tree, parses the text, and raises if that is another tree.

    A node that moved into a tighter context needs parentheses: the `a, b` of `return a, b` is not
    that of `all_reduce(a, b)`.
    """
    text = tree.code
    if not _is_same(cst.parse_module(text), tree):
        raise AssertionError(f"printed differently than intended: {text}")


def _trimmed(file: SourceFile, start: int, end: int, text: str) -> tuple[int, int, str]:
    """A replacement without the unchanged lines at its beginning and end."""
    before, after = file.text[start:end].split("\n"), text.split("\n")
    while len(before) > 1 and len(after) > 1 and before[0] == after[0]:
        start += len(before.pop(0)) + 1
        after.pop(0)
    while len(before) > 1 and len(after) > 1 and before[-1] == after[-1]:
        end -= len(before.pop()) + 1
        after.pop()
    return start, end, "\n".join(after)


class _Part:
    """The text to parse for one statement: all of a simple one, the header of a compound one.

    Attributes:
        start: The offset of its beginning in the file.
        end: The offset of its end.
        text: The text to parse.
        lead: Text that was prepended to make it parse.
    """

    def __init__(self, file: SourceFile, statement: ast.stmt) -> None:
        self.file, self.statement = file, statement
        self.start, self.end = file.span(statement)
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        if decorators:
            self.start = file.text.rindex("@", 0, file.span(decorators[0])[0])
        body: list[ast.stmt] = getattr(statement, "body", [])
        self.header = bool(body) and body[0].lineno > statement.lineno
        self.text = file.text[self.start : self.end]
        if self.header:
            self.text = file.text[self.start : file.offset(first_line(body[0]), 0)]
            self.end = self.start + len(self.text.rstrip())
            self.text += " " * (statement.col_offset + 4) + "pass"
        if isinstance(statement, ast.If) and self.text.startswith("elif"):
            # The only statement of an `else`.
            self.text, self.start = self.text[2:], self.start + 2
        # Decorators and the definition are separate lines, which must have the same indentation.
        named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        indent = statement.col_offset if isinstance(statement, named) else 0
        self.lead = f"if True:\n{' ' * indent}" if indent else ""
        self.text = self.lead + self.text

    def restored(self, text: str) -> Written:
        """The text for the file, without what was added to parse it."""
        text = text.removeprefix(self.lead)
        if not self.header:
            return self.start, self.end, text
        return _trimmed(self.file, self.start, self.end, text.rpartition("\n")[0].rstrip())


class _Trees:
    """Statements of a file as one libcst module, with the positions of its nodes."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.text = "".join(f"{part.text}\n" for part in parts)
        self.module = cst.parse_module(self.text)  # has one statement for each part
        # The positions of its nodes in its text, without parentheses around them.
        self.spans = dict(_spans(self.module, self.text))
        self.by_span: dict[Span, cst.CSTNode] = {
            span: node for node, span in self.spans.items() if isinstance(node, cst.BaseExpression)
        }
        self.numbers, self.starts, start = {}, {}, 0
        for number, part in enumerate(parts):
            self.numbers[part], self.starts[part] = number, start
            start += len(part.text) + 1

    def node_of(self, part: _Part, node: ast.expr | ast.stmt) -> cst.CSTNode:
        """The libcst node at the position of an `ast` node."""
        if node is part.statement:
            tree: cst.CSTNode = self.module.body[self.numbers[part]]
            if isinstance(tree, cst.If) and part.lead:
                tree = tree.body.body[0]
            return tree.body[0] if isinstance(tree, cst.SimpleStatementLine) else tree
        shift = self.starts[part] + len(part.lead) - part.start
        start, end = (each + shift for each in part.file.span(node))
        found = self.by_span.get((start, end))
        while found is None and self.text[start:end][:1] == "(" and self.text[end - 1] == ")":
            # In `ast`, tuples, and generators that are a call's only argument, include parentheses.
            inner = self.text[start + 1 : end - 1]
            start += 1 + len(inner) - len(_LEAD.sub("", inner))
            end -= 1 + len(inner) - len(_TAIL.sub("", inner))
            found = self.by_span.get((start, end))
        if found is None:
            raise NoPlaceError(part.file.segment(node))
        return found


class _Transform(cst.CSTTransformer):
    """Applies the edits; visits only the nodes that contain one."""

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
    """The positions of a module's nodes in its text, without parentheses around them."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    for node, place in wrapper.resolve(PositionProvider).items():
        start, end = place.start, place.end
        yield node, (starts[start.line - 1] + start.column, starts[end.line - 1] + end.column)


_LAYOUT = (
    cst.BaseParenthesizableWhitespace, cst.TrailingWhitespace, cst.EmptyLine, cst.Comment,
    cst.Newline, cst.Comma, cst.Semicolon, cst.LeftParen, cst.RightParen, cst.MaybeSentinel,
)  # fmt: skip


def _is_same(one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether two trees are equal apart from layout."""
    if type(one) is not type(other):
        return False
    for name in _fields(type(one)):
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, cst.CSTNode) and isinstance(theirs, cst.CSTNode):
            if not (isinstance(mine, _LAYOUT) or _is_same(mine, theirs)):
                return False
        elif isinstance(mine, (tuple, list)) and isinstance(theirs, (tuple, list)):
            mine = [each for each in mine if not isinstance(each, _LAYOUT)]
            theirs = [each for each in theirs if not isinstance(each, _LAYOUT)]
            if len(mine) != len(theirs) or not all(map(_is_same, mine, theirs)):
                return False
        elif mine != theirs and not (isinstance(mine, _LAYOUT) or isinstance(theirs, _LAYOUT)):
            return False
    return True


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """The fields of a node class without those for layout."""
    names = [field.name for field in dataclasses.fields(kind)]
    idle = {"lpar", "rpar", "comma", "semicolon", "header", "footer", "indent", "encoding"}
    idle |= {"default_indent", "default_newline", "has_trailing_newline", "leading_lines"}
    return tuple(n for n in names if n not in idle and not n.startswith("whitespace"))
