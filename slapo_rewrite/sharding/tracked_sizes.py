"""Integers that track the attributes they were computed from, and comparison of shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slapo_rewrite.model.results import tensors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Attribute:
    """An integer attribute of a class's instances."""

    cls: type  # the class of the module that has it
    holder: type  # the class of the nearest module, itself or above, that owns sharded parameters
    name: str  # the attribute's name
    requested: bool = False  # whether the schedule itself makes it this rank's share


class Size(int):
    """The value of an integer attribute, or an integer computed from such attributes."""

    attributes: tuple[Attribute, ...]
    # Its expression, if known: an attribute, or sums and products of attributes.
    text: str | None

    @classmethod
    def of(cls, value: int, attributes: Iterable[Attribute]) -> Size:
        """A size with these attributes."""
        size = cls(value)
        size.attributes = tuple(dict.fromkeys(attributes))
        size.text = f"self.{size.attributes[0].name}" if len(size.attributes) == 1 else None
        return size


def _arithmetic(name: str, symbol: str) -> Callable[[Size, Any], Any]:
    plain = getattr(int, name)

    def operation(self: Size, other: Any) -> Any:
        value = plain(self, other)
        if type(value) is not int:
            return value
        made = Size.of(value, (*self.attributes, *getattr(other, "attributes", ())))
        words = self.text, getattr(other, "text", None)
        made.text = f"({words[0]} {symbol} {words[1]})" if symbol and all(words) else None
        return made

    return operation


for _name, _symbol in {"add": "+", "sub": "", "mul": "*", "floordiv": "", "mod": ""}.items():
    setattr(Size, f"__{_name}__", _arithmetic(f"__{_name}__", _symbol))
    setattr(Size, f"__r{_name}__", _arithmetic(f"__r{_name}__", ""))


def shapes(value: Any) -> list[Shape]:
    """The shapes of the tensors in `value`."""
    return [tuple(t.shape) for t in tensors(value)]


def fits(whole: list[Shape], here: list[Shape]) -> bool:
    """Whether the shapes `here` are those of the whole model, or less along some axes."""
    return len(whole) == len(here) and all(
        len(w) == len(h) and all(a >= b for a, b in zip(w, h, strict=True))
        for w, h in zip(whole, here, strict=True)
    )


def numbers(value: Any, of_tensors: bool = True) -> Iterator[float]:
    """The numbers in nested lists, tuples and mappings, in order.

    With `of_tensors`, a zero-dimensional tensor that is not on the meta device counts as a number.
    """
    if isinstance(value, (int, float)):  # including bool, the result of comparing sizes
        yield value
    elif isinstance(value, torch.Tensor):
        if of_tensors and value.dim() == 0 and not value.is_meta:
            yield float(value.detach())
    elif isinstance(value, (dict, Mapping)):  # `dict` first: checking `Mapping` is slow
        for item in value.values():
            yield from numbers(item, of_tensors)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers(item, of_tensors)


def product(values: Iterable[int]) -> int:
    """The product of the values."""
    result = 1
    for value in values:
        result *= int(value)
    return result


def groups(before: Shape, after: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """The axes before and after a reshape, in the smallest groups of equal product.

    `(2, 16, 768) -> (2, 16, 12, 64)` gives `[0]-[0]`, `[1]-[1]`, `[2]-[2, 3]`.
    """
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs = [], []
        left = right = 1
        if i < len(before):
            ins.append(i)
            left = before[i]
            i += 1
        if j < len(after):
            outs.append(j)
            right = after[j]
            j += 1
        while left != right:
            if left < right and i < len(before):
                left *= before[i]
                ins.append(i)
                i += 1
            elif j < len(after):
                right *= after[j]
                outs.append(j)
                j += 1
            else:
                break
        # Axes of size one join the group before them.
        while i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
            ins.append(i)
            i += 1
        while j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            outs.append(j)
            j += 1
        yield ins, outs
