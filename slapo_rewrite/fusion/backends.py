"""What carries out a function that rules call: a kernel, PyTorch's operations, another's module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slapo_rewrite.changes.imports import TRITON
from slapo_rewrite.fusion.rule import Rule, RuleMatch


@dataclass(frozen=True)
class Choice:
    """What a function is carried out by at one place."""

    # One of `imports.WRITTEN`, or the name of a module that the output imports.
    backend: str = TRITON
    why: str = ""  # what it was chosen for, in words; empty where it was asked for


class Backends(Protocol):
    """Chooses for each place."""

    def choose(self, rule: Rule, kernel: str, found: RuleMatch) -> Choice:
        """What carries out a function.

        Args:
            rule: Whose function it is.
            kernel: The dotted name of the kernel that the rule calls.
            found: Where.
        """
        ...


@dataclass(frozen=True)
class Always:
    """One for every place."""

    backend: str = TRITON

    def choose(self, rule: Rule, kernel: str, found: RuleMatch) -> Choice:
        """That one."""
        return Choice(self.backend)
