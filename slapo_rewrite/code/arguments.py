"""The parameters of a function, and which of them each argument of a call is for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Signature:
    """What a function takes."""

    positional: tuple[str, ...]  # the parameters that can be given by position, in order
    named: tuple[str, ...]  # those that can be given by name
    rest: str | None = None  # the parameter that takes all further positions (`*args`)
    options: str | None = None  # the parameter that takes all further names (`**kwargs`)
    # What the parameters that may be left out are then.
    defaults: Mapping[str, ast.expr] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Function, bound: bool = False) -> Signature:
        """The signature of a function; of a method without its first parameter where `bound`."""
        own = function.args
        positional = [a.arg for a in (*own.posonlyargs, *own.args)]
        named = [a.arg for a in (*own.args, *own.kwonlyargs)]
        defaults = dict(zip(reversed(positional), reversed(own.defaults), strict=False))
        pairs = zip(own.kwonlyargs, own.kw_defaults, strict=True)
        defaults |= {a.arg: default for a, default in pairs if default is not None}
        return cls(
            tuple(positional[bound:]),
            tuple(named[bound and not own.posonlyargs :]),
            own.vararg.arg if own.vararg else None,
            own.kwarg.arg if own.kwarg else None,
            defaults,
        )

    @property
    def names(self) -> list[str]:
        """The parameters in order, those for all further arguments left out."""
        return list(dict.fromkeys([*self.positional, *self.named]))

    def bind(self, arguments: Iterable[tuple[str, V]]) -> BoundArguments[V]:
        """Says for which parameter each argument is.

        They are as they stand in a call: each with its name, which is '' where it has none, `*` or
        `**` where it stands for several.
        """
        found = BoundArguments[V](self)
        number = 0
        for key, value in arguments:
            if key == "**":
                found.spread.append(value)
            elif key == "*" or (not key and found.stars):
                found.stars.append(value)
            elif not key and number == len(self.positional):
                found.rest.append(value)
            elif key and key not in self.named:
                found.extra.append((key, value))
            else:
                name = key or self.positional[number]
                number += not key
                if name in found.given:
                    found.repeated.append(name)
                found.given[name] = value
        return found


@dataclass
class BoundArguments(Generic[V]):
    """The arguments of a call by the parameters of what it calls."""

    signature: Signature  # what it calls takes
    # What parameters are given, in the order of the call.
    given: dict[str, V] = field(default_factory=dict)
    rest: list[V] = field(default_factory=list)  # what is given by position after the last of them
    # What is given by a name that none of them has.
    extra: list[tuple[str, V]] = field(default_factory=list)
    # The parameters that are given twice, as no call may.
    repeated: list[str] = field(default_factory=list)
    # From the first `*xs` on all that is given by position, whatever it is for.
    stars: list[V] = field(default_factory=list)
    spread: list[V] = field(default_factory=list)  # what may give any name: each `**xs`

    @property
    def missing(self) -> list[str]:
        """The parameters that no argument is for, unless a star gives them."""
        return [name for name in self.signature.names if name not in self.given]


def given_by(call: ast.Call) -> list[tuple[str, ast.expr]]:
    """The arguments of a call, as they are bound."""
    stars = (("*", a.value) if isinstance(a, ast.Starred) else ("", a) for a in call.args)
    return [*stars, *((k.arg or "**", k.value) for k in call.keywords)]


def values_given(call: ast.Call) -> list[ast.expr]:
    """The arguments of a call, by position first."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def arguments_by(call: ast.Call, *names: str) -> dict[str, ast.expr]:
    """What a call certainly gives the parameters of these names, which are all that there are."""
    return Signature(names, names).bind(given_by(call)).given


def argument_of(function: ast.FunctionDef, call: ast.Call, name: str) -> ast.expr | None:
    """The expression that a call gives a parameter, its default where the call does not give it.

    Of `*args` it is a tuple of those that the call gives. None where that cannot be told: a star
    argument may hide it, or there is no such parameter.
    """
    signature = Signature.of(function, bound=first_parameter(function) in ("self", "cls"))
    bound = signature.bind(given_by(call))
    if name == signature.rest:
        first = len(signature.positional)
        hidden = any(isinstance(a, ast.Starred) for a in call.args[:first])
        return None if hidden else ast.Tuple(call.args[first:], ast.Load())
    by_star = bound.spread or (bound.stars and name in signature.positional)
    return (bound.given if name in bound.given or by_star else signature.defaults).get(name)


def all_arguments(function: Function) -> list[ast.arg]:
    """Every parameter of a function as it stands there: by position, by name alone, starred."""
    own = function.args
    found = [*own.posonlyargs, *own.args, *own.kwonlyargs]
    return found + [a for a in (own.vararg, own.kwarg) if a]


def parameters(function: Function) -> list[str]:
    """The names of all parameters of a function, starred ones last."""
    return [a.arg for a in all_arguments(function)]


def first_parameter(function: Function) -> str | None:
    """The first parameter that can be given by position: what a method calls its object."""
    return next(iter(Signature.of(function).positional), None)


def passed_on(method: ast.FunctionDef, by_name: bool = True) -> Iterator[str]:
    """The arguments of a method's caller, handed on as they came."""
    takes = Signature.of(method, bound=True)
    for name in takes.positional:
        optional = by_name and name in takes.defaults and name in takes.named and not takes.rest
        yield f"{name}={name}" if optional else name
    if takes.rest:
        yield f"*{takes.rest}"
    for name in takes.named:
        if name not in takes.positional:
            yield f"{name}={name}"
    if takes.options:
        yield f"**{takes.options}"
