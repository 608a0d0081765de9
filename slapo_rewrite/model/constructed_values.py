"""Works out what a source expression came to where the variables around it are known.

Nothing of the user's is run but attribute access: names are looked up among the variables, all else
is `Unknown`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slapo_rewrite.code.evaluate import UNKNOWN, Constant, Worth, computed, truth

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(abs, all, any, bool, dict, divmod, enumerate, float, frozenset, getattr, hasattr, int),
    *(isinstance, issubclass, len, list, max, min, range, reversed, round, set, sorted, str),
    *(sum, tuple, type, zip),
)
_BUILTINS = {f.__name__: f for f in _FUNCTIONS}
_METHODS = {"count", "endswith", "get", "get_text_config", "index", "items", "keys", "lower"}
_METHODS |= {"removeprefix", "removesuffix", "split", "startswith", "strip", "upper", "values"}


class Unknown(Exception):
    """What an expression comes to cannot be told."""


def value_of(expr: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression came to where names meant this.

    Raises:
        Unknown: It cannot be told.
    """
    worth = _worth(expr, names)
    if not isinstance(worth, Constant):
        raise Unknown
    return worth.value


def _worth(expr: ast.expr, names: Mapping[str, Any]) -> Worth:
    def of(operand: ast.expr) -> Worth:
        return _worth(operand, names)

    try:
        match expr:
            case ast.Name(id=name):
                return Constant(names[name] if name in names else _BUILTINS[name])
            case ast.Attribute(value=owner, attr=attr):
                return Constant(getattr(value_of(owner, names), attr))
            case ast.Call():
                return Constant(_called(expr, names))
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                turns = _turns(expr.generators, names)
                return Constant([value_of(expr.elt, inner) for inner in turns])
        return computed(expr, of) or UNKNOWN
    except Exception:  # a property of the user's, a method on odd operands
        return UNKNOWN


def _called(expr: ast.Call, names: Mapping[str, Any]) -> Any:
    if any(k.arg is None for k in expr.keywords):
        raise Unknown
    match expr.func:
        case ast.Name(id=name) if name in _BUILTINS and name not in names:
            function = _BUILTINS[name]
        case ast.Attribute(value=owner, attr=attr) if attr in _METHODS:
            function = getattr(value_of(owner, names), attr)
        case ast.Attribute() | ast.Name() if not expr.args and not expr.keywords:
            function = value_of(expr.func, names)
            name = getattr(function, "__name__", "")
            if not (name.startswith("is_") and name.endswith("_available")):
                raise Unknown
        case _:
            raise Unknown
    args = value_of(ast.Tuple(expr.args), names)
    return function(*args, **{str(k.arg): value_of(k.value, names) for k in expr.keywords})


def _turns(
    generators: list[ast.comprehension], names: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    first, *rest = generators
    for value in value_of(first.iter, names):
        inner = {**names, **_destructured(first.target, value)}
        ways = [truth(test, functools.partial(_worth, names=inner)) for test in first.ifs]
        if None in ways:
            raise Unknown
        if all(ways):
            yield from _turns(rest, inner) if rest else [inner]


def _destructured(target: ast.expr, value: Any) -> dict[str, Any]:
    if isinstance(target, ast.Name):
        return {target.id: value}
    if isinstance(target, ast.Tuple | ast.List) and not any(
        isinstance(e, ast.Starred) for e in target.elts
    ):
        names: dict[str, Any] = {}
        for inner, part in zip(target.elts, list(value), strict=True):
            names |= _destructured(inner, part)
        return names
    raise Unknown
