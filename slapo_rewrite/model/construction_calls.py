"""Records the call stack and the variables of each module's construction.

While a model is built, a patched `nn.Module.__init__` records the calls that led to it. They tell
which of several expressions in the source made a module. The variables of the innermost calls are
kept, so that another module can be made in the same place.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import os
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import end_position, position
from slapo_rewrite.code.text import Place, positions

_MAX_CALLS = 16
# The number of innermost calls whose variables are kept.
_MAX_SCOPES = 5

# The places of the calls of a call stack, innermost first.
Stack = tuple[Place, ...]
# The variables at a call: the function's locals and the module's globals.
Scope = tuple[dict[str, Any], dict[str, Any]]
# For each module the names set on it, each with the `id`s of modules under construction then.
Sets = WeakKeyDictionary[nn.Module, list[tuple[str, frozenset[int]]]]
# The methods that set an attribute of a module.
_SETTING = ("__setattr__", "__delattr__", "register_buffer", "register_parameter", "add_module")
# The modules of torch whose frames are skipped to find the code that sets a parameter.
_SETTERS = {__name__, "torch.nn.modules.module", "torch.nn.modules.container"}
# The attribute for the record of a module, which is freed with the module.
_RECORD = "_slapo_rewrite_record"
_orders = itertools.count()


@dataclass
class _Record:
    """How a module was made, and of which module it is a copy."""

    of: int = 0  # the `id` of the module that the constructor made
    cls: type | None = None  # its class then
    stack: Stack = ()
    scopes: tuple[Scope, ...] = ()
    order: int = 0  # greater than for all modules that were made before
    # The last place outside of torch that set each parameter and buffer.
    last: dict[str, Place] = field(default_factory=dict)
    # The same, preferably in a method of the module itself: other code may tie parameters.
    tensors: dict[str, tuple[bool, Place, Scope]] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> _Record:
        return replace(self, last={**self.last}, tensors={**self.tensors})

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Record, ()


def _record(module: nn.Module) -> _Record:
    known: _Record | None = vars(module).get(_RECORD)
    return known or _Record()


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Records the call stack of each module that is made in the context, innermost call first."""
    original = nn.Module.__init__
    around = sys._getframe(2)  # skips `contextlib`; outer calls are the same for all modules

    @functools.wraps(original)
    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        stack, scopes = _calls(self, sys._getframe(1), around)
        original(self, *args, **kwargs)
        vars(self).setdefault(_RECORD, _Record(id(self), type(self), stack, scopes, next(_orders)))

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def method(self: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            original(self, name, *args, **kwargs)
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__") in _SETTERS:
                frame = frame.f_back
            if frame is None or _RECORD not in vars(self):
                return
            by_torch = str(frame.f_globals.get("__name__")).startswith("torch.")
            if by_torch and type(self).__module__.startswith("torch."):
                return  # torch's modules are not rewritten
            known, place, own = _record(self), _place_in(frame), _receiver(frame) is self
            if not by_torch:
                known.last[name] = place
            if own or not known.tensors.get(name, (False,))[0]:
                known.tensors[name] = own, place, _scope_in(frame)

        return method

    tensors = ("register_parameter", "register_buffer")
    methods: dict[str, Any] = {name: noting(getattr(nn.Module, name)) for name in tensors}
    with mock.patch.multiple(nn.Module, __init__=construct, **methods):
        yield


@contextlib.contextmanager
def sets_noted() -> Iterator[Sets]:
    """Records which names are set on modules, and which modules were under construction then."""
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
    """The call stack of a module; empty if it was not made while stacks were recorded."""
    return _record(module).stack


def first_class_of(module: nn.Module) -> type:
    """The class that a module was made as; code may have given it another one since."""
    return _record(module).cls or type(module)


def is_copy(module: nn.Module) -> bool:
    """Whether a module is a copy of the module that the constructor made."""
    return _record(module).of not in (0, id(module))


def order_of(module: nn.Module) -> int:
    """A number that is greater than those of all modules that were made before."""
    return _record(module).order


def scope_of(module: nn.Module, number: int) -> Mapping[str, Any] | None:
    """The variables at one call of a module's stack; None if they were not kept."""
    scopes = _record(module).scopes
    return ChainMap(*scopes[number]) if number < len(scopes) else None


def variable(module: nn.Module, number: int, name: str) -> object:
    """The value of a local variable in one call of a module's stack; None if it is not known."""
    scopes = _record(module).scopes
    return scopes[number][0].get(name) if number < len(scopes) else None


def scope_at(file: SourceFile, call: ast.expr, module: nn.Module) -> Mapping[str, Any] | None:
    """The variables at the call that made a module; None if they are not known."""
    number = depth(file, call, stack_of(module))
    return scope_of(module, number) if number is not None else None


def tensor_set(module: nn.Module, name: str) -> tuple[Place, Mapping[str, Any]] | None:
    """Where a parameter or buffer was set, and the variables there; None if not recorded."""
    if name not in _record(module).tensors:
        return None
    _, call, scope = _record(module).tensors[name]
    return call, ChainMap(*scope)


def last_set(module: nn.Module, name: str) -> errors.Span | None:
    """The last place outside of torch that set a parameter or buffer, for a diagnostic."""
    call = _record(module).last.get(name)
    return place((call,)) if call is not None else None


def stand_in(module: nn.Module, other: nn.Module) -> None:
    """Gives a module the record of the module that it replaces."""
    own, made = _record(module), _record(other)
    again = replace(made, of=id(module), cls=type(module), last=own.last, tensors=own.tensors)
    vars(module)[_RECORD] = again


def depth(file: SourceFile, value: ast.expr, stack: Stack) -> int | None:
    """The number of an expression in a call stack; None if it is not there."""
    begin, end = position(value), end_position(value)
    for number, (name, at) in enumerate(stack):
        # A method call over several lines begins, for CPython, at the line of the method's name.
        if at[2:] == end and at[:2] >= begin and is_file(file, name):
            return number
    return None


def is_file(file: SourceFile, name: str) -> bool:
    """Whether a file name, as in a code object, is that of a file."""
    return bool(_real(name) == _real(os.path.abspath(file.path)))


def place(stack: Stack) -> errors.Span | None:
    """The innermost call, for a diagnostic."""
    return stack[0].shown("made here") if stack else None


def _calls(
    module: nn.Module, frame: FrameType | None, around: FrameType
) -> tuple[Stack, tuple[Scope, ...]]:
    while frame is not None and frame.f_code.co_name == "__init__":
        if _receiver(frame) is not module:
            break
        frame = frame.f_back
    calls: list[Place] = []
    scopes: list[Scope] = []
    while frame is not None and frame is not around and len(calls) < _MAX_CALLS:
        calls.append(_place_in(frame))
        if len(scopes) < _MAX_SCOPES:
            scopes.append(_scope_in(frame))
        frame = frame.f_back
    return tuple(calls), tuple(scopes)


def _place_in(frame: FrameType) -> Place:
    return Place(frame.f_code.co_filename, positions(frame.f_code)[frame.f_lasti // 2])


def _scope_in(frame: FrameType) -> Scope:
    return _variables(frame), frame.f_globals


def _made_around(frame: FrameType | None) -> Iterator[int]:
    """The `id`s of the modules whose constructors are running."""
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_code.co_varnames:
            yield id(_receiver(frame))
        frame = frame.f_back


def _receiver(frame: FrameType) -> object:
    """The first argument of a call: the object, if it is a method call."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None


def _variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame; for a comprehension also those of the functions around it.

    The caller of a generator is its consumer, not the function that contains it.
    """
    around = frame.f_back if frame.f_code.co_name.startswith("<") else None
    while around is not None and all(c is not frame.f_code for c in around.f_code.co_consts):
        around = around.f_back
    return {**_variables(around), **frame.f_locals} if around is not None else dict(frame.f_locals)


_real = functools.cache(os.path.realpath)
