"""Helpers for source text and places."""

from __future__ import annotations

import ast
import functools
import keyword
import linecache
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import NamedTuple

from slapo_rewrite import errors
from slapo_rewrite.code.blocks import statements

# First line and column, last line and column: lines from 1, columns from 0 in UTF-8 bytes.
Position = tuple[int, int, int, int]


class Place(NamedTuple):
    """A place in a file, with the position that Python records for running code."""

    filename: str
    at: Position

    @property
    def line(self) -> int:
        """The first line."""
        return self.at[0]

    def shown(self, note: str = "") -> errors.Span:
        """The place for a diagnostic."""
        text = linecache.getline(self.filename, self.line).rstrip("\r\n")
        return errors.Span.of_bytes(self.filename, self.at, text, note)


@functools.cache
def positions(code: CodeType) -> list[Position]:
    """The position of each instruction."""
    return [(a or 0, c or 0, b or 0, d or 0) for a, b, c, d in code.co_positions()]


def accessor(path: str) -> str:
    """A module path as an expression: `mlp.0.fc -> self.mlp[0].fc`, `mlp.-1 -> self.mlp[-1]`."""
    text = "self"
    for segment in path.split("."):
        text += f"[{segment}]" if segment.lstrip("-").isdigit() else f".{segment}"
    return text


def joined_path(path: str, name: str) -> str:
    """A path extended by a name or another path; '' is the root."""
    return f"{path}.{name}" if path and name else path or name


def listed(names: Iterable[str]) -> str:
    """Names in words: `a`, `b` and `c`, in backquotes."""
    shown = [f"`{name}`" for name in names]
    return " and ".join([*filter(None, [", ".join(shown[:-1])]), *shown[-1:]])


def with_wildcards(path: str) -> str:
    """A module path with `*` for each number: `layer.3.mlp -> layer.*.mlp`."""
    return ".".join("*" if segment.isdigit() else segment for segment in path.split("."))


def with_article(name: str) -> str:
    """A class name with its article: "A `Block`", "An `Expert`", "An `MLP`" (M is spelled out)."""
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIO"
    return f"{'An' if name[:1] in vowels else 'A'} `{name}`"


def bound_by(alias: ast.alias) -> str:
    """The name that a part of an import statement binds."""
    return alias.asname or alias.name.partition(".")[0]


def may_be_bound(text: str) -> bool:
    """Whether a text is a valid variable name."""
    return text.isidentifier() and not keyword.iskeyword(text)


def imported_as(name: str, local: str) -> str:
    """The item of an import statement for a name that is bound to `local`."""
    return name if name == local else f"{name} as {local}"


def docstring(text: str, indent: int, line_length: int) -> list[str]:
    """A docstring on one line, or wrapped if it does not fit."""
    pad = " " * indent
    if len(pad) + len(text) + 6 <= line_length:
        return [f'{pad}"""{text}"""']
    return [
        *textwrap.wrap(
            f'"""{text}',
            line_length,
            initial_indent=pad,
            subsequent_indent=pad,
            break_on_hyphens=False,
        ),
        f'{pad}"""',
    ]


def within(outer: ast.AST, inner: ast.AST) -> bool:
    """Whether a node is part of another, or the other itself."""
    return any(node is inner for node in ast.walk(outer))


def returns(function: ast.FunctionDef) -> Iterator[ast.Return]:
    """The `return` statements of a function, without those of inner functions."""
    return (s for s in statements(function.body) if isinstance(s, ast.Return))
