"""What the walk over a class carries: values, the places they are put, and what is around them."""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass, field, replace

from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.text import joined_path

UNDECIDED = "<undecided>"


@dataclass(frozen=True, eq=False)
class Frame:
    """A function as called from one place."""

    function: ast.FunctionDef  # its definition
    # The call, an expression of `parent.function`; None where Python itself calls it.
    call: ast.Call | None = None
    parent: Frame | None = None  # the caller


@dataclass(frozen=True, eq=False)
class Guard:
    """A test that must come out as `sense` for what follows to run."""

    test: ast.expr
    sense: bool
    frame: Frame


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop around a construction."""

    # The `for` of a comprehension or of a statement; a `while`.
    node: ast.comprehension | ast.For | ast.AsyncFor | ast.While
    frame: Frame  # where it stands
    # The local variable that counts its iterations from 0, if there is one.
    counter: str | None = None
    # The constant that its target stands for, where a loop over constants was unrolled.
    value: ast.expr | None = None
    # The number of the list element that is made here in the first iteration; None where that is
    # not known.
    first: int | None = None
    every: int = 1  # how many elements each iteration adds to the list

    @property
    def index(self) -> str | None:
        """The local variable that counts the elements made from 0, if there is one."""
        return self.counter if self.first == 0 and self.every == 1 else None

    def iteration(self, element: int) -> int | None:
        """The iteration that makes an element of the list here; None where none does."""
        if self.first is None or element < self.first or (element - self.first) % self.every:
            return None
        return (element - self.first) // self.every


Step = Guard | Loop


@dataclass(eq=False)
class Item:
    """An element put into a list, a dict or a module container."""

    key: str | None  # its name as a pattern; None where its place in the order is its name
    values: list[Made]
    steps: tuple[Step, ...]
    kind: str
    counted: Loop | None = None  # the loop whose iterations the name counts, if it does


@dataclass(eq=False)
class Sequence:
    """Elements in order, of a list that was created under `steps`."""

    items: list[Item]
    steps: tuple[Step, ...]


@dataclass(eq=False)
class Made:
    """What an expression makes."""

    expr: ast.expr  # the expression
    statement: ast.stmt  # the innermost statement that holds it
    kind: str  # how it is put in its place
    steps: tuple[Step, ...]  # guards and loops around it, outermost first
    frame: Frame  # where it stands
    # Elements of a list, dict or container; several where branches made several.
    sequences: list[Sequence] | None = None
    container: bool = False  # whether it is a module container, rather than a plain list or dict
    # What a helper function returns, or a wrapper was given.
    inner: list[Made] = field(default_factory=list)
    alias: str | None = None  # the path of the existing module that the expression means
    constant: bool = False
    # What is put into it while a local variable holds it.
    attributes: list[Item] = field(default_factory=list)


@dataclass(eq=False)
class Placed:
    """A value given to an attribute path of the object under construction."""

    path: str
    value: Made
    kind: str
    steps: tuple[Step, ...]
    counted: Loop | None = None


@dataclass(frozen=True)
class Here:
    """Where the walk stands: a function, the guards and loops around, a statement."""

    frame: Frame
    steps: tuple[Step, ...]
    statement: ast.stmt

    def under(self, *steps: Step) -> Here:
        """The same place, further inside."""
        return replace(self, steps=(*self.steps, *steps))


def under(steps: tuple[Step, ...], items: list[Item]) -> list[Item]:
    """Items as they are where their list is used under further guards and loops."""
    return [replace(i, steps=merged(steps, i.steps)) for i in items]


def concatenated(first: Sequence, second: Sequence) -> Sequence:
    """The elements of both, in order."""
    return Sequence([*first.items, *second.items], common(first.steps, second.steps))


def common(one: tuple[Step, ...], other: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] is pair[1], zip(one, other, strict=False))
    return tuple(step for step, _ in pairs)


def merged(outer: tuple[Step, ...], inner: tuple[Step, ...]) -> tuple[Step, ...]:
    """Both sets of steps, the shared ones once."""
    if covers(outer, inner):
        return inner
    return (*outer, *(s for s in inner if s not in outer))


def covers(steps: tuple[Step, ...], other: tuple[Step, ...]) -> bool:
    """Whether whatever ran under `other` is always followed by what runs under `steps`."""
    return steps == other[: len(steps)]


def compatible(made: tuple[Step, ...], used: tuple[Step, ...]) -> bool:
    """Whether one run can pass through both: no test is taken both ways."""
    senses = {g.test: g.sense for g in made if isinstance(g, Guard)}
    return all(senses.get(g.test, g.sense) == g.sense for g in used if isinstance(g, Guard))


def inner_sequences(value: Made) -> list[Sequence]:
    """The lists that a helper function returns."""
    return [s for inner in value.inner for s in inner.sequences or inner_sequences(inner)]


def joined(path: str | None, name: str) -> str | None:
    """The path of an attribute of what `path` means."""
    return None if path is None else joined_path(path, name)


def counted_by(name: ast.expr, here: Here) -> Loop | None:
    """The loop whose counter is all that varies in a name: `f"layer{i}"`, `str(i)`."""
    nodes = list(ast.walk(name))
    variables = names_in(name) - {"str"}
    arithmetic = any(isinstance(n, ast.Constant) and not isinstance(n.value, str) for n in nodes)
    loops = [s for s in here.steps if isinstance(s, Loop) and s.value is None]
    if arithmetic or not loops or variables != {loops[-1].counter}:
        return None
    return loops[-1]


def undecided(node: ast.stmt | ast.expr, here: Here) -> Guard:
    """A guard that nobody can evaluate."""
    return Guard(ast.copy_location(ast.Name(UNDECIDED, ast.Load()), node), True, here.frame)


def case_guard(subject: ast.expr, pattern: ast.pattern, here: Here) -> Guard:
    """What a `case` tests, as far as a comparison can say it."""
    match pattern:
        case ast.MatchValue(value=value):
            test = ast.Compare(subject, [ast.Eq()], [value])
        case ast.MatchSingleton(value=value):
            test = ast.Compare(subject, [ast.Is()], [ast.Constant(value)])
        case ast.MatchOr(patterns=patterns) if all(isinstance(p, ast.MatchValue) for p in patterns):
            options = [p.value for p in patterns if isinstance(p, ast.MatchValue)]
            test = ast.Compare(subject, [ast.In()], [ast.Tuple(options, ast.Load())])
        case _:
            return undecided(subject, here)
    return Guard(ast.fix_missing_locations(ast.copy_location(test, subject)), True, here.frame)
