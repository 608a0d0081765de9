"""The text of what is written out: parentheses, indentation and comments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slapo_rewrite.code.evaluate import KnownObject
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.splice import Edit, apply_edits
from slapo_rewrite.hugging_face import ASKS_WHAT_WRAPS


def written_out(made: KnownObject) -> str:
    """The call that makes an object, or a tuple."""
    if made.cls is tuple:
        return f"({', '.join(made.texts.values())},)"
    return f"{made.cls.__name__}({', '.join(f'{k}={v}' for k, v in made.texts.items())})"


def bare(text: str) -> str:
    """An expression without parentheses around all of it."""
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
    """An expression as it can stand alone: in parentheses only where its lines need them."""
    text = bare(text)
    try:
        lines_up = len(ast.parse(f"result = {text}").body) == 1  # `a` and `+ b` are two statements
    except SyntaxError:
        lines_up = False
    return text if lines_up else f"(\n{text}\n)"


def span_of(node: ast.AST, file: SourceFile) -> tuple[int, int]:
    """Where an expression stands; of `:=` with the parentheses that it needs."""
    start, end = file.span(node)
    before, after = file.text[:start], file.text[end:]
    own = before.endswith("(") and not re.search(r"[\w)\]]\($", before[-80:])
    if isinstance(node, ast.NamedExpr) and own and after.startswith(")"):
        return start - 1, end + 1
    return start, end


def closed(text: str, node: ast.expr) -> str:
    """An expression in parentheses, where it may bind less tightly than what is around it."""
    tight = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant | ast.List | ast.Dict
    if isinstance(node, tight) or text.isidentifier():
        return text
    return f"({text})"


def enclosed(text: str) -> str:
    """An expression as it can stand within another one."""
    return closed(text, ast.parse(alone(text), mode="eval").body)


def dedented(text: str, file: SourceFile, node: ast.AST) -> str:
    """A text of several lines with the indentation of its first line taken off the others."""
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
    """A text in which nodes of its tree read otherwise."""
    lines = SourceFile(Path(), "stage", text, ast.Module([], []))  # of which only places are asked
    return apply_edits(text, [Edit.instead_of(lines, *each) for each in edits.items()])[0]


def respelled(text: str, names: Mapping[str, str]) -> str:
    """A statement that reads other names."""
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
    """What a text reads of the model, each as its attributes one after the other.

    But for lists of which it reads how long they are: a stage has as many places as the model; and
    for modules of which it asks only what wraps them.
    """
    inner: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.expr() as of]) if name in (
                "len",
                *ASKS_WHAT_WRAPS,
            ):
                inner.add(of)
        if isinstance(node, ast.Attribute | ast.Subscript) and (steps := _steps(node)):
            if node not in inner:
                yield steps
            inner.add(node.value)


def _steps(node: ast.expr) -> list[str] | None:
    """The attributes that `self.mlp[0].up` reads one after the other, numbers among them."""
    match node:
        case ast.Name(id="self"):
            return []
        case (
            ast.Attribute(value=owner, attr=step)
            | ast.Subscript(value=owner, slice=ast.Constant(int() | str() as step))
        ) if isinstance(step, int) or step.isidentifier():
            above = _steps(owner)
            return None if above is None else [*above, str(step)]
    return None
