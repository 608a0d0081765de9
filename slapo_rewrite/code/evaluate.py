"""What an expression is worth before it runs: known, never None, a module, or unknown.

What names, attributes and calls are worth is handed in; here it is followed through operators,
choices and displays.
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

    # None, a number, a string, a flag, or a tuple of such where it is to be written down; any
    # object where it is only looked at.
    value: Any
    is_setting: bool = False  # whether the model's settings say it, not the text


@dataclass(frozen=True)
class Unknown:
    """A value that is known when the expression runs."""

    # Whether it is never None: a tensor that the step is given, a module's result.
    is_given: bool = False
    cls: type | None = None  # its class, where it is known
    # What its attributes are worth; None where nothing is known of them.
    values: Mapping[str, Worth] | None = None
    is_module: bool = False  # whether it is a module of the model
    # The attributes that lead to that module from the one whose method this is, where it is known
    # which one it is.
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class KnownObject:
    """An object that a call with keywords makes, of which only attributes are read."""

    cls: type  # its class
    texts: Mapping[str, str]  # the expression that each attribute is
    values: Mapping[str, Worth]  # what each is worth


@dataclass(frozen=True)
class KnownKwargs:
    """Keyword arguments that are handed on (`**kwargs`), all of them known by name."""

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


# Functions that are called to tell what an expression came to.
_CALLED: Mapping[str, Callable[..., Any]] = {
    f.__name__: f for f in (abs, bool, float, getattr, int, len, max, min, range, round, sum, tuple)
}


def came_to(expr: ast.expr, names: Mapping[str, Any]) -> Worth:
    """What an expression came to where names meant this; UNKNOWN where it cannot be told.

    Nothing of the user's is run but attribute access.
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
    """What an expression is worth by what its operands are; None where it is of another kind.

    With `calls` a call whose worth is unknown may be left out where a test is decided.
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
    """How a test comes out; None where that is not known.

    One operand may be enough, whatever those before it are.
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
    """Whether a value counts as true, where that is known."""
    if not isinstance(worth, Constant):
        return True if isinstance(worth, KnownObject) else None
    try:
        return bool(worth.value)
    except Exception:  # the truth of a user's object
        return None


def is_given(worth: Worth) -> bool:
    """Whether a value that is no constant is never None."""
    return isinstance(worth, KnownObject | KnownKwargs) or (
        isinstance(worth, Unknown) and worth.is_given
    )


def applied(function: Callable[..., Any], *worths: Worth) -> Worth:
    """What a function gives for known values; unknown where it fails."""
    values = [worth.value for worth in worths if isinstance(worth, Constant)]
    try:
        return Constant(function(*values)) if len(values) == len(worths) else UNKNOWN
    except Exception:  # an operator on odd operands, or a user's own
        return UNKNOWN


def operated(op: type[ast.AST], *worths: Worth) -> Worth:
    """What an operator gives."""
    if op in (ast.Is, ast.IsNot) and NONE in worths and any(map(is_given, worths)):
        return Constant(op is ast.IsNot)
    return applied(_OPERATORS[op], *worths) if op in _OPERATORS else UNKNOWN


def attribute_of(owner: Worth, name: str) -> Worth:
    """What an attribute of an object that the text makes is worth."""
    if isinstance(owner, KnownObject | Unknown) and owner.values is not None:
        return owner.values.get(name, NONE)
    return UNKNOWN


def field_at(cls: type, values: Mapping[str, Worth], index: int) -> str | None:
    """The attribute that a number means: those that are None are not counted."""
    order = list(getattr(cls, "__dataclass_fields__", values))
    there = [n for n in order if values.get(n, NONE) != NONE]
    return there[index] if 0 <= index < len(there) else None


def is_plain(value: object) -> bool:
    """Whether a value is a number, a string, a flag, None, or a tuple of such."""
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
            # What stands before it may end the evaluation with another value, as true or false.
            return UNKNOWN if unsure else worth
        unsure |= way is None
    return UNKNOWN if unsure else worth
