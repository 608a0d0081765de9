"""The kinds of values in a `forward`, and how values other than tensors are sent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slapo_rewrite.stages.function_syntax import signature_of

# Shape and dtype of a tensor.
Like = tuple[tuple[int, ...], Any]
# Numbers are sent as the shape of a tensor, which has at most this many elements in a small model.
LARGEST_SHAPE = 1 << 16


@dataclass(frozen=True)
class ValueKind:
    """The kind of a value in a run."""

    # `grad` for a tensor that requires a gradient, `complex` for a complex one; `float` and `int`
    # for other tensors (`int` includes booleans); `shape` for one or two numbers that may be a
    # shape; `several` for a tuple, list, dictionary or record of such values, and for constants
    # (None, a setting); `record` for another object of a data class or named tuple; `other` for
    # anything else.
    kind: str
    like: Like | None = None  # shape and dtype of a tensor
    # Whether a tensor is not contiguous, so that it cannot be sent directly.
    is_scattered: bool = False
    # Whether random numbers were drawn for it, so that it differs each time.
    is_drawn: bool = False
    numbers: tuple[int, ...] = ()  # the numbers of a `shape`
    parts: tuple[ValueKind, ...] = ()  # the elements of a `several`
    keys: tuple[str | int, ...] = ()  # the keys of a dictionary, or the fields of a record
    text: str = ""  # the literal of a constant value
    made_by: type | None = None  # the type of a `several` or `shape`

    def is_like(self, other: ValueKind) -> bool:
        """Whether two tensors have the same dtype and shape, except for the last axis."""
        if self.like is None or other.like is None:
            return False
        (shape, kind), (other_shape, other_kind) = self.like, other.like
        same = len(shape) == len(other_shape) and shape[:-1] == other_shape[:-1]
        return same and kind == other_kind

    def named(self, name: str) -> Iterator[tuple[str, ValueKind]]:
        """The value and its parts, each with a name."""
        yield name, self
        for part, kind in zip(self.names(name), self.parts, strict=True):
            yield from kind.named(part)

    def names(self, name: str) -> tuple[str, ...]:
        """The names of the parts of a value of this name."""
        found = tuple(f"{name}_{key}" for key in self.keys)
        if found and len({*found}) == len(found) and all(map(str.isidentifier, found)):
            return found
        return tuple(f"{name}_{number}" for number in range(len(self.parts)))

    def taken_apart(self, name: str) -> str:
        """The statement that unpacks a value into its parts; it raises for other parts."""
        if self.text:
            sign = "is" if self.text in ("None", "True", "False") else "=="
            return f"assert {name} {sign} {self.text}  # nothing of it is sent"
        if self.is_record:
            read = ", ".join(f"{name}.{key}" for key in self.keys)
            return f"{self.listed(name)} = {read}{',' * (len(self.keys) == 1)}"
        if not self.keys:
            return f"{self.listed(name)} = {name}"
        read = ", ".join(f"{name}[{key!r}]" for key in self.keys)
        return f"assert [*{name}] == {[*self.keys]!r}\n{', '.join(self.names(name))} = {read}"

    @property
    def is_record(self) -> bool:
        """Whether it has named fields."""
        return bool(self.keys) and self.made_by is not dict

    def listed(self, name: str) -> str:
        """The names of the parts, as an unpacking target."""
        return ", ".join(self.names(name)) + ("," if len(self.parts) == 1 else "")

    def structure(self) -> tuple[Any, ...]:
        """The properties that must be the same for all data of one shape."""
        parts = tuple(part.structure() for part in self.parts)
        return self.kind, self.numbers, self.keys, self.text, self.made_by, parts

    def sent(self, name: str, beside: str) -> str:
        """The expression to send for a value; numbers become the shape of a new tensor."""
        return f"{beside}.new_zeros({name})" if self.kind == "shape" else name

    def received(self, name: str) -> str:
        """The statement that restores a value from the received tensor, or from its parts."""
        if self.kind == "several":
            parts = zip(self.parts, self.names(name), strict=True)
            return f"{name} = {self.text or self.put_together([k.text or n for k, n in parts])}"
        shape = f"{name}.shape"
        return f"{name} = " + {
            int: f"{shape}[0]",
            list: f"list({shape})",
            tuple: f"tuple({shape})",
        }.get(self.made_by or tuple, shape)

    def put_together(self, parts: Sequence[str]) -> str:
        """The expression that joins parts to a list, tuple, dictionary or record."""
        listed = ", ".join(parts)
        if self.made_by is not None and self.is_record:
            fields = (f"{key}={part}" for key, part in zip(self.keys, parts, strict=True))
            return f"{self.made_by.__name__}({', '.join(fields)})"
        if self.made_by is dict:
            items = zip(self.keys, parts, strict=True)
            return f"{{{', '.join(f'{key!r}: {part}' for key, part in items)}}}"
        return f"[{listed}]" if self.made_by is list else f"({listed}{',' * (len(parts) == 1)})"


def described(
    value: object,
    is_drawn: bool = False,
    world: Mapping[str, Any] | None = None,
    flags: bool = False,
) -> ValueKind:
    """The kind of a value.

    `is_drawn` if random numbers were drawn for it; `flags` if booleans and strings are the same in
    every step. `world` has the names of classes that stages know, to send records in parts.
    """
    if isinstance(value, Tensor):
        like = (tuple(value.shape), value.dtype)
        kind = "float" if value.is_floating_point() else "int"
        if value.requires_grad:  # complex tensors arrive without gradient
            kind = "complex" if value.is_complex() else "grad"
        return ValueKind(kind, like, not value.is_contiguous(), is_drawn)
    made_by = type(value)
    elements: tuple[Any, ...] = (value,) if made_by is int else ()
    keys: tuple[str | int, ...] = ()
    if isinstance(value, tuple | list) and made_by in (tuple, list, torch.Size):
        elements = tuple(value)
    elif isinstance(value, dict) and made_by is dict and {*map(type, value)} <= {str, int}:
        elements, keys = tuple(value.values()), tuple(value)
    fields = fields_of(value)
    if fields and world and world.get(made_by.__name__) is made_by:
        elements, keys = tuple(fields.values()), tuple(fields)
    if not keys and 1 <= len(elements) <= 2 and all(type(e) is int and e > 0 for e in elements):
        if math.prod(elements) <= LARGEST_SHAPE:
            return ValueKind("shape", is_drawn=is_drawn, numbers=elements, made_by=made_by)
    elif value is None or (made_by in (bool, str) and flags and not is_drawn):
        return ValueKind("several", is_drawn=is_drawn, text=repr(value))
    elif keys or (made_by in (tuple, list, dict) and (elements or not value)):
        parts = tuple(described(element, is_drawn, world, flags) for element in elements)
        found = ValueKind("several", None, False, is_drawn, (), parts, keys, "", made_by)
        if all(part.text for part in parts):
            text = found.put_together([part.text for part in parts])
            return replace(found, parts=(), keys=(), text=text)
        if all(part.kind not in ("record", "other") for part in parts):
            return found
    is_record = fields or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    return ValueKind("record" if is_record else "other", is_drawn=is_drawn)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a record whose class can be called with just these; empty for other values."""
    made_by = type(value)
    if isinstance(value, tuple) and hasattr(made_by, "_fields"):
        own = dict(zip(made_by._fields, value, strict=True))
    elif dataclasses.is_dataclass(value) and not hasattr(made_by, "__post_init__"):
        own = dict(getattr(value, "__dict__", {}))
    else:
        return {}
    taken = signature_of(made_by)
    return own if taken is not None and [*taken.parameters] == [*own] else {}
