"""Text of flattened code: parentheses, indentation and comments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slapo_rewrite.code.evaluate import KnownObject
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.names import self_path
from slapo_rewrite.code.splice import Edit, apply_edits
from slapo_rewrite.hugging_face import ASKS_WHAT_WRAPS


def written_out(made: KnownObject) -> str:
    """The call that constructs an object, or a tuple display."""
    if made.cls is tuple:
        return f"({', '.join(made.texts.values())},)"
    return f"{made.cls.__name__}({', '.join(f'{k}={v}' for k, v in made.texts.items())})"


def bare(text: str) -> str:
    """An expression without outer parentheses."""
    while text.startswith("(") and text.endswith(")"):
        try:
            same = ast.dump(ast.parse(text[1:-1].strip(), mode="eval")) == ast.dump(
                ast.parse(text, mode="eval")
            )
        except SyntaxError:
            return text
        if not same or "\n" in text:
            return text
        text = text[1:-1].strip()
    return text


def alone(text: str) -> str:
    """An expression for the right side of an assignment: in parentheses only if lines need them."""
    text = bare(text)
    try:
        lines_up = len(ast.parse(f"result = {text}").body) == 1  # `a` and `+ b` are two statements
    except SyntaxError:
        lines_up = False
    return text if lines_up else f"(\n{text}\n)"


def span_of(node: ast.AST, file: SourceFile) -> tuple[int, int]:
    """The offsets of an expression; for `:=`, including the parentheses that it needs."""
    start, end = file.span(node)
    before, after = file.text[:start], file.text[end:]
    own = before.endswith("(") and not re.search(r"[\w)\]]\($", before[-80:])
    if isinstance(node, ast.NamedExpr) and own and after.startswith(")"):
        return start - 1, end + 1
    return start, end


def closed(text: str, node: ast.expr) -> str:
    """An expression in parentheses, if it may bind less tightly than its context."""
    tight = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant | ast.List | ast.Dict
    if isinstance(node, tight) or text.isidentifier():
        return text
    return f"({text})"


def enclosed(text: str) -> str:
    """An expression for use inside another one."""
    return closed(text, ast.parse(alone(text), mode="eval").body)


def dedented(text: str, file: SourceFile, node: ast.AST) -> str:
    """A text with the indentation of its first line removed from the other lines."""
    if "\n" not in text:
        return text
    first, rest = text.split("\n", 1)
    line = file.line(getattr(node, "lineno", 1))
    indent = len(line) - len(line.lstrip())
    lines = [
        line[indent:] if not line[:indent].strip() else line.lstrip() for line in rest.split("\n")
    ]
    return "\n".join([first, *lines])


def rewritten(text: str, edits: Mapping[Any, str]) -> str:
    """A text with some nodes of its tree replaced."""
    lines = SourceFile(Path(), "stage", text, ast.Module([], []))  # only used for positions
    return apply_edits(text, [Edit.instead_of(lines, *each) for each in edits.items()])[0]


def respelled(text: str, names: Mapping[str, str]) -> str:
    """A statement with the names that it reads replaced."""
    tree = ast.parse(text)
    return rewritten(
        text,
        {
            node: names[node.id]
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
        },
    )


def module_reads(text: str) -> Iterator[list[str]]:
    """The attribute chains of the model that a text reads.

    Without lists of which it only reads the length, which is the same in a stage as in the model,
    and without modules that it only asks for their wrappers.
    """
    inner: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.expr() as of]) if name in (
                "len",
                *ASKS_WHAT_WRAPS,
            ):
                inner.add(of)
        if isinstance(node, ast.Attribute | ast.Subscript) and (path := self_path(node)):
            steps = path.split(".")
            if not all(step.isidentifier() or step.isdigit() for step in steps):
                continue  # keys of a dictionary
            if node not in inner:
                yield steps
            inner.add(node.value)
