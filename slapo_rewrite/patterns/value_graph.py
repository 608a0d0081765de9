"""What a function computes, as a graph of values.

A value is what one expression gives: an operation on other values. Local names, temporaries and
rebinding are gone from the graph; what is left of them is which statement a value stands in, and
which name holds it there.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from slapo_rewrite.code.file import SourceFile

# A statement or conditional expression with a body of its own, and which of its bodies.
Arm = tuple[ast.AST, str]
Arguments = tuple[tuple[str, "Value"], ...]

LEAVES = {"constant", "parameter", "attribute", "name", "self", "training"}


@dataclass(frozen=True, eq=False)
class Use:
    """A place that reads a value."""

    node: ast.AST  # the expression or statement that reads it
    by: Value | None  # the value made of it; None where a statement itself reads it
    why: str  # what a statement does with it
    order: tuple[int, ...]  # when


@dataclass(eq=False)
class Value:
    """What one expression gives."""

    operation: str  # the canonical name of the operation, or one of `LEAVES`
    arguments: Arguments  # its operands and options by name, defaults filled in
    file: SourceFile  # the file of the expression
    node: ast.AST  # the expression, or the statement of an augmented assignment or a branch
    order: tuple[int, ...]  # when it is computed; later ones compare greater
    literal: object = None  # a constant's value; the name or path of another leaf
    # The branches, loops and `with` blocks around it, from the outside in.
    regions: tuple[Arm, ...] = ()
    statement: ast.stmt | None = None  # the statement that it stands in
    bases: frozenset[object] = frozenset()  # names what it may share memory with
    uses: list[Use] = field(default_factory=list)  # where it is read
    overwrites: Value | None = None  # the operand that it is written into
    random: bool = False  # whether it draws random numbers, or may do so
    pure: bool = True  # whether equal operands always give an equal value
    number: bool = False  # whether it is a number, a shape or a flag: certainly no tensor
    called: str | None = None  # the path of the submodule that is called
    # The attribute of the module that a constant, or the training flag, is read from.
    path: str | None = None
    given: Arguments = ()  # the arguments of that call as they stand: keyword, or '', and value
    # Gives what the called function returns, in terms of the arguments.
    look_through: Callable[[], Value | None] | None = None
    # The call in the function's own text through whose body this value was reached.
    inside: Value | None = None
    commutes: bool = False  # whether the first two arguments may change places
    lazy: bool = False  # whether nothing has read it yet: a merge of values
    stateful: bool = False  # whether it is the call of a module that holds parameters or buffers

    def __repr__(self) -> str:
        return f"<{self.operation} {self.literal!r}>" if self.is_leaf else f"<{self.operation}>"

    @property
    def is_leaf(self) -> bool:
        """Whether nothing is computed."""
        return self.operation in LEAVES

    @property
    def site(self) -> Value:
        """The value, or the call in the function's own text that it was reached through."""
        return self.inside or self

    @functools.cached_property
    def inner(self) -> Value | None:
        """What the called function returns, where that is one value that can be followed."""
        return self.look_through() if self.look_through is not None else None

    def walk(self) -> Iterator[Value]:
        """The value and everything it is computed from, each once."""
        return walk([self])


def walk(values: Iterable[Value], through: bool = False) -> Iterator[Value]:
    """Some values and everything they are computed from, each once.

    With `through` what calls among them give when looked through counts as well.
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
    """Memory that is written to."""

    target: Value  # the value whose memory it is
    node: ast.AST  # the expression or statement that does it
    order: tuple[int, ...]  # when


@dataclass(frozen=True, eq=False)
class Exit:
    """A statement after which others may not run, or run otherwise."""

    node: ast.AST  # the statement, or the call
    order: tuple[int, ...]  # when
    # Whether all that follows may compute otherwise: gradients are turned off, say.
    total: bool = False


@dataclass(frozen=True, eq=False)
class Binding:
    """A local name, or an attribute as `self.path`, is given a value."""

    name: str
    value: Value
    statement: ast.stmt  # the statement that does it
    order: tuple[int, ...]  # when
    walrus: ast.NamedExpr | None = None  # the `:=` that does it, where it is one


@dataclass(eq=False)
class Graph:
    """The values of one function."""

    file: SourceFile  # the function's file
    # The function; None for a module whose `forward` is torch's own.
    function: ast.FunctionDef | None
    values: list[Value] = field(default_factory=list)  # in the order in which they are computed
    mutations: list[Mutation] = field(default_factory=list)  # likewise
    returned: list[Value] = field(default_factory=list)  # what each `return` gives
    # What each name holds before a statement.
    names: dict[ast.stmt, dict[str, Value]] = field(default_factory=dict)
    # What each name holds after a statement.
    after: dict[ast.stmt, dict[str, Value]] = field(default_factory=dict)
    # Each binding of a name to a value, in order.
    bound: list[Binding] = field(default_factory=list)
    # Each way out of the function, or out of a turn of a loop, in order.
    exits: list[Exit] = field(default_factory=list)
    # What each name that is read holds there.
    loads: dict[ast.Name, Value] = field(default_factory=dict)
    # The branches whose way is known, and which it is.
    decided: dict[ast.If, bool] = field(default_factory=dict)

    def where(self, operations: Collection[str]) -> list[Value]:
        """The values that carry out one of some operations, or do so when looked through."""
        places = {n for name in operations for n in self._places.get(name, ())}
        return [self.values[n] for n in sorted(places)]

    @functools.cached_property
    def _places(self) -> dict[str, list[int]]:
        """Positions in `values` by what the values carry out; of a function also its last name."""
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
        """Every operation that is carried out, in calls that can be looked through as well."""
        return frozenset(value.operation for value in walk(self.values, through=True))

    def overwritten(
        self, values: list[Value], after: tuple[int, ...], before: tuple[int, ...] | None = None
    ) -> Mutation | None:
        """The first write, between two moments, to what one of the values may share memory with."""
        bases = frozenset().union(*(v.bases for v in values))
        for mutation in self.mutations:
            in_time = after < mutation.order and (before is None or mutation.order < before)
            if in_time and mutation.target.bases & bases:
                return mutation
        return None

    def same(self, one: Value, other: Value) -> bool:
        """Whether two values are equal whatever the inputs: one value, or computed alike."""
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
    """What has a body of its own, in words."""
    match node:
        case ast.For() | ast.AsyncFor() | ast.While():
            return "a loop"
        case ast.With() | ast.AsyncWith():
            return "a `with`"
        case ast.Try() | ast.TryStar():
            return "a `try`"
    return "a branch"


def described(value: Value) -> str:
    """A value in a word or two."""
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
