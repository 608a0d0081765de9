"""Finds the expression in the source that made each module and parameter of the live tree.

While a model is built, the call stack of each module is recorded, with the variables of its frames.
The expression is the innermost call of the stack that belongs to the module's place in the tree.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import first_parameter, parameters, values_given
from slapo_rewrite.code.blocks import DEFINITIONS
from slapo_rewrite.code.dataflow import bound_in, names_in
from slapo_rewrite.code.evaluate import Constant, came_to
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.syntax import (
    assignments,
    counter_of,
    encloses,
    end_position,
    extent,
    position,
)
from slapo_rewrite.code.text import Place, Position, joined_path, with_wildcards
from slapo_rewrite.code.written_out import returned_by
from slapo_rewrite.groups import grouped
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.construction_sites import RECORDED, Loop, Site
from slapo_rewrite.model.sources import Sources as Sources
from slapo_rewrite.model.tree import CONTAINERS, Node

# Statements that bind a name without an expression.
_OTHERWISE = (*DEFINITIONS, ast.Import, ast.ImportFrom)
_Turning = ast.comprehension | ast.For | ast.While
# A loop, and the node that contains it.
_Around = tuple[_Turning, ast.AST]


def find_site(sources: Sources, node: Node) -> Site:
    """The construction site of a module; raises `UnfollowableConstruction` if it is not known."""
    known = sources.known.get((id(node), ""))
    if known is None:
        known = sources.known[id(node), ""] = _module(sources, node)
    return known


def known_site(sources: Sources, node: Node) -> Site | None:
    """The construction site of a module; None if it is not known, or for the root."""
    try:
        return find_site(sources, node) if node.parent is not None else None
    except errors.UnfollowableConstruction:
        return None


def find_parameter_site(sources: Sources, node: Node, name: str) -> Site:
    """The expression that makes a parameter or buffer that a module holds directly."""
    key = id(node), name
    known = sources.known.get(key) or _tensor(sources, node, name)
    if known is None:
        raise errors.UnfollowableConstruction(
            f"nothing in the source creates the parameter `{joined_path(node.path, name)}` of "
            f"{node.cls.__name__}",
            hint="create it in `__init__`: `self.name = nn.Parameter(...)`",
        )
    sources.known[key] = known
    return known


def holder_of(site: Site, node: Node) -> tuple[Node, str]:
    """The module whose class contains the construction site of a module, and the path from it.

    It is the owner, unless the module was made elsewhere and passed to the owner.
    """
    assert node.owner is not None
    if not site.is_given:
        return node.owner, node.relative
    above = [*node.outwards()][len(site.path.split("."))]
    return above, above.below(node.path)


def resolve(expr: ast.expr, site: Site, node: Node) -> object | None:
    """The value of an expression at a module's or parameter's site; None if unknown."""
    if site.kind in ("parameter", "buffer"):
        noted = construction_calls.tensor_set(node.live, site.path.rpartition(".")[2])
        names = noted[1] if noted is not None else None
    else:
        names = construction_calls.scope_at(site.file, site.value, node.live)
    worth = came_to(expr, names) if names is not None else None
    return worth.value if isinstance(worth, Constant) else None


def given_partial(site: Site, node: Node) -> functools.partial[object] | None:
    """The `partial` of a module's class that its site calls, if it is the value of a variable."""
    callee = site.callee
    held = resolve(callee, site, node) if isinstance(callee, ast.Name | ast.Attribute) else None
    if site.partial is not None or not isinstance(held, functools.partial):
        return None
    # Names are compared, since a changed source defines another class of the same name.
    return held if getattr(held.func, "__name__", None) == node.cls.__name__ else None


def size_at(expr: ast.expr, site: Site, node: Node) -> int | None:
    """The value of an expression at a site, if that is known to be an integer; else None."""
    value = resolve(expr, site, node)
    return value if type(value) is int else None


def looked_up(sources: Sources, node: Node, root: str | None) -> bool:
    """Whether a construction looks the class up in another file, and would not find a replacement.

    It finds one if the expression names the class, if the class is passed in as a value, or if the
    module is a copy of another one. `root` is the qualified name of the imported object that the
    expression begins with, or None.
    """
    site = known_site(sources, node)
    return (
        site is not None
        and root is not None
        and root.partition(".")[0] not in {"torch", *sys.stdlib_module_names}
        and names_in(site.call).isdisjoint(c.__name__ for c in node.cls.__mro__)
        and not construction_calls.is_copy(node.live)
    )


def called_root(site: Site) -> str | None:
    """The name that a call begins with: `AutoModel` of `AutoModel.from_config(...)`."""
    root: ast.expr | None = site.callee
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
        root = root.func if isinstance(root, ast.Call) else root.value
    return root.id if isinstance(root, ast.Name) else None


# Modules ------------------------------------------------------------------------------------


def _module(sources: Sources, node: Node) -> Site:
    first = sources.first_of(node)
    if first is not node:
        site = find_site(sources, first)
        beside = first.owner is node.owner and site.kind == "assign" and "*" not in site.path
        return site if beside else replace(site, kind="alias", alias=first.path)
    stack = construction_calls.stack_of(node.live)
    for number in range(len(stack) if node.parent is not None else 0):
        if (found := _site_at(sources, node, number)) is not None:
            return found
    if not stack and (found := _kept(sources, node)) is not None:
        return found
    place = construction_calls.place(stack)
    if place is None and node.owner is not None:
        classes = sources.classes(node.owner.cls)[:1]
        place = next((file.at(file.classes[name]) for file, name in classes), None)
    raise errors.UnfollowableConstruction(
        f"the construction of {node.shown} ({node.cls.__name__}) cannot be followed",
        at=place,
        hint="construct it in `__init__` of the class that uses it: `self.name = Class(...)`",
    )


def _kept(sources: Sources, node: Node) -> Site | None:
    """The assignment that stores a module which was made before the model was."""
    for file, name in sources.classes(node.owner.cls) if node.owner is not None else ():
        for method in file.methods(name):
            for statement in ast.walk(method):
                match statement:
                    case ast.Assign(targets=[ast.Attribute(ast.Name("self"), attr)], value=value):
                        if attr == node.relative:
                            kind = "factory" if isinstance(value, ast.Subscript) else "alias"
                            return Site(file, name, method, attr, kind, statement, value, ())
    return None


def _site_at(sources: Sources, node: Node, number: int) -> Site | None:
    """The construction site at one call of a module's stack; None if that call is not a site.

    In a method of a class, a call makes modules of an object of that class. In another function
    only a call of the module's class is a site, and only if it names the class.
    """
    filled = _filled(sources, node, number)
    scope = construction_calls.scope_of(node.live, number)
    if filled is None or scope is None:
        return None
    made, site = filled.made, filled.site(node, scope)
    callee = getattr(made.node, "func", None)
    if site.kind == RECORDED:
        outside = made.file.name in sources.editable or made.file.name.startswith("torch.")
        if number or outside or callee is None:
            return None
        named = site.partial.args[0] if site.partial is not None else callee
        # Any class will do, since the module that was made may have been replaced by another.
        is_class = isinstance(_dotted(named, scope), type)
        if not is_class or not names_in(named).isdisjoint(made.local):
            return None
    elif number and not (
        isinstance(callee, ast.Attribute) and _dotted(callee.value, scope) in node.cls.__mro__
    ):
        return replace(site, kind="factory")
    while not number or site.written_out is not None:
        number += 1
        if (outer := _written_out(sources, node, site, number)) is None:
            break
        site = outer
    return site


def _written_out(sources: Sources, node: Node, site: Site, number: int) -> Site | None:
    """The site at a call of a function that only makes the module, with the body written out."""
    scope = construction_calls.scope_of(node.live, number)
    if scope is None or not isinstance(site.call, ast.Call):
        return None
    made = _made_at(sources, construction_calls.stack_of(node.live)[number], scope)
    if made is None or made.file is not site.file:
        return None
    callee = getattr(made.node, "func", None)
    name = getattr(callee, "attr", None) or getattr(callee, "id", None)
    if name != site.function.name or name in made.local:
        return None  # the name may mean another function
    assert isinstance(made.node, ast.Call)
    written = returned_by(site.function, site.value, site.call, made.node, made.function)
    outer = _filled(sources, node, number) if written is not None else None
    return outer.site(node, scope, written) if outer is not None else None


def _filled(sources: Sources, node: Node, number: int) -> _Filled | None:
    """The call at one position of a module's stack, and all its modules; None if unreadable."""
    stack = construction_calls.stack_of(node.live)[: number + 1]
    scope = construction_calls.scope_of(node.live, number)
    if len(stack) <= number or scope is None:
        return None
    key = id(node.root), stack
    if key not in sources.filled:
        made = _made_at(sources, stack[-1], scope)
        modules = sources.made_by(node.root, stack)
        sources.filled[key] = made and _Filled(made, number, node.root.live, modules)
    filled: _Filled | None = sources.filled[key]
    return filled


def _dotted(expr: ast.expr, scope: Mapping[str, Any]) -> object:
    """The value of a dotted name in a scope; None for other expressions."""
    if isinstance(expr, ast.Attribute):
        return getattr(_dotted(expr.value, scope), expr.attr, None)
    return scope.get(expr.id) if isinstance(expr, ast.Name) else None


class _Filled:
    """A call of a constructor, and all modules of one model that it made, by path."""

    def __init__(
        self, made: _Made, number: int, root: nn.Module, modules: Mapping[str, nn.Module]
    ) -> None:
        self.made, self._root, self._number, self._modules = made, root, number, modules
        self._sites: dict[tuple[str, str], Site] = {}
        alike = [*grouped((with_wildcards(path), path) for path in modules).values()]
        # For each path with wildcards, the positions of the segments that loops count.
        self._counted: dict[str, set[int]] = {with_wildcards(p[0]): set() for p in alike}
        self._loops = self._told(alike)

    def start(self, path: str) -> int | None:
        """The path length of the module whose class contains the call; None without one."""
        above: list[Any] = [self._root]
        for segment in path.split(".")[:-1]:
            above.append(above[-1]._modules[segment])
        lengths = reversed(range(len(above)))
        return next((n for n in lengths if self.made.is_of(type(above[n]))), None)

    def site(self, node: Node, scope: Mapping[str, Any], written: ast.Call | None = None) -> Site:
        """The site of a module that the call made. The elements of one list share a site."""
        made, segments = self.made, node.path.split(".")
        start = self.start(node.path)
        if start is None or isinstance(scope.get(made.receiver), type):
            start, kind, class_name = 0, RECORDED, type(self._root).__name__
        else:
            is_own = node.owner is not None and node.owner.path == ".".join(segments[:start])
            kind, class_name = "assign" if is_own else "argument", made.class_name
        counted = self._counted.get(with_wildcards(node.path), ())
        pattern = ["*" if n in counted else each for n, each in enumerate(segments)]
        path = ".".join(pattern[start:])
        if (path, kind) not in self._sites:
            self._sites[path, kind] = Site(
                file=made.file,
                class_name=class_name,
                function=made.function,
                path=path,
                kind=kind,
                statement=made.statement,
                value=made.node,
                loops=self._loops,
                variable=made.variable,
                written_out=written,
            )
        return self._sites[path, kind]

    def _told(self, alike: Sequence[Sequence[str]]) -> tuple[Loop, ...]:
        """The loops around the call, and whether they count the elements of all filled lists."""
        found: list[Loop] = []
        starts = [self.start(paths[0]) or 0 for paths in alike]
        after = [*starts]
        for loop, _ in self.made.loops:
            counter = _counter(loop)
            places = [self._equal(counter, p, n) for p, n in zip(alike, after, strict=True)]
            known = [place for place in places if place is not None]
            counts = bool(known) and len(known) == len(places)
            if counts:
                after = [place + 1 for place in known]
                for paths, place in zip(alike, known, strict=True):
                    self._counted[with_wildcards(paths[0])].add(place)
            found.append(Loop(loop, counter, counts))
        if not all(loop.counts for loop in found):
            varying = [self._varying(p, n) for p, n in zip(alike, starts, strict=True)]
            for paths, numbers in zip(alike, varying, strict=True):
                self._counted[with_wildcards(paths[0])].update(numbers)
            loop, around = self.made.loops[-1]
            if found[-1].counter is None and getattr(around, "generators", None) == [loop]:
                counts = not getattr(loop, "ifs", None) and all(
                    bool(numbers) and self._in_turn(around, p, numbers[-1])
                    for p, numbers in zip(alike, varying, strict=True)
                )
                found[-1] = replace(found[-1], counts=counts)
        return tuple(found)

    def _equal(self, counter: str | None, paths: Sequence[str], start: int) -> int | None:
        """The first segment that equals the loop counter's value in all paths; None without one."""
        if counter is None:
            return None
        modules = (self._modules[path] for path in paths)
        turns = [str(construction_calls.variable(m, self._number, counter)) for m in modules]
        numbers = [*zip(*(path.split(".") for path in paths), strict=True)]
        fitting = (n for n in range(start, len(numbers)) if [*numbers[n]] == turns)
        return next((n for n in fitting if self._is_list(paths[0], n)), None)

    def _varying(self, paths: Sequence[str], start: int) -> list[int]:
        """The positions of list indices that differ between the paths."""
        numbers = [*zip(*(path.split(".") for path in paths), strict=True)]
        several = (n for n in range(start, len(numbers)) if len({*numbers[n]}) > 1)
        return [n for n in several if self._is_list(paths[0], n)]

    def _is_list(self, path: str, place: int) -> bool:
        holder = ".".join(path.split(".")[:place])
        return isinstance(self._root.get_submodule(holder), CONTAINERS)

    def _in_turn(self, around: ast.AST, paths: Sequence[str], place: int) -> bool:
        """Whether a comprehension makes the elements of lists in order, from the first on."""
        for head in {".".join(path.split(".")[:place]) for path in paths}:
            listed = [*self._root.get_submodule(head).children()]
            turned = [m for m in listed if _passed(self.made.file, around, m)]
            orders = [construction_calls.order_of(module) for module in turned]
            if turned != listed[: len(turned)] or orders != sorted({*orders}):
                return False
        return True


def _passed(file: SourceFile, node: ast.AST, module: nn.Module) -> bool:
    """Whether a node of a file is in the call stack of a module."""
    return any(
        encloses(extent(node), at) and construction_calls.is_file(file, name)
        for name, at in construction_calls.stack_of(module)
    )


# Reading the source ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Made:
    """An expression that made modules, with its surroundings."""

    file: SourceFile
    node: ast.Call | ast.Subscript
    statement: ast.stmt
    # The function that evaluates it; a lambda is turned into a function that returns its value.
    function: ast.FunctionDef
    loops: tuple[_Around, ...]  # the loops around it in that function, each with its parent
    local: frozenset[str]  # the names bound in the functions around it
    class_name: str  # the class whose body contains it, or ''
    receiver: str  # the first parameter of the method that contains it, or ''
    variable: tuple[ast.stmt, ...]  # the assignments of the local variable that it calls

    def is_of(self, cls: type) -> bool:
        """Whether it is in the body of a class or of one of its bases."""
        own = self.file.name, self.class_name
        return any((c.__module__, c.__name__) == own for c in cls.__mro__)


def _made_at(sources: Sources, call: Place, scope: Mapping[str, Any]) -> _Made | None:
    """The call or subscript at a place; None for another node, or one outside of functions."""
    file = sources.file_named(str(scope.get("__name__")))
    path, at = call
    if file is None or not construction_calls.is_file(file, path):
        return None
    key = file.name, at
    if key not in sources.made:
        sources.made[key] = _read(file, file.holding(at))
    made: _Made | None = sources.made[key]
    return made


def _read(file: SourceFile, held: Sequence[ast.AST]) -> _Made | None:
    """The innermost of some nested nodes, outermost first, if it is a call or subscript."""
    node, around = held[-1], _functions_around(file, held)
    if around is None or not isinstance(node, ast.Call | ast.Subscript):
        return None
    function, loops, local, class_name, receiver = around
    variable: tuple[ast.stmt, ...] = ()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        bound = assignments(function, node.func.id)
        variable = tuple(s for s in bound if not isinstance(s, _OTHERWISE))
    statement = next(n for n in reversed(held) if isinstance(n, ast.stmt))
    return _Made(file, node, statement, function, loops, local, class_name, receiver, variable)


def _functions_around(
    file: SourceFile, held: Sequence[ast.AST]
) -> tuple[ast.FunctionDef, tuple[_Around, ...], frozenset[str], str, str] | None:
    """The function around a node, the loops, the local names, the class and its receiver's name.

    `held` are the nodes that contain the node, outermost first, and the node.
    """
    function: ast.FunctionDef | None = None
    class_name: str | None = None
    receiver: str | None = None
    loops: list[_Around] = []
    local: set[str] = set()
    for outer, inner in reversed([*itertools.pairwise(held)]):
        if function is None:
            loops = [*((loop, outer) for loop in _turning(inner, outer)), *loops]
        if isinstance(outer, ast.ClassDef | ast.AsyncFunctionDef) and function is None:
            return None
        if isinstance(outer, ast.ClassDef) and class_name is None:
            class_name = outer.name if file.classes.get(outer.name) is outer else ""
        elif isinstance(outer, ast.FunctionDef | ast.Lambda):
            made = _as_function(outer) if isinstance(outer, ast.Lambda) else outer
            if inner in (outer.body, *made.body):  # defaults and decorators are evaluated outside
                function, receiver = function or made, first_parameter(made)
                local |= {*parameters(outer), *bound_in(outer)}
    if function is None:
        return None
    return function, tuple(loops), frozenset(local), class_name or "", receiver or ""


def _counter(loop: _Turning) -> str | None:
    return None if isinstance(loop, ast.While) else counter_of(loop.target, loop.iter)


def _turning(inner: ast.AST, outer: ast.AST) -> list[_Turning]:
    """The loops of a node that evaluate a child of it repeatedly."""
    match outer:
        case ast.For(body=body) if inner in body:
            return [outer]
        case ast.While(orelse=last) if inner not in last:
            return [outer]
        case ast.comprehension(ifs=tests) if inner in tests:
            return [outer]
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            turns: list[_Turning] = [*outer.generators]
            return turns[: turns.index(inner)] if isinstance(inner, ast.comprehension) else turns
    return []


@functools.lru_cache(maxsize=4096)
def _as_function(made: ast.Lambda) -> ast.FunctionDef:
    """A lambda as a function that returns its value."""
    value = ast.copy_location(ast.Return(made.body), made.body)
    return ast.copy_location(ast.FunctionDef("<lambda>", made.args, [value], []), made)


# Parameters ---------------------------------------------------------------------------------


def _tensor(sources: Sources, node: Node, name: str) -> Site | None:
    """The site of a parameter or buffer; None if it is not known which statement sets it."""
    noted = construction_calls.tensor_set(node.live, name)
    if noted is None:
        return None
    (path, at), scope = noted
    file = sources.file_named(str(scope.get("__name__")))
    if file is None or not construction_calls.is_file(file, path):
        return None
    held = file.holding(at)
    found = _functions_around(file, held)
    statement = next((n for n in reversed(held) if isinstance(n, ast.stmt)), None)
    if found is None or statement is None:
        return None
    function, loops, _, class_name, _ = found
    value = _given(statement, at)
    if isinstance(value, ast.Name):
        statement, value = _assigned(function, value, statement)
    path = name
    for above in node.outwards():
        if (file.name, class_name) in {(c.__module__, c.__name__) for c in above.cls.__mro__}:
            path = joined_path(above.below(node.path), name)
            break
    return Site(
        file=file,
        class_name=class_name,
        function=function,
        path=path,
        kind="parameter" if name in node.live._parameters else "buffer",
        statement=statement,
        value=value,
        loops=tuple(Loop(loop, _counter(loop), counts=False) for loop, _ in loops),
    )


def _given(statement: ast.stmt, at: Position) -> ast.expr:
    """The value that a statement sets, given the place of its target or call."""
    value: ast.expr | None = None
    match statement:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                match target, value:
                    case ast.Tuple(elts=into), ast.Tuple(elts=elts) if len(into) == len(elts):
                        pairs = zip(into, elts, strict=True)
                        value = next((v for t, v in pairs if end_position(t) == at[2:]), value)
        case ast.AnnAssign(value=value):
            pass
        case ast.Expr(value=ast.Call() as call):
            given = values_given(call)
            place = 2 if is_name(call.func, "setattr") else 1
            value = given[place] if len(given) > place else call
    match value:
        case (
            ast.IfExp(body=made, orelse=ast.Constant())
            | ast.IfExp(body=ast.Constant(), orelse=made)
        ):
            return made
    return value if value is not None else ast.expr()


def _assigned(
    function: ast.FunctionDef, name: ast.Name, statement: ast.stmt
) -> tuple[ast.stmt, ast.expr]:
    """The last assignment of a local variable above a statement that reads it, and its value."""
    for found in reversed(assignments(function, name.id)):
        if isinstance(found, ast.Assign) and position(found) < position(name):
            if any(is_name(target, name.id) for target in found.targets):
                return found, found.value
            break  # it is unpacked from a tuple
    return statement, name
