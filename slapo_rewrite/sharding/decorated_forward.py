"""Checks whether a decorated `forward` runs at all: else a collective in it would do nothing.

A decorator may replace the function that the file defines, depending on the configuration, as
transformers does for experts.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from slapo_rewrite.code.text import Place
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.sharding.types import NeverRuns, ShardingRequest


@dataclass(frozen=True)
class Forward:
    """The undecorated `forward` of a file, and the number of the first sync requested for it."""

    code: CodeType
    sync: int


def wrapped_forwards(tree: Tree, request: ShardingRequest) -> dict[str, Forward]:
    """The decorated `forward`s of modules with collectives at their borders, by module path."""
    found = {}
    for path, borders in request.borders.items():
        known = [b for b in borders if b.operation not in ("function", "keep")]
        code = wrapped_code(tree.nodes[path].cls) if known else None
        if code is not None and path not in request.layers:
            found[path] = Forward(code, known[0].number)
    return found


def wrapped_code(cls: type) -> CodeType | None:
    """The code of a class's `forward` inside its decorators; None if it has none."""
    forward: Any = inspect.getattr_static(cls, "forward", None)
    inner = inspect.unwrap(forward) if callable(forward) else None
    return getattr(inner, "__code__", None) if inner is not forward else None


@contextlib.contextmanager
def noting(wanted: Collection[CodeType], ran: set[CodeType]) -> Iterator[None]:
    """Adds to `ran` those of the wanted functions that run meanwhile."""
    if not wanted:
        yield
        return
    before = sys.getprofile()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in wanted:
            ran.add(frame.f_code)
            if ran.issuperset(wanted):  # a profile function slows down every call and return
                sys.setprofile(before)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def never_run(node: Node, forward: Forward) -> NeverRuns:
    """The refusal of a collective in a `forward` that does not run."""
    line = forward.code.co_firstlineno
    return NeverRuns(
        f"`{node.cls.__name__}.forward` does not run: a decorator replaces it with another "
        "function, so a collective in it would do nothing",
        place=Place(forward.code.co_filename, (line, 4, line, 4 + len("def forward"))),
        hint="put the sync on the module that calls it, or on one inside it",
        sync=(node.path, forward.sync),
    )
