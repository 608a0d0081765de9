"""Partial evaluation of expressions: a value is known, not None, a module, or unknown.

The caller evaluates names, attributes and calls; this module evaluates operators, conditions and
displays of them.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Constant:
    """A known value."""

    # To be written as source, it must be None, a number, a string, a bool, or a tuple of such;
    # otherwise any object.
    value: Any
    is_setting: bool = False  # whether it comes from the model's configuration, not from the source


@dataclass(frozen=True)
class Unknown:
    """A value that is only known at run time."""

    # Whether it is never None: an input tensor of the step, a module's result.
    is_given: bool = False
    cls: type | None = None  # its class, if known
    # The values of its attributes; None if they are not known.
    values: Mapping[str, Worth] | None = None
    is_module: bool = False  # whether it is a module of the model
    # The attributes that lead to that module from the method's own module, if it is known which
    # module it is.
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class KnownObject:
    """An object constructed by keyword arguments, of which only attributes are read."""

    cls: type  # its class
    texts: Mapping[str, str]  # the expression of each attribute
    values: Mapping[str, Worth]  # the value of each attribute


@dataclass(frozen=True)
class KnownKwargs:
    """Keyword arguments (`**kwargs`) whose names are all known."""

    texts: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Worth] = field(default_factory=dict)


Worth = Constant | Unknown | KnownObject | KnownKwargs
Of = Callable[[ast.expr], Worth]
NONE = Constant(None)
UNKNOWN = Unknown()

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_,
    ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_DISPLAYS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Tuple: lambda *items: items,
    ast.List: lambda *items: list(items),
    ast.Set: lambda *items: set(items),
}


# Built-in functions that `came_to` may call.
_CALLED: Mapping[str, Callable[..., Any]] = {
    f.__name__: f for f in (abs, bool, float, getattr, int, len, max, min, range, round, sum, tuple)
}


def came_to(expr: ast.expr, names: Mapping[str, Any]) -> Worth:
    """The value of an expression, given the values of names; UNKNOWN if it cannot be evaluated.

    It runs no code of the user's except for attribute access.
    """
    try:
        match expr:
            case ast.Name(id=name):
                return Constant(names[name])
            case ast.Attribute(value=owner, attr=attr):
                return applied(lambda value: getattr(value, attr), came_to(owner, names))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name not in names:
                return applied(_CALLED[name], *(came_to(each, names) for each in args))
        return computed(expr, lambda operand: came_to(operand, names)) or UNKNOWN
    except Exception:  # a property of the user's, a call of odd operands
        return UNKNOWN


def computed(expr: ast.expr, of: Of, calls: bool = True) -> Worth | None:
    """The value of an operator, condition or display; None for other expressions.

    With `calls`, unknown calls in a test do not prevent its decision: they may be left out.
    """
    match expr:
        case ast.Constant(value=value):
            return Constant(value)
        case (
            ast.NamedExpr(value=inner)
            | ast.FormattedValue(value=inner, conversion=-1, format_spec=None)
        ):
            return of(inner)
        case ast.Tuple(elts=elts) | ast.List(elts=elts) | ast.Set(elts=elts):
            found = applied(_DISPLAYS[type(expr)], *_elements(elts, of))
            return found if isinstance(found, Constant) else Unknown(True)
        case ast.Dict(keys=keys, values=values):
            parts = zip(keys, values, strict=True)
            pairs = (applied(dict, of(v)) if k is None else _pair(of(k), of(v)) for k, v in parts)
            return applied(lambda *each: {k: d[k] for d in each for k in d}, *pairs)
        case ast.JoinedStr(values=values):
            return applied(lambda *each: "".join(map(str, each)), *map(of, values))
        case ast.Slice(lower=lower, upper=upper, step=step):
            return applied(slice, *(NONE if e is None else of(e) for e in (lower, upper, step)))
        case ast.Subscript(value=value, slice=index):
            return _element(of(value), of(index))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            way = truth(operand, of, calls)
            return UNKNOWN if way is None else Constant(not way)
        case ast.UnaryOp(op=op, operand=operand):
            return operated(type(op), of(operand))
        case ast.BinOp(left=left, op=op, right=right):
            return operated(type(op), of(left), of(right))
        case ast.Compare():
            return _compared(expr, of)
        case ast.BoolOp():
            return _all_or_any(expr, of)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            one, other = of(body), of(orelse)
            if applied(operator.eq, Constant(one), Constant(other)) == Constant(True):
                return one
            way = truth(test, of, calls)
            return UNKNOWN if way is None else one if way else other
    return None


def truth(test: ast.expr, of: Of, calls: bool = True) -> bool | None:
    """The truth value of a test; None if it is not known.

    One operand of `and` or `or` may decide it, even if earlier ones are unknown.
    """
    if isinstance(test, ast.BoolOp):
        ways = [truth(operand, of, calls) for operand in test.values]
        stops = isinstance(test.op, ast.Or)
        if stops not in ways:
            return None if None in ways else not stops
        before = zip(test.values, ways[: ways.index(stops)], strict=False)
        unknown = (node for value, way in before if way is None for node in ast.walk(value))
        called = any(isinstance(node, ast.Call) for node in unknown)
        return None if called and not calls else stops
    return truth_of(of(test))


def truth_of(worth: Worth) -> bool | None:
    """The truth value of a value; None if it is not known."""
    if not isinstance(worth, Constant):
        return True if isinstance(worth, KnownObject) else None
    try:
        return bool(worth.value)
    except Exception:  # the truth of a user's object
        return None


def is_given(worth: Worth) -> bool:
    """Whether a value is known not to be None, although it is no constant."""
    return isinstance(worth, KnownObject | KnownKwargs) or (
        isinstance(worth, Unknown) and worth.is_given
    )


def applied(function: Callable[..., Any], *worths: Worth) -> Worth:
    """The result of a function for known values; UNKNOWN if one is unknown or the call fails."""
    values = [worth.value for worth in worths if isinstance(worth, Constant)]
    try:
        return Constant(function(*values)) if len(values) == len(worths) else UNKNOWN
    except Exception:  # an operator on odd operands, or a user's own
        return UNKNOWN


def operated(op: type[ast.AST], *worths: Worth) -> Worth:
    """The result of an operator."""
    if op in (ast.Is, ast.IsNot) and NONE in worths and any(map(is_given, worths)):
        return Constant(op is ast.IsNot)
    return applied(_OPERATORS[op], *worths) if op in _OPERATORS else UNKNOWN


def attribute_of(owner: Worth, name: str) -> Worth:
    """The value of an attribute of an object whose attributes are known."""
    if isinstance(owner, KnownObject | Unknown) and owner.values is not None:
        return owner.values.get(name, NONE)
    return UNKNOWN


def field_at(cls: type, values: Mapping[str, Worth], index: int) -> str | None:
    """The attribute at an index of a model output, which skips attributes that are None."""
    order = list(getattr(cls, "__dataclass_fields__", values))
    there = [n for n in order if values.get(n, NONE) != NONE]
    return there[index] if 0 <= index < len(there) else None


def is_plain(value: object) -> bool:
    """Whether a value is a number, a string, a bool, None, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, int | float | str | bool)


def _pair(key: Worth, value: Worth) -> Worth:
    return applied(lambda *both: dict([both]), key, value)


def _elements(elts: Iterable[ast.expr], of: Of) -> Iterator[Worth]:
    for each in elts:
        if isinstance(each, ast.Starred):
            several = applied(tuple, of(each.value))
            yield from map(Constant, several.value) if isinstance(several, Constant) else [UNKNOWN]
        else:
            yield of(each)


def _element(owner: Worth, index: Worth) -> Worth:
    if isinstance(owner, Constant):
        return applied(operator.getitem, owner, index)
    if isinstance(owner, KnownKwargs) and isinstance(index, Constant):
        return owner.values.get(index.value, UNKNOWN)
    if (
        isinstance(owner, KnownObject | Unknown)
        and owner.cls is not None
        and owner.values is not None
    ):
        at = index.value if isinstance(index, Constant) else None
        name = field_at(owner.cls, owner.values, at) if isinstance(at, int) else None
        return owner.values[name] if name else UNKNOWN
    return UNKNOWN


def _compared(expr: ast.Compare, of: Of) -> Worth:
    found: Worth = UNKNOWN
    left = of(expr.left)
    for op, part in zip(expr.ops, expr.comparators, strict=True):
        right = of(part)
        found = operated(type(op), left, right)
        if truth_of(found) is not True:
            return found
        left = right
    return found


def _all_or_any(expr: ast.BoolOp, of: Of) -> Worth:
    stops = isinstance(expr.op, ast.Or)
    unsure = False
    worth: Worth = UNKNOWN
    for operand in expr.values:
        worth = of(operand)
        way = truth_of(worth)
        if way is stops:
            # An earlier operand may end the evaluation with another value of the same truth.
            return UNKNOWN if unsure else worth
        unsure |= way is None
    return UNKNOWN if unsure else worth
