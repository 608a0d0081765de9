"""The values of loop variables in each iteration, for unrolling."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_rewrite.code.evaluate import Constant, Unknown, Worth
from slapo_rewrite.groups import grouped
from slapo_rewrite.stages.environment import Count, Environment, rounds_of


@dataclass(frozen=True)
class Item:
    """An element of an iterable that is no list of modules."""

    listed: ast.expr  # the iterable
    number: int  # the index in it, from the end if negative


# The value of a loop target in one iteration; a tuple for several.
Given = Worth | Item | tuple[Any, ...]


class Rounds:
    """The iterations of a loop; `names` is the environment before it."""

    def __init__(self, names: Environment, loop: ast.For) -> None:
        self.names, self.loop = names, loop
        # The settings that decide this: lengths of lists of modules, and numbers.
        self.relied_on: dict[str, Any] = {}
        self.number = self._length(loop.iter)  # the number of iterations; None if not known

    def given(self, number: int) -> list[tuple[ast.expr, Given]]:
        """The values of the loop's variables in one iteration."""
        return list(self._bound(self.loop.target, self._element(self.loop.iter, number)))

    def modules(self) -> dict[str, list[Any]]:
        """The loop's variables that are modules, each with all of its modules."""
        every = (pair for number in range(self.number or 0) for pair in self.given(number))
        return grouped(
            (target.id, self.names.found_at([*given.steps]))
            for target, given in every
            if isinstance(target, ast.Name) and isinstance(given, Unknown) and given.is_module
        )

    def _bound(self, target: ast.expr, given: Given) -> Iterator[tuple[ast.expr, Given]]:
        if isinstance(target, ast.Tuple) and isinstance(given, Unknown):
            names = rounds_of(self.names.found_at([*given.steps] or None))
            given = tuple(self._layer([*given.steps], name) for name in names)
        if isinstance(target, ast.Tuple) and isinstance(given, tuple):
            for inner, each in zip(target.elts, given, strict=False):
                yield from self._bound(inner, each)
        else:
            yield target, given

    def _length(self, listed: ast.expr) -> int | None:
        """The number of elements of an iterable, if known."""
        match self._called(listed):
            case "range", numbers, []:
                return None if (found := self._range(numbers)) is None else len(found)
            case "zip", several, []:
                lengths = [self._length(each) for each in several]
                beside = [each for each, n in zip(several, lengths, strict=True) if n is None]
                if not all(map(self._is_list, beside)):
                    return None
                return min((each for each in lengths if each is not None), default=None)
            case "enumerate" | "reversed", [inner, *_], _:
                return self._length(inner)
        if (chosen := self._chosen(listed)) is not None:
            return len(chosen)
        steps = self.names.chain(listed)
        names = rounds_of(self.names.found_at(steps))
        if names and steps is not None:
            self.relied_on[self.names.path_of(steps)] = Count(len(names))
        return len(names) or None

    def _element(self, listed: ast.expr, number: int) -> Given:
        """An element of an iterable."""
        match self._called(listed):
            case "range", numbers, []:
                found = self._range(numbers)
                return Unknown(True) if found is None else Constant(found[number])
            case "zip", several, []:
                return tuple(self._element(each, number) for each in several)
            case "enumerate", [inner, *more], named:
                start = [ast.literal_eval(each) for each in (*more, *named)]
                return Constant(sum(start, number)), self._element(inner, number)
            case "reversed", [inner], []:
                total = self._length(inner)
                return self._element(inner, -1 - number if total is None else total - 1 - number)
        if isinstance(listed, ast.Subscript) and (chosen := self._chosen(listed)) is not None:
            return self._element(listed.value, chosen[number])
        steps = self.names.chain(listed)
        if names := rounds_of(self.names.found_at(steps)):
            return self._layer(steps or [], names[number])
        return Item(listed, number)

    @staticmethod
    def _layer(steps: list[str], name: str) -> Unknown:
        return Unknown(True, is_module=True, steps=(*steps, name))

    def _called(self, listed: ast.expr) -> tuple[str, Sequence[ast.expr], Sequence[ast.expr]]:
        """The name and arguments of a call of a built-in function; '' for anything else."""
        match listed:
            case ast.Call(func=ast.Name(id=name) as function, args=args, keywords=keywords):
                named = [k.value for k in keywords if k.arg == "start"]
                if getattr(self.names.global_at(function), "__module__", "") == "builtins":
                    return name, args, named if len(named) == len(keywords) else [listed]
        return "", (), ()

    def _is_list(self, listed: ast.expr) -> bool:
        """Whether an expression has no calls, so that each iteration may index it."""
        match self._called(listed):
            case "reversed", [inner], []:
                return self._is_list(inner)
        return not any(isinstance(node, ast.Call) for node in ast.walk(listed))

    def _chosen(self, listed: ast.expr) -> range | None:
        """The indices of the layers in a slice of a list."""
        if not isinstance(listed, ast.Subscript) or not isinstance(listed.slice, ast.Slice):
            return None
        total = self._length(listed.value)
        ends = (listed.slice.lower, listed.slice.upper, listed.slice.step)
        bounds = [None if end is None else self._number(end) for end in ends]
        if total is None or any(e and n is None for e, n in zip(ends, bounds, strict=True)):
            return None
        return range(total)[slice(*bounds)]

    def _range(self, bounds: Sequence[ast.expr]) -> range | None:
        """The result of a call of `range`, if known."""
        numbers = [number for each in bounds if (number := self._number(each)) is not None]
        return range(*numbers) if numbers and len(numbers) == len(bounds) else None

    def _number(self, node: ast.expr) -> int | None:
        """The value of a number that is known before the model runs."""
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self._number(operand)
                return None if number is None else -number
            case ast.Call() if (called := self._called(node))[0] == "len" and len(called[1]) == 1:
                return self._length(called[1][0])
        found = self.names.value(node, self.relied_on)
        is_number = isinstance(found, Constant) and type(found.value) is int
        return found.value if is_number else None  # type: ignore[union-attr]
