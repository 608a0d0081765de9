"""Base classes for patterns that a schedule writes as module classes."""

from __future__ import annotations

from typing import Any

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model.meta_build import on_meta
from slapo_rewrite.model.node_facts import NodeFacts
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Tree


class Pattern(nn.Module):
    """A pattern with submodules: its `forward` is the computation. Any module class will do."""

    def forward(self, *args: Any) -> Any:
        """The computation; a subclass defines it."""
        raise NotImplementedError


class ModulePattern(nn.Module):
    """In a pattern, matches a submodule whose path matches a regular expression."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.slapo_path = path

    def forward(self, *args: Any) -> Any:
        """Has a meaning only inside a pattern."""
        raise NotImplementedError


def as_module(value: object) -> nn.Module | None:
    """The module of a pattern: the value, or an instance of the class; None for other values."""
    if isinstance(value, nn.Module):
        return value
    if not (isinstance(value, type) and issubclass(value, nn.Module)):
        return None
    try:
        with on_meta():
            made: nn.Module = value()
    except Exception as error:
        raise errors.BadPattern(
            f"`{value.__name__}()` raises {type(error).__name__}: {error}",
            hint="give an instance of it",
        ) from error
    return made


def facts_of_pattern(module: nn.Module, file: SourceFile) -> NodeFacts:
    """The facts about a pattern's own attributes."""
    return NodeFacts(Tree(module).root, Sources(file))
