"""Alias analysis: finds values that a function passes on and changes in place afterwards."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slapo_rewrite.code.arguments import values_given
from slapo_rewrite.code.blocks import blocks
from slapo_rewrite.code.effects import is_in_place
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.subgraphs import (
    MUTATING,
    OF_TORCH,
    Obstacle,
    changing,
    is_size,
    own_nodes,
    root_of,
)

# Methods whose result may be their object, or share memory with it.
_SHARING = """
view view_as reshape reshape_as transpose swapaxes swapdims t adjoint permute movedim unsqueeze
squeeze flatten unflatten ravel expand expand_as chunk split tensor_split unbind select narrow
diagonal unfold detach contiguous to type type_as float double half bool long int values items
"""
_TAKING = ("get", "pop", "popitem", "popleft", "setdefault")  # methods that return an element
_Values = frozenset[object]
_NONE: _Values = frozenset()
# Tags of values that were passed on along one path only, and of elements of another value.
HANDED, PART = "handed", "part"
DEEPEST = 2  # the nesting depth of elements; deeper ones count as the same value
ANY_OF_SELF = "self.*"  # an attribute of `self` with a computed name


@dataclass(frozen=True)
class _State:
    """The state of the analysis at a statement."""

    means: Mapping[str, _Values]  # the values that a name may have
    handed: _Values = _NONE  # the values that were passed on

    def of(self, key: str) -> _Values:
        """The values of a name, or of an attribute of `self`."""
        return self.means.get(key, frozenset({key}))

    def joined(self, other: _State) -> _State:
        """Merges the states of two paths.

        A value that was passed on along one path only becomes a value of its own: on the other path
        a name may still have the value without it being passed on.
        """
        one, two = self._apart(other), other._apart(self)
        keys = one.means.keys() | two.means.keys()
        means = {key: one.of(key) | two.of(key) for key in keys}
        return _State(means, one.handed | two.handed)

    def _apart(self, other: _State) -> _State:
        only: dict[object, object] = {v: (HANDED, v) for v in self.handed - other.handed}
        keys = self.means.keys() | {value for value in only if isinstance(value, str)}
        means = {key: frozenset(only.get(v, v) for v in self.of(key)) for key in keys}
        return _State(means, frozenset(only.get(v, v) for v in self.handed))


@dataclass
class Handed:
    """Tracks the values that a function passes on."""

    # The expressions that an expression passes on.
    handed: Callable[[ast.expr], Iterable[ast.expr]] = lambda _: ()
    # The arguments that a call changes in place.
    changed: Callable[[ast.Call], Iterable[ast.expr]] = lambda _: ()
    # Whether an argument of a call counts as None.
    absent: Callable[[ast.Call, ast.expr], bool] = lambda *_: False
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _held: dict[object, _Values] = field(default_factory=dict)  # the contents of containers
    _found: list[Obstacle] = field(default_factory=list)

    def changed_later(
        self, function: ast.FunctionDef, given: Iterable[str] = ()
    ) -> Obstacle | None:
        """The first change of a value that was passed on, or of an argument in `given`."""
        self._found.clear()
        if function.args.kwarg is not None:  # `**kwargs` is a new dictionary with other values
            self._held[function.args.kwarg.arg] = frozenset({next(self._numbers)})
        self._through(function.body, _State({}, frozenset(given)))
        return self._found[0] if self._found else None

    def hands_on(self, function: ast.FunctionDef, name: str) -> bool:
        """Whether a function passes on its argument of this name."""
        self._found.clear()
        return any(_base(v) == name for v in self._through(function.body, _State({})).handed)

    def _through(self, body: Sequence[ast.stmt], state: _State) -> _State:
        for statement in body:
            if not self._found:
                state = self._past(statement, state)
        return state

    def _past(self, statement: ast.stmt, state: _State) -> _State:
        state = self._own(statement, state)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return state
        if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
            once = self._through(statement.body, state)
            twice = self._through(statement.body, once)  # may change what the first one passed on
            return self._through(statement.orelse, state.joined(once).joined(twice))
        if isinstance(statement, ast.If):
            ways = (self._through(body, state) for body in (statement.body, statement.orelse))
            return next(ways).joined(next(ways))
        for block in blocks(statement):
            is_certain = isinstance(statement, ast.With)
            past = self._through(block, state)
            state = past if is_certain else state.joined(past)
        return state

    def _own(self, statement: ast.stmt, state: _State) -> _State:
        """Processes a statement without its blocks: changes, values passed on, assignments."""
        self._check(statement, state)
        nodes = own_nodes(statement)
        for node in nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in MUTATING:
                    self._hold(self._values(owner, state), values_given(node), state)
        given = [each for node in nodes for each in self.handed(node)]
        values = self._whole(_NONE.union(*(self._values(each, state) for each in given)))
        state = _State(state.means, state.handed | values)
        match statement:
            case ast.AugAssign(target=ast.Name(id=name), value=ast.Tuple() as more):
                # `+=` with a tuple does not work in place.
                added = state.of(name) | self._values(more, state)
                return _State({**state.means, name: added}, state.handed)
            case ast.AugAssign():
                self._check(statement, state)
            case ast.Assign(targets=targets, value=value):
                self._check(ast.Assign(targets, ast.Constant(None)), state)
                return self._bound(targets, value, state)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                return self._bound([target], value, state)
            case ast.For(target=target, iter=value):
                return self._bound([target], value, state, is_element=True)
            case ast.FunctionDef(name=name):  # an inner function holds the variables that it reads
                read = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
                return _State({**state.means, name: self._holding(read, state)}, state.handed)
        return state

    def _bound(
        self, targets: Iterable[ast.expr], value: ast.expr, state: _State, is_element: bool = False
    ) -> _State:
        means = dict(state.means)
        for target in targets:
            match target, value:
                case ast.Tuple(elts=names), ast.Tuple(elts=values) if (
                    len(names) == len(values) and not is_element
                ):
                    pairs = [*zip(names, values, strict=True)]
                case _:
                    pairs = [(target, value)]
            for one, its in pairs:
                known = self._values(its, state)
                if is_element or (
                    isinstance(one, ast.Tuple | ast.List) and not isinstance(its, ast.Call)
                ):
                    known |= self._values(ast.Starred(its), state)
                for name in ast.walk(one):
                    match name:
                        case (
                            ast.Name(ctx=ast.Store())
                            | ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store())
                        ):
                            means[str(_key(name))] = known
                        case (
                            ast.Attribute(value=owner, ctx=ast.Store())
                            | ast.Subscript(value=owner, ctx=ast.Store())
                        ):
                            self._hold(self._values(owner, state), [its], state)
        return _State(means, state.handed)

    def _check(self, statement: ast.stmt, state: _State) -> None:
        is_added = isinstance(statement, ast.AugAssign) and isinstance(statement.value, ast.Tuple)
        if is_added or not state.handed:
            return

        handed = _with_parts(state.handed)

        def root(expr: ast.expr) -> str | None:
            values = self._values(expr, state)
            is_handed = not values.isdisjoint(handed)
            return ast.unparse(expr) if is_handed else None

        found = changing(statement, root)
        for call in (node for node in own_nodes(statement) if isinstance(node, ast.Call)):
            for given in self.changed(call):
                parts = given.elts if isinstance(given, ast.List | ast.Tuple) else [given]
                each = next((part for part in parts if root(part) is not None), None)
                if each is not None and found is None:
                    found = Obstacle(call, f"changes `{ast.unparse(each)}` in place", "")
        if found is not None:
            self._found.append(found)

    def _values(self, expr: ast.expr, state: _State) -> _Values:
        """The values that an expression may have; a computed one is new."""
        match expr:
            case ast.Constant():
                return frozenset()
            case ast.Tuple(elts=parts):  # immutable: only its elements can change
                return _NONE.union(*(self._values(part, state) for part in parts))
            case ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(values=parts):
                return self._holding(parts, state)
            case ast.Lambda(body=body):
                return self._holding([n for n in ast.walk(body) if isinstance(n, ast.Name)], state)
            case ast.Call(func=func) if not (
                isinstance(func, ast.Attribute) or is_name(func, "getattr")
            ) or _is_made(func):
                given = [each for each in values_given(expr) if not self.absent(expr, each)]
                return self._holding(given, state)  # for example, a new object
            case (
                ast.ListComp(elt=element, generators=over)
                | ast.GeneratorExp(elt=element, generators=over)
            ):  # its elements are those of the iterables, or made from them
                return self._holding([element, *(ast.Starred(each.iter) for each in over)], state)
            case ast.Call(func=ast.Name(id="enumerate" | "zip" | "reversed"), args=args):
                return self._holding([ast.Starred(each) for each in args], state)
            case ast.Starred(value=value):  # the elements, not the list itself
                values = self._values(value, state)
                inside = (v for v in self._whole(values) if v not in values or not self._holds(v))
                return _parts(values).union(inside)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _TAKING:
                taken = [ast.Starred(value), *values_given(expr)]
                return _NONE.union(*(self._values(each, state) for each in taken))
            case ast.IfExp(body=one, orelse=other):
                return self._values(one, state) | self._values(other, state)
            case ast.BoolOp(values=parts):
                return _NONE.union(*(self._values(part, state) for part in parts))
            case ast.NamedExpr(value=value):
                return self._values(value, state)
            case ast.Call() if (shared := _shared(expr)) is not None and _key(shared) is None:
                return self._whole(self._values(shared, state))
        key = None if is_size(expr) else _key(expr)
        if key is None:
            return frozenset({next(self._numbers)})
        match expr:
            case ast.Name() | ast.Attribute(value=ast.Name(id="self")):
                return state.of(key)
            case (
                ast.Subscript(value=value, slice=ast.Constant() | ast.UnaryOp())
                | ast.Attribute(value=ast.Attribute(ast.Name("self"), "config") as value)
            ):
                # An element does not change when something is appended to its list; nor does a
                # value of a configuration when the configuration is changed.
                values = self._values(value, state)
                return (self._whole(values) - values) | _parts(values)
        return _with_parts(self._whole(state.of(key)))

    def _holding(self, parts: Iterable[ast.expr], state: _State) -> _Values:
        """A new value that contains others."""
        made: _Values = frozenset({next(self._numbers)})
        self._hold(made, parts, state)
        return made

    def _hold(self, holders: _Values, values: Iterable[ast.expr], state: _State) -> None:
        """Records that some values now contain others."""
        held = _NONE.union(*(self._values(value, state) for value in values))
        for holder in map(_base, holders):
            self._held[holder] = self._held.get(holder, _NONE) | held

    def _holds(self, value: object) -> bool:
        """Whether the contents of a value are known, as those of a list or a dictionary."""
        return _base(value) in self._held

    def _whole(self, values: _Values) -> _Values:
        """Some values and their contents, at any depth."""
        held = _NONE.union(*(self._held.get(_base(value), _NONE) for value in values))
        held |= {(HANDED, value) for value in held if _base(value) == value}
        return values if held <= values else self._whole(values | held)


def _parts(values: _Values) -> _Values:
    """The elements of some values; at the greatest depth, an element is its own element."""
    return frozenset(each if _depth(each) == DEEPEST else (PART, each) for each in values)


def _with_parts(values: _Values) -> _Values:
    """Some values, their elements, and the elements of these."""
    for _ in range(DEEPEST):
        values |= _parts(values)
    return values


def _depth(value: object) -> int:
    """The nesting depth of an element in its value."""
    return (value[0] == PART) + _depth(value[1]) if isinstance(value, tuple) else 0


def _is_made(function: ast.expr) -> bool:
    """Whether a called function may return an object that contains its arguments."""
    return root_of(function) in ("functools", "collections", "copy")


def _base(value: object) -> object:
    """The value without its tags."""
    return _base(value[1]) if isinstance(value, tuple) else value


def _key(expr: ast.expr) -> str | None:
    """The name, or attribute of `self`, that an expression is, or is an element or view of."""
    while True:
        match expr:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                return f"self.{attr}"
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Name(id="self"), ast.Constant(value=str(attr)), *_],
            ):
                return f"self.{attr}"
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), *_]):
                return ANY_OF_SELF
            case ast.Call(func=ast.Name(id="getattr"), args=[value, *_]):
                expr = value
            case ast.Attribute(value=value) | ast.Subscript(value=value):
                expr = value
            case ast.Call() if (shared := _shared(expr)) is not None:
                expr = shared
            case _:
                return None


def _shared(call: ast.Call) -> ast.expr | None:
    """The operand that the result of a method or torch function may share memory with."""
    if not isinstance(call.func, ast.Attribute):
        return None
    name = call.func.attr
    is_changed = is_in_place(name) or any(k.arg == "inplace" for k in call.keywords)
    if not (is_changed or name in _SHARING.split()):
        return None
    is_torchs = root_of(call.func) in OF_TORCH
    return next(iter(values_given(call)), None) if is_torchs else call.func.value
