"""A `forward` as one run of statements, and what is at hand while one is written."""

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
    """A statement of the result."""

    text: str  # its source, the comments above it included
    at: Span  # where it comes from


@dataclass
class Flat:
    """A `forward` as one run of statements."""

    parameters: tuple[str, ...]  # what a training step gives it, in the order of the signature
    lines: list[Line]  # the statements
    loss: str  # the loss, as text
    settings: Mapping[str, Any]  # attributes of the model that branches were left out for, by path
    fixed: tuple[str, ...] = ()  # those of them that methods may set between steps


@dataclass
class Scope:
    """One function while it is written out."""

    function: ast.FunctionDef
    file: SourceFile  # where it is defined
    names: Environment  # what its names stand for
    prefix: str  # how the result spells its module
    written: dict[str, str]  # how the result spells its local names, where that is another way
    # The names of the result that are still needed where the function was called.
    after: frozenset[str]
    # One of the modules that the variable of a loop stands for.
    elements: dict[str, Any] = field(default_factory=dict)

    def spelled(self, name: str) -> str:
        """A local name as the result spells it."""
        return self.written.get(name, name)


@dataclass
class Result:
    """What a function returns: its text, and what is known of it."""

    text: str
    value: Worth
    parts: tuple[str, ...] = ()
