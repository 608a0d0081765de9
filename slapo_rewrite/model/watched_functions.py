"""Makes functions of a file report their calls, and delete variables, while they are watched.

Their code object is replaced, since references to a function, as in a decorator, must stay valid.
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

# How many decorators are unwrapped to find the function of a definition.
DEPTH = 6
# The names of the watcher and of the call's token in watched functions.
_WATCHER, _CALL = "_slapo_rewrite_watcher", "_slapo_rewrite_call"


class Watcher(Protocol):
    """Receives the events of watched functions."""

    def enter(self, number: int) -> Any:
        """Called when a function begins; the call ends when the returned object is freed."""

    def drop(self, number: int, call: Any, value: Any) -> None:
        """Called before a variable of a call is deleted."""

    def dropped(self) -> None:
        """Called after the variable was deleted."""


def _read(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(_read(_WATCHER), name, ast.Load()), list(arguments), [])


def _watched(
    function: ast.FunctionDef, number: int, deaths: Mapping[Death, int]
) -> ast.FunctionDef:
    """A copy of a function that reports its calls, and deletes variables."""
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
    """The code object of a function, compiled inside its class if it is a method."""
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
    """A function of the file, and its live counterpart."""

    function: ast.FunctionDef
    class_name: str | None  # the class of a method
    live: FunctionType  # the function that runs


def live_functions(
    tree: Tree, file: SourceFile, functions: Collection[tuple[ast.FunctionDef, str | None]]
) -> list[Live]:
    """The live counterparts of functions and methods of a file, as far as they are found."""
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
    """The function that a definition made, which decorators may have wrapped; None if not found.

    `value` is the attribute of the class or module by the function's name. At most `depth` wrappers
    are unwrapped.
    """
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType) or not depth:
        return None
    code = value.__code__
    if code.co_name == function.name and code.co_firstlineno == first_line(function):
        return value
    inner = [getattr(value, "__wrapped__", None)]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            inner.append(cell.cell_contents)
    return next((f for each in inner if (f := made_by(function, each, depth - 1))), None)


@contextlib.contextmanager
def watching(
    file: SourceFile, lives: Sequence[Live], deaths: Sequence[Death], watcher: Watcher
) -> Iterator[None]:
    """Makes functions report their calls, and delete variables, in the context."""
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
