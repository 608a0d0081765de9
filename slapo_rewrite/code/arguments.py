"""The parameters of functions, and the binding of a call's arguments to them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Signature:
    """The parameters of a function."""

    positional: tuple[str, ...]  # the parameters that can be passed by position, in order
    named: tuple[str, ...]  # those that can be passed by name
    rest: str | None = None  # the parameter for further positional arguments (`*args`)
    options: str | None = None  # the parameter for further keyword arguments (`**kwargs`)
    # The defaults of optional parameters.
    defaults: Mapping[str, ast.expr] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Function, bound: bool = False) -> Signature:
        """The signature of a function; if `bound`, without the first parameter of a method."""
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
        """The parameters in order, without `*args` and `**kwargs`."""
        return list(dict.fromkeys([*self.positional, *self.named]))

    def bind(self, arguments: Iterable[tuple[str, V]]) -> BoundArguments[V]:
        """Binds the arguments of a call to parameters.

        They are in the order of the call, each with its name: '' for a positional one, `*` or `**`
        for an unpacked one.
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
    """The arguments of a call, bound to the parameters of the called function."""

    signature: Signature  # the parameters
    # The argument of each parameter, in the order of the call.
    given: dict[str, V] = field(default_factory=dict)
    rest: list[V] = field(default_factory=list)  # positional arguments after the last parameter
    # Keyword arguments without a parameter of that name.
    extra: list[tuple[str, V]] = field(default_factory=list)
    # Parameters with two arguments, which is an error.
    repeated: list[str] = field(default_factory=list)
    # All positional arguments from the first `*xs` on, whose parameters are not known.
    stars: list[V] = field(default_factory=list)
    spread: list[V] = field(default_factory=list)  # each `**xs`, which may have any names

    @property
    def missing(self) -> list[str]:
        """The parameters without an argument, unless an unpacked one has it."""
        return [name for name in self.signature.names if name not in self.given]


def given_by(call: ast.Call) -> list[tuple[str, ast.expr]]:
    """The arguments of a call, in the form that `Signature.bind` takes."""
    stars = (("*", a.value) if isinstance(a, ast.Starred) else ("", a) for a in call.args)
    return [*stars, *((k.arg or "**", k.value) for k in call.keywords)]


def values_given(call: ast.Call) -> list[ast.expr]:
    """The argument expressions of a call, positional ones first."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def arguments_by(call: ast.Call, *names: str) -> dict[str, ast.expr]:
    """The known arguments of a call of a function with these parameters, by name."""
    return Signature(names, names).bind(given_by(call)).given


def argument_of(function: ast.FunctionDef, call: ast.Call, name: str) -> ast.expr | None:
    """The argument expression of a parameter in a call, or the parameter's default.

    For `*args` it is a tuple of the arguments. None if it is not known, since an unpacked argument
    may have it, or if there is no such parameter.
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
    """All parameters of a function: positional, keyword-only, starred."""
    own = function.args
    found = [*own.posonlyargs, *own.args, *own.kwonlyargs]
    return found + [a for a in (own.vararg, own.kwarg) if a]


def parameters(function: Function) -> list[str]:
    """The names of all parameters of a function, starred ones last."""
    return [a.arg for a in all_arguments(function)]


def first_parameter(function: Function) -> str | None:
    """The first positional parameter: `self` of a method."""
    return next(iter(Signature.of(function).positional), None)


def passed_on(method: ast.FunctionDef, by_name: bool = True) -> Iterator[str]:
    """The arguments of a call that passes a method's own parameters on."""
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
