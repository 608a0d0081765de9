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
    """A statement of the result.

    Attributes:
        text: Its source, the comments above it included.
        at: Where it comes from.
    """

    text: str
    at: Span


@dataclass
class Flat:
    """A `forward` as one run of statements.

    Attributes:
        parameters: What a training step gives it, in the order of the signature.
        lines: The statements.
        loss: The loss, as text.
        settings: Attributes of the model that branches were left out for, by path.
    """

    parameters: tuple[str, ...]
    lines: list[Line]
    loss: str
    settings: Mapping[str, Any]


@dataclass
class Scope:
    """One function while it is written out.

    Attributes:
        file: Where it is defined.
        names: What its names stand for.
        prefix: How the result spells its module.
        written: How the result spells its local names, where that is another way.
        after: The names of the result that are still needed where the function was called.
        elements: One of the modules that the variable of a loop stands for.
    """

    function: ast.FunctionDef
    file: SourceFile
    names: Environment
    prefix: str
    written: dict[str, str]
    after: frozenset[str]
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
