"""Finds the call in a method of the model that an operation belongs to, by its call stack."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType

import torch
from torch import nn

from slapo_rewrite.code.text import Place
from slapo_rewrite.precision.half_layers import computes_product
from slapo_rewrite.sharding.operation_places import first_argument, is_method, place_of

_HERE = os.path.dirname(__file__)
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


@dataclass(frozen=True)
class Call:
    """A call in a method of the model that runs an operation."""

    path: str  # the module with the method
    place: Place  # the place in the method
    owner: str  # the innermost module that computes
    module: nn.Module  # that module itself
    code: CodeType  # the running function of that module
    # The called function, if it is not the operation itself: the first one with parameters.
    callee: FrameType | None


class CallStack:
    """Reads the call stack during a run.

    `paths` has the modules' paths by `id`; `editable` returns the text of a file that may be
    changed, or None.
    """

    def __init__(self, paths: Mapping[int, str], editable: Callable[[str], str | None]) -> None:
        self.paths, self.editable = paths, editable
        self._methods: dict[tuple[type, CodeType], bool] = {}

    def call(self) -> Call | None:
        """The call that the running operation belongs to; None outside of the model."""
        inner: list[FrameType] = []
        computing: tuple[nn.Module, CodeType] | None = None
        for frame in _frames():
            owner = first_argument(frame)
            if isinstance(owner, nn.Module) and id(owner) in self.paths:
                computing = computing or (owner, frame.f_code)
                if self._is_method(owner, frame):
                    place = place_of(frame)
                    if place is None:
                        return None
                    path, innermost = self.paths[id(owner)], self.paths[id(computing[0])]
                    return Call(path, place, innermost, *computing, _callee(inner))
            inner.append(frame)
        return None

    def _is_method(self, owner: nn.Module, frame: FrameType) -> bool:
        """Whether a frame runs a method that may be changed."""
        key = (type(owner), frame.f_code)
        if key not in self._methods:
            known = self.editable(frame.f_code.co_filename) is not None
            own = known and not computes_product(*key)  # such a layer is replaced
            self._methods[key] = own and is_method(*key)
        return self._methods[key]


def _frames() -> Iterator[FrameType]:
    """The frames of the call stack outside of this folder, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if os.path.dirname(frame.f_code.co_filename) != _HERE:
            yield frame
        frame = frame.f_back


def _callee(inner: list[FrameType]) -> FrameType | None:
    """The outermost of some frames with parameters that is not a function of torch.

    A module's `forward` counts even if it is torch's; torch's functions are operations.
    """
    for frame in reversed(inner):
        is_torchs = frame.f_code.co_filename.startswith(_TORCH)
        is_forward = frame.f_code.co_name == "forward" and isinstance(
            first_argument(frame), nn.Module
        )
        if parameters_of(frame) and (is_forward or not is_torchs):
            return frame
    return None


def parameters_of(frame: FrameType) -> tuple[str, ...]:
    """The parameters of a frame's function, without `self`."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names[1:] if names[:1] == ("self",) else names


def reading_frame() -> FrameType | None:
    """The frame that runs the current operation; None if it is torch's own."""
    frame = next(_frames(), None)
    if frame is None or frame.f_code.co_filename.startswith(_TORCH):
        return None
    return frame
