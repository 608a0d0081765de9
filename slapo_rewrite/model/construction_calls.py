"""Where Python was when it made a module, and what it knew there.

While a model is built, `nn.Module.__init__` notes the calls that led to it. Of several expressions
that may have made a module, the one that Python passed through did. The variables of the nearest
calls are kept, so that another module can be made in the same place.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.text import Position, positions

_MAX_CALLS = 16
# How many of the calls have their variables kept.
_MAX_SCOPES = 4

# The file and the place of a call.
Call = tuple[str, Position]
Stack = tuple[Call, ...]
# The variables around a call: those of the file, and those of the function.
Scope = tuple[dict[str, Any], dict[str, Any]]
# For each module the names set on it, each with the modules whose constructors ran, by identity.
Sets = WeakKeyDictionary[nn.Module, list[tuple[str, frozenset[int]]]]
# What sets a name of a module.
_SETTING = ("__setattr__", "__delattr__", "register_buffer", "register_parameter", "add_module")
_stacks: WeakKeyDictionary[nn.Module, Stack] = WeakKeyDictionary()
_scopes: WeakKeyDictionary[nn.Module, tuple[Scope, ...]] = WeakKeyDictionary()


@contextlib.contextmanager
def recorded(stacks: WeakKeyDictionary[nn.Module, Stack] = _stacks) -> Iterator[None]:
    """Notes the calls that lead to each module made meanwhile, the innermost first."""
    original = nn.Module.__init__
    around = sys._getframe(2)  # below `contextlib`'s: what leads here leads to every module

    @functools.wraps(original)
    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        stack, scopes = _calls(self, sys._getframe(1), around)
        original(self, *args, **kwargs)
        if self not in stacks:
            stacks[self], _scopes[self] = stack, scopes

    with mock.patch.object(nn.Module, "__init__", construct):
        yield


@contextlib.contextmanager
def sets_noted() -> Iterator[Sets]:
    """Notes which names are set on modules meanwhile, and which others were being made then."""
    noted: Sets = WeakKeyDictionary()

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def method(self: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            original(self, name, *args, **kwargs)
            noted.setdefault(self, []).append((name, frozenset(_made_around(sys._getframe(1)))))

        return method

    methods: dict[str, Any] = {name: noting(getattr(nn.Module, name)) for name in _SETTING}
    with mock.patch.multiple(nn.Module, **methods):
        yield noted


def stack_of(module: nn.Module) -> Stack:
    """The calls that led to a module; none where it was not made while that was noted."""
    return _stacks.get(module, ())


def scope_of(module: nn.Module, number: int) -> dict[str, Any] | None:
    """What every name meant in one of the calls that led to a module; None where that is gone."""
    scopes = _scopes.get(module, ())
    return {**scopes[number][0], **scopes[number][1]} if number < len(scopes) else None


def scope_at(file: SourceFile, call: ast.expr, module: nn.Module) -> dict[str, Any] | None:
    """What every name meant where a call made a module; None where that is not known."""
    number = depth(file, call, stack_of(module))
    return scope_of(module, number) if number is not None else None


def stand_in(module: nn.Module, other: nn.Module) -> None:
    """Notes that a module stands where another was made."""
    _stacks[module], _scopes[module] = _stacks.get(other, ()), _scopes.get(other, ())


def forget() -> None:
    """Lets go of the variables of models that were built before."""
    _scopes.clear()


def depth(file: SourceFile, value: ast.expr, stack: Stack) -> int | None:
    """Which of the calls of a stack an expression is; None where it is none of them."""
    begin, end = (value.lineno, value.col_offset), (value.end_lineno, value.end_col_offset)
    path = _real(os.path.abspath(file.path))
    for number, (name, at) in enumerate(stack):
        # A method call over several lines begins, for CPython, at the line of the method's name.
        if at[2:] == end and at[:2] >= begin and _real(name) == path:
            return number
    return None


def place(stack: Stack) -> errors.Span | None:
    """The innermost of the calls, for a diagnostic."""
    if not stack:
        return None
    path, (line, begin, last, end) = stack[0]
    text = linecache.getline(path, line).rstrip("\r\n")
    start = len(text.encode()[:begin].decode(errors="ignore"))
    stop = len(text.encode()[:end].decode(errors="ignore")) if last == line else len(text)
    return errors.Span(path, line, start + 1, max(1, stop - start), text, "made here")


def passes_through(file: SourceFile, stack: Stack) -> bool:
    """Whether any of the calls stands in a file."""
    path = _real(os.path.abspath(file.path))
    return any(_real(name) == path for name, _ in stack)


def _calls(
    module: nn.Module, frame: FrameType | None, around: FrameType
) -> tuple[Stack, tuple[Scope, ...]]:
    while frame is not None and frame.f_code.co_name == "__init__":
        names = frame.f_code.co_varnames
        if not names or frame.f_locals.get(names[0]) is not module:
            break
        frame = frame.f_back
    calls: list[Call] = []
    scopes: list[Scope] = []
    while frame is not None and frame is not around and len(calls) < _MAX_CALLS:
        calls.append((frame.f_code.co_filename, positions(frame.f_code)[frame.f_lasti // 2]))
        if len(scopes) < _MAX_SCOPES:
            scopes.append((frame.f_globals, _variables(frame)))
        frame = frame.f_back
    return tuple(calls), tuple(scopes)


def _made_around(frame: FrameType | None) -> Iterator[int]:
    """The modules in whose constructors a call is."""
    while frame is not None:
        names = frame.f_code.co_varnames
        if frame.f_code.co_name == "__init__" and names:
            yield id(frame.f_locals.get(names[0]))
        frame = frame.f_back


def _variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a call; inside a comprehension also those around it.

    A generator is called by whoever consumes it, not by the function that it stands in.
    """
    around = frame.f_back if frame.f_code.co_name.startswith("<") else None
    while around is not None and all(c is not frame.f_code for c in around.f_code.co_consts):
        around = around.f_back
    return {**_variables(around), **frame.f_locals} if around is not None else dict(frame.f_locals)


_real = functools.cache(os.path.realpath)
