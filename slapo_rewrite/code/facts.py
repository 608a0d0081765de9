"""Facts about a module that its `forward` refers to: its attributes, and the meaning of names.

`slapo_rewrite.model.node_facts` takes them from the live tree; patterns take them from live
functions.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from slapo_rewrite.code.evaluate import Constant, is_plain
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.text import joined_path


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer."""


@dataclass(frozen=True)
class Other:
    """An object of another kind."""


@dataclass(frozen=True)
class Property:
    """An attribute that is computed each time it is read."""


@dataclass(frozen=True)
class Function:
    """A function: its dotted name, or the module's own method of that name."""

    name: str = ""  # the name of a function
    method: str = ""  # the name of a method
    options: tuple[tuple[str, object], ...] = ()  # keyword arguments that are bound already


@dataclass(frozen=True)
class Submodule:
    """A submodule."""

    cls: str  # the dotted name of the class whose `forward` runs, such as `torch.nn.Linear`
    random: bool = True  # whether it may draw random numbers
    stateless: bool = False  # whether it has no parameters or buffers, nor have modules below
    plain: bool = False  # whether a call only runs the `forward` of its class
    children: tuple[str, ...] = ()  # the names of its submodules
    regex: str | None = None  # in a pattern, the paths of modules that it matches


Fact = Constant | Tensor | Property | Function | Submodule | Other


class Facts(Protocol):
    """The facts about a live module that a reader of its source needs."""

    def look(self, path: str) -> Fact | None:
        """The kind of the attribute at a dotted path; None if it is not known."""
        return None

    def method(self, path: str, name: str) -> tuple[SourceFile, ast.FunctionDef] | None:
        """A method of a submodule's class, after its file; the path '' is the module itself."""
        return None

    def place(self, path: str) -> tuple[SourceFile, ast.AST] | None:
        """The construction site of a submodule."""
        return None


Name = Constant | str
Resolver = Callable[[str], Name | None]


def names_of(file: SourceFile) -> Resolver:
    """Resolves names at the module level of a file to absolute dotted names."""
    return lambda name: file.qualified(ast.Name(name, ast.Load()))


def live_names(names: Mapping[str, Any]) -> Resolver:
    """Resolves names in a live function to constants or absolute dotted names."""
    return lambda name: described(names[name]) if name in names else None


def described(value: object) -> Name | None:
    """A live object as a constant or a dotted name; None if it is neither."""
    if is_plain(value):
        return Constant(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    return dotted(value) if callable(value) else None


def dotted(function: object) -> str | None:
    """The public dotted name of a function or class."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if name is None or "<" in name:
        return None
    owner, _, last = name.rpartition(".")
    if owner in ("_VariableFunctionsClass", "_VariableFunctions"):
        return f"torch.{last}"
    home = getattr(function, "__module__", None) or ""
    if home == "torch._C._nn":
        return f"torch.nn.functional.{name}"
    if home.startswith("torch.nn.modules."):
        return f"torch.nn.{name}"
    return joined_path(home, name)


class NoFacts(Facts):
    """No facts, for a function that is not a method."""
