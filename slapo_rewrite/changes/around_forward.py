"""Wrappers of `forward` as a whole: forked random numbers, and recomputation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import libcst as cst

from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.placement import Placement, Requested
from slapo_rewrite.changes.places import AroundForward, Place
from slapo_rewrite.changes.recomputation import Recomputed, left_out
from slapo_rewrite.code.build import parsed
from slapo_rewrite.directive import Directive
from slapo_rewrite.model.tree import Node

FORK: Place = AroundForward(0)
RECOMPUTE: Place = AroundForward(1)
# From the innermost to the outermost; each may be written as a subclass of its own.
WRAPPERS = (FORK, RECOMPUTE)


class WrapForward(Requested):
    """A change around `forward` as a whole."""

    is_parallel = False


@dataclass(frozen=True)
class ForkRandom(WrapForward):
    """The module's random numbers differ between tensor-parallel ranks."""

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        """Around `forward`."""
        to.around_forward(node).changes.add(node.path, FORK, self, (cause,))

    def write_at(self, text: ClassText, place: Place) -> None:
        """Decorates `forward`."""
        method = text.method("forward")
        assert method is not None
        name = text.helper("rng", "fork_rng")
        decorator = cst.Decorator(parsed(f"{name}()"))
        text.replace(
            method,
            lambda made: made.with_changes(decorators=[*made.decorators, decorator]),
            "random numbers that differ between ranks",
        )


@dataclass(frozen=True)
class Recompute(Recomputed, WrapForward):
    """The module's activations are computed again in the backward pass."""

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        """Around `forward`, if that can run twice."""
        # Cached, since it does not depend on other requests and a search asks repeatedly.
        known, key = to.files.sources.followed, ("recomputed", node.path, self)
        if key not in known:
            left = left_out(to, node, cause)
            known[key] = replace(self.checked(to, node, [node], cause), left=left)
        change = known[key]
        to.around_forward(node).changes.add(node.path, RECOMPUTE, change, (cause,))

    def write_at(self, text: ClassText, place: Place) -> None:
        """Nothing: it is written as a subclass."""
