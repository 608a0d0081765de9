"""The flattened `forward`, and the state while it is written."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slapo_rewrite.code.evaluate import Worth
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.errors import Span
from slapo_rewrite.stages.environment import Environment


@dataclass
class Line:
    """A statement of the output."""

    text: str  # its source, including the comments above it
    at: Span  # its origin


@dataclass
class Flat:
    """A `forward` as one run of statements."""

    parameters: tuple[str, ...]  # the arguments of a training step, in the signature's order
    lines: list[Line]  # the statements
    loss: str  # the expression of the loss
    settings: Mapping[str, Any]  # attributes of the model that decided branches, by path
    fixed: tuple[str, ...] = ()  # those of them that methods may set between steps


@dataclass
class Scope:
    """One function while it is inlined."""

    function: ast.FunctionDef
    file: SourceFile  # the file that defines it
    names: Environment  # the values of its names
    prefix: str  # the text of its module in the output
    written: dict[str, str]  # new names of its variables in the output, where these differ
    # Names of the output that are live after the call of the function.
    after: frozenset[str]
    # For each loop variable, one of the modules that it takes.
    elements: dict[str, Any] = field(default_factory=dict)

    def spelled(self, name: str) -> str:
        """A local name as the output spells it."""
        return self.written.get(name, name)


@dataclass
class Result:
    """The result of a function: its text, and its known value."""

    text: str
    value: Worth
    parts: tuple[str, ...] = ()
