"""The values of knobs for tuning: `ckpt_ratio: Annotated[float, Choices(0.0, 0.5, 1.0)]`."""

from __future__ import annotations

import inspect
import linecache
import sys
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeGuard

from slapo_rewrite import errors

Value = bool | int | float | str
Direction = Literal["up", "down"]


class Choices:
    """The values that a knob may have.

    Args:
        values: Numbers, strings and booleans; at least one, each once.
        memory: "up" if larger values need more memory, "down" if they need less. By default the
            tuner measures it, except for `batch_size` and `ckpt_ratio`.
    """

    def __init__(self, *values: Value, memory: Direction | None = None) -> None:
        if not values:
            raise _wrong("`Choices` needs at least one value")
        for value in values:
            if not is_value(value):
                raise _wrong(f"`Choices` takes numbers, strings and booleans, not {value!r}")
        if len(set(values)) < len(values):
            raise _wrong("`Choices` has a value twice")
        if memory not in (None, "up", "down"):
            raise _wrong(f'`memory` is "up" or "down", not {memory!r}')
        self.values, self.memory = values, memory


def is_value(value: object) -> TypeGuard[Value]:
    """Whether a knob may have a value; NaN is not allowed, since it equals nothing."""
    return isinstance(value, Value) and value == value


class Range(Choices):
    """Integers from `first` to `last`, which is included.

    Args:
        first: The smallest number.
        last: The largest number.
        step: The difference between neighbours.
        memory: As for `Choices`.
    """

    def __init__(
        self, first: int, last: int, step: int = 1, memory: Direction | None = None
    ) -> None:
        if not all(type(each) is int for each in (first, last, step)):
            raise _wrong("`Range` takes whole numbers: for others, write `Choices(0.0, 0.5, 1.0)`")
        if step < 1 or last < first:
            raise _wrong(f"`Range({first}, {last}, {step})` holds no number")
        super().__init__(*range(first, last + 1, step), memory=memory)


def declared(function: Callable[..., Any]) -> dict[str, Choices]:
    """The `Choices` in the annotations of a function's keyword parameters, by name."""
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        name: each
        for name in list(inspect.signature(function).parameters)[1:]
        for each in getattr(hints.get(name), "__metadata__", ())
        if isinstance(each, Choices)
    }


def _wrong(message: str) -> errors.BadSpace:
    """The error, with the line that calls into this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line).rstrip("\n")
    return errors.BadSpace(message, at=errors.Span(path, line, 1, max(1, len(text)), text))
