"""Functions of a file that tell of their calls while they are watched, and drop names.

Their code is exchanged: what holds a function, a decorator say, goes on holding the same one.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Protocol

from slapo_rewrite.code.blocks import first_line
from slapo_rewrite.code.dead_values import Death, dropping
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model.tree import Tree

# How many functions are looked at, one inside the other, for the one that a definition made.
DEPTH = 6
# What watched functions call the watcher.
_WATCHER, _CALL = "_slapo_rewrite_watcher", "_slapo_rewrite_call"


class Watcher(Protocol):
    """Is told."""

    def enter(self, number: int) -> Any:
        """A call of a function begins; it ends when what this gives is let go."""

    def drop(self, number: int, call: Any, value: Any) -> None:
        """A name of a call is about to be dropped."""

    def dropped(self) -> None:
        """It has been."""


def _read(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(_read(_WATCHER), name, ast.Load()), list(arguments), [])


def _watched(
    function: ast.FunctionDef, number: int, deaths: Mapping[Death, int]
) -> ast.FunctionDef:
    """A function that tells of its calls, and drops names."""
    behind: dict[ast.stmt, list[ast.stmt]] = {}
    for death, place in deaths.items():
        behind.setdefault(death.statement, []).extend([
            ast.Expr(_call("drop", ast.Constant(place), *map(_read, (_CALL, death.name)))),
            ast.Delete([ast.Name(death.name, ast.Del())]),
            ast.Expr(_call("dropped")),
        ])  # fmt: skip
    made = dropping(function, behind)
    token = ast.Assign([ast.Name(_CALL, ast.Store())], _call("enter", ast.Constant(number)))
    made.body = [token, *made.body]
    made.decorator_list = []
    return ast.copy_location(made, function)


def _code_of(made: ast.FunctionDef, class_name: str | None, file: SourceFile) -> CodeType | None:
    """The code of a function, as that of a method where it is one."""
    body: list[ast.stmt] = [made]
    if class_name is not None:
        body = [ast.ClassDef(class_name, [], [], body, [], **_NO_TYPES)]
    tree = ast.fix_missing_locations(ast.Module(body, []))
    code: CodeType | None = compile(tree, str(file.path), "exec", dont_inherit=True)
    for name in filter(None, (class_name, made.name)):
        inner = [c for c in code.co_consts if isinstance(c, CodeType)] if code else []
        code = next((c for c in inner if c.co_name == name), None)
    return code


_NO_TYPES: dict[str, Any] = {"type_params": []} if "type_params" in ast.ClassDef._fields else {}


@dataclass(frozen=True)
class Live:
    """A function of the file, as it runs."""

    function: ast.FunctionDef
    class_name: str | None  # the class that has it, if one does
    live: FunctionType  # what runs


def live_functions(
    tree: Tree, file: SourceFile, functions: Collection[tuple[ast.FunctionDef, str | None]]
) -> list[Live]:
    """What runs of some functions and methods of a file; without those that are not found."""
    classes = {
        cls.__name__: cls
        for node in tree.nodes.values()
        for cls in node.cls.__mro__
        if cls.__module__ == file.name
    }
    spaces = [
        vars(value).get("__globals__", getattr(value, "__globals__", {}))
        for cls in classes.values()
        for value in vars(cls).values()
        if isinstance(value, FunctionType) and value.__module__ == file.name
    ]
    found = []
    for function, owner in functions:
        if owner is not None:
            given = [vars(classes[owner]).get(function.name)] if owner in classes else []
        else:
            given = [space.get(function.name) for space in spaces[:1]]
        for value in given:
            live = made_by(function, value)
            if live is not None:
                found.append(Live(function, owner, live))
    return found


def made_by(function: ast.FunctionDef, value: Any, depth: int = DEPTH) -> FunctionType | None:
    """The function that a definition made, at or below what stands under its name, if it is there.

    The value is what a class or a module has under its name, where decorators may have put it.
    `depth` functions are looked at, one inside the other.
    """
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType) or not depth:
        return None
    code = value.__code__
    if code.co_name == function.name and code.co_firstlineno == first_line(function):
        return value
    inner = [getattr(value, "__wrapped__", None)]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            inner.append(cell.cell_contents)
    return next((f for each in inner if (f := made_by(function, each, depth - 1))), None)


@contextlib.contextmanager
def watching(
    file: SourceFile, lives: Sequence[Live], deaths: Sequence[Death], watcher: Watcher
) -> Iterator[None]:
    """Functions tell of their calls, and drop names, for as long as it lasts."""
    numbers = {death: number for number, death in enumerate(deaths)}
    before: list[tuple[FunctionType, CodeType]] = []
    setattr(builtins, _WATCHER, watcher)
    try:
        for number, each in enumerate(lives):
            inside = {id(n) for n in ast.walk(each.function)}
            own = {d: n for d, n in numbers.items() if id(d.statement) in inside}
            code = _code_of(_watched(each.function, number, own), each.class_name, file)
            if code is not None and code.co_freevars == each.live.__code__.co_freevars:
                before.append((each.live, each.live.__code__))
                each.live.__code__ = code
        yield
    finally:
        for live, code in before:
            live.__code__ = code
        delattr(builtins, _WATCHER)
