"""Value graphs: the data flow of a function.

A value is the result of one expression: an operation on other values. Local names, temporaries and
rebinding do not appear in the graph; the graph only records the statement of each value, and the
names that have it there.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from slapo_rewrite.code.file import SourceFile

# A compound statement or conditional expression, and the name of one of its bodies.
Arm = tuple[ast.AST, str]
Arguments = tuple[tuple[str, "Value"], ...]

LEAVES = {"constant", "parameter", "attribute", "name", "self", "training"}


@dataclass(frozen=True, eq=False)
class Use:
    """A use of a value."""

    node: ast.AST  # the expression or statement that reads it
    by: Value | None  # the value computed from it; None if a statement itself reads it
    why: str  # what the statement does with it
    order: tuple[int, ...]  # its position in the order of evaluation


@dataclass(eq=False)
class Value:
    """The result of one expression."""

    operation: str  # the canonical name of the operation, or one of `LEAVES`
    arguments: Arguments  # its operands and options by name, including defaults
    file: SourceFile  # the file of the expression
    node: ast.AST  # the expression, or the statement of an augmented assignment or a branch
    order: tuple[int, ...]  # its position in the order of evaluation; later ones compare greater
    literal: object = None  # a constant's value; the name or path of another leaf
    # The branches, loops and `with` blocks around it, from the outside in.
    regions: tuple[Arm, ...] = ()
    statement: ast.stmt | None = None  # the statement that contains it
    bases: frozenset[object] = frozenset()  # identifies the memory that it may share
    uses: list[Use] = field(default_factory=list)  # its uses
    overwrites: Value | None = None  # the operand that it overwrites in place
    random: bool = False  # whether it draws random numbers, or may do so
    pure: bool = True  # whether equal operands always give an equal value
    number: bool = False  # whether it is a number, a shape or a bool: certainly not a tensor
    called: str | None = None  # the path of the called submodule
    # The attribute of the module that a constant, or the training flag, is read from.
    path: str | None = None
    given: Arguments = ()  # the arguments of that call in order: keyword, or '', and value
    # Returns the called function's result, in terms of the arguments.
    look_through: Callable[[], Value | None] | None = None
    # If the value is in the body of a called function: the call in the outermost function.
    inside: Value | None = None
    commutes: bool = False  # whether the first two arguments commute
    lazy: bool = False  # whether it is a merge of values that nothing has used so far
    stateful: bool = False  # whether it is a call of a module with parameters or buffers

    def __repr__(self) -> str:
        return f"<{self.operation} {self.literal!r}>" if self.is_leaf else f"<{self.operation}>"

    @property
    def is_leaf(self) -> bool:
        """Whether it is not computed: a constant, parameter, attribute or name."""
        return self.operation in LEAVES

    @property
    def site(self) -> Value:
        """The value, or the call in the outermost function whose body contains it."""
        return self.inside or self

    @functools.cached_property
    def inner(self) -> Value | None:
        """The value that the called function returns, if it can be determined."""
        return self.look_through() if self.look_through is not None else None

    def walk(self) -> Iterator[Value]:
        """The value and all values it is computed from, each once."""
        return walk([self])


def walk(values: Iterable[Value], through: bool = False) -> Iterator[Value]:
    """Some values and all values they are computed from, each once.

    With `through`, the results of called functions' bodies are included.
    """
    seen: set[int] = set()
    pending = [*reversed([*values])]
    while pending:
        value = pending.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            pending += [v for _, v in reversed(value.arguments)]
            pending += [value.inner] if through and value.inner is not None else []


@dataclass(frozen=True, eq=False)
class Mutation:
    """A write to a value's memory."""

    target: Value  # the value
    node: ast.AST  # the expression or statement that writes
    order: tuple[int, ...]  # its position in the order of evaluation


@dataclass(frozen=True, eq=False)
class Exit:
    """A statement after which others may not run, or may behave differently."""

    node: ast.AST  # the statement, or the call
    order: tuple[int, ...]  # its position in the order of evaluation
    # Whether everything after it may behave differently, as after turning gradients off.
    total: bool = False


@dataclass(frozen=True, eq=False)
class Binding:
    """A binding of a local name, or of an attribute by the name `self.path`."""

    name: str
    value: Value
    statement: ast.stmt  # the statement that binds it
    order: tuple[int, ...]  # its position in the order of evaluation
    walrus: ast.NamedExpr | None = None  # the `:=` that binds it, if it is one


@dataclass(eq=False)
class Graph:
    """The value graph of one function."""

    file: SourceFile  # the function's file
    # The function; None for a module whose `forward` is torch's own.
    function: ast.FunctionDef | None
    values: list[Value] = field(default_factory=list)  # the values in order of evaluation
    mutations: list[Mutation] = field(default_factory=list)  # the writes, likewise
    returned: list[Value] = field(default_factory=list)  # the value of each `return`
    # The values of names before each statement.
    names: dict[ast.stmt, dict[str, Value]] = field(default_factory=dict)
    # The values of names after each statement.
    after: dict[ast.stmt, dict[str, Value]] = field(default_factory=dict)
    # All bindings of names, in order.
    bound: list[Binding] = field(default_factory=list)
    # All exits from the function, or from an iteration of a loop, in order.
    exits: list[Exit] = field(default_factory=list)
    # The value of each name where it is read.
    loads: dict[ast.Name, Value] = field(default_factory=dict)
    # The branches with known conditions, and these conditions' values.
    decided: dict[ast.If, bool] = field(default_factory=dict)

    def where(self, operations: Collection[str]) -> list[Value]:
        """The values with one of these operations, also in the bodies of called functions."""
        places = {n for name in operations for n in self._places.get(name, ())}
        return [self.values[n] for n in sorted(places)]

    @functools.cached_property
    def _places(self) -> dict[str, list[int]]:
        """Indices in `values` by operation; for a function, also by the last part of its name."""
        found: dict[str, list[int]] = {}
        for number, value in enumerate(self.values):
            inside: Value | None = value
            while inside is not None:
                for name in {inside.operation, inside.operation.rpartition(".")[2]}:
                    found.setdefault(name, []).append(number)
                inside = inside.inner
        return found

    @functools.cached_property
    def operations(self) -> frozenset[str]:
        """All operations, including those in the bodies of called functions."""
        return frozenset(value.operation for value in walk(self.values, through=True))

    def overwritten(
        self, values: list[Value], after: tuple[int, ...], before: tuple[int, ...] | None = None
    ) -> Mutation | None:
        """The first write, between two positions, to memory that one of the values may share."""
        bases = frozenset().union(*(v.bases for v in values))
        for mutation in self.mutations:
            in_time = after < mutation.order and (before is None or mutation.order < before)
            if in_time and mutation.target.bases & bases:
                return mutation
        return None

    def same(self, one: Value, other: Value) -> bool:
        """Whether two values are always equal: they are one value, or computed in the same way."""
        if one is other:
            return True
        alike = (
            one.operation == other.operation
            and equal(one.literal, other.literal)
            and one.called == other.called
            and one.pure
            and other.pure
            and len(one.arguments) == len(other.arguments)
            and all(
                a == b and self.same(x, y)
                for (a, x), (b, y) in zip(one.arguments, other.arguments, strict=True)
            )
        )
        first, second = sorted((one.order, other.order))
        return alike and self.overwritten([one, other], first, second) is None


def equal(one: object, other: object) -> bool:
    """Whether two literals are the same constant; 1 and 1.0 are, 1 and True are not."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    number = (int, float)
    if isinstance(one, number) and isinstance(other, number):
        return one == other and isinstance(one, bool) is isinstance(other, bool)
    return type(one) is type(other) and one == other


def region(node: ast.AST) -> str:
    """The kind of a compound statement, in words."""
    match node:
        case ast.For() | ast.AsyncFor() | ast.While():
            return "a loop"
        case ast.With() | ast.AsyncWith():
            return "a `with`"
        case ast.Try() | ast.TryStar():
            return "a `try`"
    return "a branch"


def described(value: Value) -> str:
    """A value in words, for messages."""
    match value.operation:
        case "constant":
            return repr(value.literal)
        case "parameter" | "attribute" | "name":
            return f"`{value.literal}`"
        case "training":
            return "the training flag"
        case "self":
            return "the module itself"
        case "choice" | "merge" | "loop":
            return f"{region(value.node)}"
        case "call_module":
            return f"a call of `{value.arguments[0][1].literal}`"
        case "call":
            return "a call"
        case "tuple":
            return "a tuple"
        case "member":
            return f"`.{value.literal}`"
    name = value.operation.removeprefix("call ").removeprefix("module ")
    return f"`{name.rpartition('.')[2]}`" if name else "a call"
