"""What goes around `forward` as a whole: other random numbers, or recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite.changes.change import Asked, Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.places import AroundForward, Place
from slapo_rewrite.changes.state import Kept
from slapo_rewrite.code.build import parsed

FORK: Place = AroundForward(0)
RECOMPUTE: Place = AroundForward(1)
# Each of them inside those that follow; a subclass of its own can have them.
WRAPPERS = (FORK, RECOMPUTE)


@dataclass(frozen=True)
class ForkRandom(Change):
    """The module's random numbers differ between tensor-parallel ranks."""

    is_parallel = False

    def write(self, text: ClassText, here: Sequence[Asked]) -> None:
        """Decorates `forward`."""
        (asked,) = here
        method = text.method("forward")
        assert method is not None
        name = text.imports.helper("rng", "fork_rng", asked.causes)
        decorator = cst.Decorator(parsed(f"{name}()"))

        def make(made: cst.FunctionDef) -> cst.FunctionDef:
            return made.with_changes(decorators=[*made.decorators, decorator])

        why = "random numbers that differ between ranks"
        text.replace(method, method, make, asked.causes, why)


@dataclass(frozen=True)
class Recompute(Change):
    """The module's activations are computed again in the backward pass.

    Attributes:
        kept: What is kept all the same.
        updates_buffers: Whether it updates buffers as it runs.
    """

    kept: Kept = None
    updates_buffers: bool = False

    is_parallel = False

    def write(self, text: ClassText, here: Sequence[Asked]) -> None:
        """Nothing: a subclass has it."""
