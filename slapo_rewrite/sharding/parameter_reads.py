"""Records where parameters are read: in a method of their own module, or elsewhere.

A parameter whose gradient needs an all-reduce gets it where it is read. The class of its own module
does that for all of its methods; for `self.norm.weight` in another module, that expression does.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

from torch import nn

from slapo_rewrite.sharding.operation_places import is_method, place_of, text_at
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.types import Reading


@contextlib.contextmanager
def noted_readings(run: Run) -> Iterator[None]:
    """Records every read of a parameter meanwhile."""
    paths = {id(node.live): path for path, node in run.tree.nodes.items()}
    plain = nn.Module.__getattr__

    def read(module: nn.Module, name: str) -> object:
        value = plain(module, name)
        path = paths.get(id(module))
        if isinstance(value, nn.Parameter) and path is not None:
            reading = _reading(run, module, path, name, sys._getframe(1))
            if reading is not None:
                run.followed.readings.add(reading)
                return run.read_as.get(id(value), value)
        return value

    nn.Module.__getattr__ = read  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.__getattr__ = plain  # type: ignore[method-assign]


def _reading(
    run: Run, module: nn.Module, path: str, name: str, frame: types.FrameType | None
) -> Reading | None:
    """The read of a parameter; None in a method of its module, if not written `self.<name>`."""
    while frame is not None and frame.f_code.co_name == "__getattr__":
        frame = frame.f_back
    assert frame is not None
    place = place_of(frame)
    # A comprehension has a frame of its own.
    while frame.f_back is not None and frame.f_code.co_name.startswith("<"):
        frame = frame.f_back
    reader = run.method_owner(frame)
    if reader == path and is_method(type(module), frame.f_code):
        own = run.editable(frame.f_code.co_filename) is not None
        named = place is None or text_at(place, run.editable) == f"self.{name}"
        return Reading(path, name, path) if named or not own else None
    return Reading(path, name, reader, place, inside=False)
