"""What is known of a module from outside its `forward`: what its attributes are, what names mean.

Filled in from the live tree by `slapo_rewrite.model.node_facts`, and for patterns from live
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
    """An object of which nothing is known."""


@dataclass(frozen=True)
class Property:
    """An attribute that is computed each time it is read."""


@dataclass(frozen=True)
class Function:
    """A function: its dotted name, or the module's own method of that name."""

    name: str = ""  # of a function
    method: str = ""  # of a method
    options: tuple[tuple[str, object], ...] = ()  # arguments that it already has


@dataclass(frozen=True)
class Submodule:
    """A module."""

    cls: str  # the dotted name of the class whose `forward` runs, `torch.nn.Linear` say
    random: bool = True  # whether it may draw random numbers
    stateless: bool = False  # whether neither it nor a module below holds parameters or buffers
    plain: bool = False  # whether a call runs the `forward` of its class and nothing else
    children: tuple[str, ...] = ()  # names of its submodules
    regex: str | None = None  # the paths that it stands for, in a pattern


Fact = Constant | Tensor | Property | Function | Submodule | Other


class Facts(Protocol):
    """A live module, as far as a reader of its source needs to know it."""

    def look(self, path: str) -> Fact | None:
        """What the attribute at a dotted path is; None where that is not known."""
        return None

    def method(self, path: str, name: str) -> tuple[SourceFile, ast.FunctionDef] | None:
        """A method of a submodule's class, '' for the module itself, and the file it stands in."""
        return None

    def place(self, path: str) -> tuple[SourceFile, ast.AST] | None:
        """Where a submodule is made."""
        return None


Name = Constant | str
Resolver = Callable[[str], Name | None]


def names_of(file: SourceFile) -> Resolver:
    """What the module level of a file means by a name, as a dotted absolute name."""
    return lambda name: file.qualified(ast.Name(name, ast.Load()))


def live_names(names: Mapping[str, Any]) -> Resolver:
    """What a live function means by a name: a constant, or a dotted absolute name."""
    return lambda name: described(names[name]) if name in names else None


def described(value: object) -> Name | None:
    """A live object as a constant or a dotted name; None where it is neither."""
    if is_plain(value):
        return Constant(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    return dotted(value) if callable(value) else None


def dotted(function: object) -> str | None:
    """The dotted name under which torch's documentation, or anybody, knows a function or class."""
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
    """Nothing is known: of a function that is no method."""
