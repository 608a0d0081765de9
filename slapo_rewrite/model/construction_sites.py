"""Construction sites: the expressions that make the submodules and parameters of a class."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.dataflow import bound_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import assignments, count_of
from slapo_rewrite.model.constructor_values import (
    Frame,
    Guard,
    Item,
    Loop,
    Made,
    Sequence,
    Step,
    common,
    joined,
    merged,
)
from slapo_rewrite.model.constructor_walk import Walker

# Made where Python is known to have been, in a function that is not followed.
RECORDED = "recorded"
_OWN_KINDS = {"helper", "factory", "argument", "alias", "parameter", "buffer"}


@dataclass(frozen=True, eq=False)
class Site:
    """An expression that makes a module or a parameter, and the name that it is given."""

    file: SourceFile  # the file it stands in
    class_name: str  # the class whose method gives it its name
    # The function that holds the expression; a helper function where one makes it.
    function: ast.FunctionDef
    # Attribute path from the object under construction: `query`, `mlp.c_fc`, `layer.0` for a known
    # element, `layer.*` for elements made by a loop, `layer*` for made-up names.
    path: str
    # How it is put in its place: `assign`, `comprehension`, `append`, `list`, `sequential`, `dict`,
    # `setattr`, `add_module`; or what is special about it: `helper` (a function that makes it),
    # `factory` (`from_config`, `ACT2FN[...]`), `argument` (given to the function), `alias` (another
    # attribute's module), `recorded` (by a function that is not followed), `parameter`, `buffer`.
    kind: str
    statement: ast.stmt  # the innermost statement that holds `value`
    value: ast.expr  # the expression
    steps: tuple[Step, ...]  # guards and loops around it, outermost first
    frame: Frame  # the function as called from the class's own method
    order: int  # sites of one class in the order in which they are carried out
    container: bool = False  # whether it makes a module container
    # Where the callee is a local variable, the statements that assign it.
    variable: tuple[ast.stmt, ...] = ()
    # Where `value` is a call that a function of this file answers, or that passes its argument
    # through: what makes the module there.
    inner: tuple[Site, ...] = ()
    alias: str | None = None  # where `value` means an existing module, its path
    # Where `value` calls a function of this file that does no more than make the module, what it
    # calls, in the words that are known here.
    written_out: ast.Call | None = None

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """What the path says, with a group for each `*`."""
        return re.compile(re.escape(self.path).replace(r"\*", r"([^.]+)"))

    @property
    def is_given(self) -> bool:
        """Whether the module is made outside of the class that keeps it."""
        return self.kind in ("argument", RECORDED)

    @property
    def call(self) -> ast.expr:
        """What makes it: the expression, or what the function does that this calls."""
        return self.written_out or self.value

    @property
    def callee(self) -> ast.expr | None:
        """What is called to make it; None where the expression is not a call."""
        return self.call.func if isinstance(self.call, ast.Call) else None

    @functools.cached_property
    def partial(self) -> ast.Call | None:
        """What is called, where that is `partial(Class, ...)`, or a name for it.

        Of constants, or where it has that name of arguments that are the same at the call.
        """
        if {"functools", "functools.partial"}.isdisjoint(self.file.imports.values()):
            return None
        found = self.callee
        if isinstance(found, ast.Name):
            found = self._named(found.id)
        if not isinstance(found, ast.Call) or not found.args or not isinstance(self.call, ast.Call):
            return None
        given = [*found.args[1:], *(k.value for k in found.keywords)]
        plain = all(isinstance(each, ast.Constant) or self._is_given_once(each) for each in given)
        plain &= all(k.arg is not None for k in [*found.keywords, *self.call.keywords])
        is_partial = self.file.qualified(found.func) == "functools.partial"
        return found if plain and is_partial else None

    def _is_given_once(self, value: ast.expr) -> bool:
        """Whether a value is an argument that nothing in the function binds anew."""
        if not (isinstance(value, ast.Name) and self.variable):
            return False
        taken = [n.arg for n in ast.walk(self.function) if isinstance(n, ast.arg)]
        is_own = value.id in parameters(self.function) and taken.count(value.id) == 1
        return is_own and value.id not in bound_in(self.function)

    def _named(self, name: str) -> ast.expr | None:
        """What a name is given, where one statement of the function, or else of the file, does."""
        bound: tuple[ast.stmt, ...] = self.variable
        if not bound:
            if any(isinstance(n, ast.arg) and n.arg == name for n in ast.walk(self.function.args)):
                return None
            bound = tuple(self.file.binding(name))
            if any(statement not in self.file.tree.body for statement in bound):
                return None
        match bound:
            case [ast.Assign(targets=[ast.Name()], value=value)]:
                return value
        return None

    @property
    def arguments(self) -> tuple[list[ast.expr], list[ast.keyword]]:
        """What the class gets, by place and by name; what a `partial` of it gives included."""
        assert isinstance(self.call, ast.Call)
        args, keywords = self.call.args, self.call.keywords
        if (made := self.partial) is not None:
            given = {keyword.arg for keyword in keywords}
            args = [*made.args[1:], *args]
            keywords = [*keywords, *(k for k in made.keywords if k.arg not in given)]
        return args, keywords

    @property
    def guards(self) -> tuple[tuple[ast.expr, bool], ...]:
        """The tests around it, outermost first, and how each must come out."""
        return tuple((s.test, s.sense) for s in self.steps if isinstance(s, Guard))

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around it, outermost first."""
        return tuple(s for s in self.steps if isinstance(s, Loop))

    @property
    def loop(self) -> Loop | None:
        """The innermost loop around it."""
        return self.loops[-1] if self.loops else None

    @functools.cached_property
    def is_repeated(self) -> bool:
        """Whether a loop carries the expression itself out again.

        One around a call of its function does not count the elements there, and one that copies
        what the expression made does not reach it.
        """
        turned = [loop.node for loop in self.loops]
        return any(
            self.value in ast.walk(node)
            for node in ast.walk(self.function)
            if not {node, *getattr(node, "generators", ())}.isdisjoint(turned)
        )

    @property
    def index(self) -> str | None:
        """The local variable that counts the elements it makes from 0, if there is one."""
        return self.loop.index if self.loop else None

    @property
    def count(self) -> ast.expr | None:
        """How many turns the one loop around it takes, as an expression that can stand inside."""
        loop = self.loop
        if loop is None or loop.first != 0 or loop.every != 1 or len(self.loops) > 1:
            return None
        node = loop.node
        if loop.frame.function is not self.function or isinstance(node, ast.While):
            return None
        count = count_of(node.iter)
        inside = [node] if isinstance(node, ast.comprehension) else [node.target, *node.body]
        if count is None or not _named(*inside, context=ast.Store).isdisjoint(_named(count)):
            return None
        return count


def _named(*nodes: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    """The names and attributes that some nodes read, or bind."""
    named = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute))
    found = (n for n in named if isinstance(n.ctx, context))
    return {n.id if isinstance(n, ast.Name) else n.attr for n in found}


_Found = dict[str, list[Site]]
_cache: weakref.WeakKeyDictionary[SourceFile, dict[tuple[str, bool], _Found]] = (
    weakref.WeakKeyDictionary()
)


def find_sites(file: SourceFile, class_name: str) -> dict[str, list[Site]]:
    """The construction sites in a class's own `__init__` and in the methods it calls.

    They are by path pattern, in the order in which they are carried out. Elements that a loop makes
    share one pattern, `layer.*`.
    """
    return _find(file, class_name, later=False)


def find_later_sites(file: SourceFile, class_name: str) -> dict[str, list[Site]]:
    """The same for the class's other methods, which somebody else may have called."""
    return _find(file, class_name, later=True)


def _find(file: SourceFile, class_name: str, later: bool) -> _Found:
    known = _cache.setdefault(file, {})
    if (class_name, later) not in known:
        walker = Walker(file, class_name)
        constructor = file.method(class_name, "__init__")
        if constructor is not None:
            walker.walk(constructor)
        if later:
            walker.placed.clear()
            for method in file.methods(class_name):
                if method.name not in walker.visited:
                    walker.walk(method)
        known[class_name, later] = _Emitter(walker).found
    return known[class_name, later]


class _Emitter:
    """Turns what a walk placed into sites, numbering the elements of lists."""

    def __init__(self, walker: Walker) -> None:
        self.file = walker.file
        self.class_name = walker.class_name
        self.found: _Found = {}
        self._order = 0
        for placed in walker.placed:
            value, steps = placed.value, placed.steps
            if placed.counted is not None:
                value = replace(value, steps=_numbered(value.steps, placed.counted))
                steps = _numbered(steps, placed.counted)
            self._emit(placed.path, value, placed.kind, steps)

    def _emit(self, path: str, made: Made, kind: str, steps: tuple[Step, ...]) -> None:
        steps = merged(steps, made.steps) if steps else made.steps
        if kind in {"buffer", "parameter"}:  # a tensor, which arithmetic may make
            if not isinstance(made.expr, ast.Constant):
                self.found.setdefault(path, []).append(self._site(path, made, kind, steps))
            return
        if path and (made.container or made.sequences is None) and not _is_plain(made.expr):
            self.found.setdefault(path, []).append(self._site(path, made, kind, steps))
        for sequence in [*(made.sequences or ()), Sequence(made.attributes, made.steps)]:
            self._emit_items(path, sequence, steps)
        for inner in made.inner:
            for sequence in inner.sequences or ():
                self._emit_items(path, sequence, inner.steps)

    def _site(self, path: str, made: Made, kind: str, steps: tuple[Step, ...]) -> Site:
        self._order += 1
        variable: tuple[ast.stmt, ...] = ()
        if isinstance(made.expr, ast.Call) and isinstance(made.expr.func, ast.Name):
            name = made.expr.func.id
            bound = (each.statement for each in assignments(made.frame.function, name))
            variable = tuple(s for s in bound if not isinstance(s, ast.Import | ast.ImportFrom))
        return Site(
            file=self.file,
            class_name=self.class_name,
            function=made.frame.function,
            path=path,
            kind=made.kind if made.kind in _OWN_KINDS else kind,
            statement=made.statement,
            value=made.expr,
            steps=steps,
            frame=made.frame,
            order=self._order,
            container=made.container,
            variable=variable,
            inner=tuple(
                self._site(path, inner, "helper", merged(steps, inner.steps))
                for inner in made.inner
                if (inner.container or inner.sequences is None) and not _is_plain(inner.expr)
            ),
            alias=made.alias,
        )

    def _emit_items(self, path: str, sequence: Sequence, around: tuple[Step, ...]) -> None:
        numbers = _Numbering(sequence)
        for item in sequence.items:
            key = item.key if item.key is not None else numbers.keys[id(item)]
            steps = numbers.looped(item)
            # Where the list is made in each turn of a loop, that loop counts the lists.
            lists = [s.node for s in around if isinstance(s, Loop) and s.first is not None]
            steps = tuple(
                s for s in steps
                if not (isinstance(s, Loop) and s.first is None and s.node in lists)
            )  # fmt: skip
            outer = tuple(s for s in around if s not in item.steps)
            steps = (*outer, *steps)
            for value in item.values:
                below = tuple(s for s in value.steps if s not in item.steps and s not in outer)
                target = joined(path, key) or key
                self._emit(target, replace(value, steps=(*steps, *below)), item.kind, ())


class _Numbering:
    """Which element of a list each of its items makes, as far as that can be known."""

    def __init__(self, sequence: Sequence) -> None:
        self.keys: dict[int, str] = {}
        self._first: dict[tuple[int, Loop], tuple[int, int]] = {}
        self._base = sequence.steps
        items = sequence.items
        known = next((n for n, i in enumerate(items) if i.key == "*"), len(items))
        for part, start in ((items[:known], 0), (items[known:], None)):
            self._number([(i, self._inside(i)) for i in part if i.key is None], start, self.keys)

    def _inside(self, item: Item) -> tuple[Step, ...]:
        return item.steps[len(common(self._base, item.steps)) :]

    def looped(self, item: Item) -> tuple[Step, ...]:
        """The item's steps; its loops know which element their first iteration makes."""
        if item.counted is not None:
            return _numbered(item.steps, item.counted)
        steps: list[Step] = []
        for step in item.steps:
            if isinstance(step, Loop) and (id(item), step) in self._first:
                first, every = self._first[id(item), step]
                step = replace(step, first=first, every=every)
            steps.append(step)
        return tuple(steps)

    def _number(
        self, items: list[tuple[Item, tuple[Step, ...]]], start: int | None, keys: dict[int, str]
    ) -> int | None:
        """Numbers items from `start`; the number after them, None where it is not known."""
        for step, group in _runs(items):
            if step is None:
                for item, _ in group:
                    keys[id(item)] = "*" if start is None else str(start)
                    start = None if start is None else start + 1
            elif isinstance(step, Guard):
                sides = [
                    [(i, s[1:]) for i, s in group if getattr(s[0], "sense", None) is sense]
                    for sense in (True, False)
                ]
                ends = [self._number(side, start, keys) for side in sides]
                start = ends[0] if ends[0] == ends[1] else None
            elif step.value is not None:
                start = self._number([(i, s[1:]) for i, s in group], start, keys)
            else:
                start = self._turn(step, [(i, s[1:]) for i, s in group], start, keys)
        return start

    def _turn(
        self,
        loop: Loop,
        inside: list[tuple[Item, tuple[Step, ...]]],
        start: int | None,
        keys: dict[int, str],
    ) -> int | None:
        within: dict[int, str] = {}
        outside = dict(self._first)
        per_turn = self._number(inside, 0, within)
        self._first = outside  # loops inside this one start again with each of its turns
        for item, _ in inside:
            keys[id(item)] = "*"
            if per_turn and start is not None and within[id(item)] != "*":
                self._first[id(item), loop] = start + int(within[id(item)]), per_turn
        turns = _count(loop)
        if per_turn is None or start is None or turns is None:
            return None
        return start + turns * per_turn


def _runs(
    items: list[tuple[Item, tuple[Step, ...]]],
) -> Iterator[tuple[Step | None, list[tuple[Item, tuple[Step, ...]]]]]:
    """Consecutive items that stand under the same first step, be it the other side of a test."""

    def first(item: tuple[Item, tuple[Step, ...]]) -> Step | ast.expr | None:
        step = item[1][0] if item[1] else None
        return step.test if isinstance(step, Guard) else step

    for _, group in itertools.groupby(items, first):
        run = list(group)
        yield run[0][1][0] if run[0][1] else None, run


def _count(loop: Loop) -> int | None:
    """How often a loop turns, where the text says so."""
    match getattr(loop.node, "iter", None):
        case ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=int(count))]):
            return count
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            return None if any(isinstance(e, ast.Starred) for e in elts) else len(elts)
    return None


def _numbered(steps: tuple[Step, ...], counted: Loop) -> tuple[Step, ...]:
    """The steps, with the iterations of one loop known to number what it makes."""
    return tuple(replace(counted, first=0) if s is counted else s for s in steps)


def _is_plain(expr: ast.expr) -> bool:
    """Whether an expression cannot make a module: a constant, arithmetic, a comparison, a list."""
    return not isinstance(expr, ast.Call | ast.Subscript | ast.Name | ast.Attribute | ast.Await)
