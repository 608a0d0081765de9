"""Whether a schedule gives a primitive arguments of the types that its signature says."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping
from typing import Any

from slapo_rewrite import errors

WORDS = {
    str: "a string",
    int: "a whole number",
    bool: "True or False",
    type: "a class",
    abc.Callable: "a function",
    abc.Mapping: "a dictionary",
    abc.Sequence: "a list",
}
PLURALS = {str: "strings", int: "whole numbers"}


def check_types(called: str, takes: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of other types than those of a signature (`BadArgument`)."""
    for name, kinds in _annotations(takes).items():
        value = arguments[name]
        if not any(_is_a(value, kind) for kind in kinds):
            *first, last = (_words(kind) for kind in kinds if kind is not types.NoneType)
            said = " or ".join([*filter(None, [", ".join(first)]), last])
            raise errors.BadArgument(
                f"`{name}` must be {said}, not {value!r}", hint=f"{called}{as_written(takes)}"
            )


def as_written(takes: Callable[..., None]) -> str:
    """A signature's names and defaults, without its types: `(n, by='parameters')`."""
    signature = inspect.signature(takes)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


@functools.cache
def _annotations(takes: Callable[..., None]) -> dict[str, tuple[Any, ...]]:
    """The alternatives that each argument has."""
    found = typing.get_type_hints(takes)
    found.pop("return", None)
    unions = typing.Union, types.UnionType
    return {
        name: typing.get_args(kind) if typing.get_origin(kind) in unions else (kind,)
        for name, kind in found.items()
    }


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, which is no union."""
    if kind in (Any, object):
        return True
    origin: Any = typing.get_origin(kind) or kind
    of = typing.get_args(kind)
    if not isinstance(origin, type):  # what is no class is for the primitive to judge
        return True
    if origin is int and isinstance(value, bool):
        return False
    if origin is not abc.Sequence or not isinstance(value, abc.Sequence):
        return isinstance(value, origin)
    return not isinstance(value, str | bytes) and all(_is_a(e, kind) for e in value for kind in of)


def _words(kind: Any) -> str:
    origin: Any = typing.get_origin(kind) or kind
    of = typing.get_args(kind)
    more = f" of {PLURALS[of[0]]}" if origin is abc.Sequence and of and of[0] in PLURALS else ""
    return WORDS.get(origin, f"a {origin.__name__}") + more
