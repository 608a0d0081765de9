"""The source files that define a model's classes."""

from __future__ import annotations

import ast
import os
import sys
import types
from collections.abc import Collection, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import first_parameter
from slapo_rewrite.code.blocks import first_line
from slapo_rewrite.code.evaluate import is_plain
from slapo_rewrite.code.facts import Submodule, dotted
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.text import Position
from slapo_rewrite.groups import grouped
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.construction_calls import Stack
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import HOOKS


class Sources:
    """The source files that define a model's classes, each read once.

    The main file is rewritten. Classes of the `editable` modules may be rewritten as well.
    """

    def __init__(self, main: SourceFile, editable: Collection[str] = ()) -> None:
        self.main, self.editable = main, editable
        self._files: dict[str, SourceFile | None] = {main.name: main}
        self._paths: dict[str, str | None] = {}
        self.known: dict[tuple[int, str], Site] = {}
        # Caches of other parts of the tool: the followed functions of modules, by module number.
        self.scopes: dict[int, list[Any]] = {}
        self.followed: dict[Any, Any] = {}
        # Live modules as facts, by their ids, each with the module.
        self.submodules: dict[int, tuple[nn.Module, Submodule]] = {}
        self.fingerprints = Fingerprints()
        self._nodes: dict[int, tuple[Node, dict[int, list[Node]]]] = {}
        self._made: dict[tuple[int, int], tuple[Node, dict[Stack, dict[str, nn.Module]]]] = {}
        # Caches of `join`: the calls that make modules, by file and place, and their modules.
        self.made: dict[tuple[str, Position], Any] = {}
        self.filled: dict[tuple[int, Stack], Any] = {}

    def file_of(self, cls: type) -> SourceFile | None:
        """The file that defines a class at its top level; None if no readable file does."""
        file = self.file_named(cls.__module__)
        return file if file is not None and _is_in(file, cls) else None

    def defines(self, file: SourceFile, cls: type) -> bool:
        """Whether a file defines a class, decided without reading other files."""
        name = cls.__module__
        is_near = name in self._files or self._lies_at(name, file.path)
        return is_near and self.file_of(cls) is file

    def _lies_at(self, name: str, path: Path) -> bool:
        if name not in self._paths:
            found = getattr(sys.modules.get(name), "__file__", None)
            self._paths[name] = os.path.realpath(found) if found else None
        return self._paths[name] == os.path.realpath(path)

    def file_named(self, name: str) -> SourceFile | None:
        """The file of an imported module; None if it cannot be read."""
        if name not in self._files:
            self._files[name] = self._read(name)
        return self._files[name]

    def _read(self, name: str) -> SourceFile | None:
        path = getattr(sys.modules.get(name), "__file__", None)
        if not path or not path.endswith(".py"):
            return None
        if self._lies_at(name, self.main.path):
            return self.main
        try:
            return SourceFile.read(Path(path), name)
        except errors.SourceError:
            return None

    def classes(self, cls: type) -> list[tuple[SourceFile, str]]:
        """The classes of the MRO with a known source, most derived first, without `torch.nn`'s."""
        own = (c for c in cls.__mro__ if not c.__module__.startswith("torch.nn."))
        return [(file, c.__name__) for c in own if (file := self.file_of(c)) is not None]

    def check_originals(self, root: Node) -> None:
        """Refuses a model that is sharded already, and methods whose object is not `self`."""
        for node in root.walk():
            if hasattr(node.live, "sharded_parameters"):
                raise errors.Unsupported(
                    f"{node.shown} is a {node.cls.__name__} that already shares its weight with "
                    "other ranks: the file was rewritten before",
                    hint="rewrite the original with one schedule that contains everything",
                )
        for cls in dict.fromkeys(c for node in root.walk() for c in node.cls.__mro__):
            if not self.defines(self.main, cls):
                continue
            for method in self.main.methods(cls.__name__):
                is_static = isinstance(vars(cls).get(method.name), staticmethod | classmethod)
                if not is_static and (name := first_parameter(method)) not in ("self", None):
                    raise errors.Unsupported(
                        f"`{cls.__name__}.{method.name}` names its first parameter `{name}`, but "
                        "methods are only followed through `self`",
                        at=self.main.at(method),
                        hint="rename it to `self`, or make the method a @staticmethod",
                    )

    def constructor(self, cls: type) -> tuple[SourceFile, ast.FunctionDef] | None:
        """The `__init__` that an instantiation calls, and its file; None without a source."""
        for file, name in self.classes(cls):
            if (function := file.method(name, "__init__")) is not None:
                return file, function
        return None

    def regrown(self) -> None:
        """Clears the caches about nodes, since the tree was changed."""
        self._nodes.clear()
        self._made.clear()
        self.filled.clear()
        self.known.clear()
        self.scopes.clear()
        self.followed.clear()
        self.submodules.clear()
        self.fingerprints = Fingerprints()

    def made_by(self, root: Node, calls: Stack) -> dict[str, nn.Module]:
        """The live modules made by a stack of calls, by first path, also those outside the tree."""
        key = id(root), len(calls)
        if key not in self._made:
            found: dict[Stack, dict[str, nn.Module]] = {}
            for path, live in root.live.named_modules():
                stack = construction_calls.stack_of(live)
                found.setdefault(stack[: len(calls)], {})[path] = live
            self._made[key] = root, found
        return self._made[key][1].get(calls, {})

    def same_live(self, node: Node) -> list[Node]:
        """The other nodes that hold the same module."""
        return [n for n in self._holding(node) if n is not node]

    def first_of(self, node: Node) -> Node:
        """The first of the nodes that hold the same module."""
        return next(iter(self._holding(node)), node)

    def _holding(self, node: Node) -> list[Node]:
        root = node.root
        if id(root) not in self._nodes:
            self._nodes[id(root)] = root, grouped((id(each.live), each) for each in root.walk())
        return self._nodes[id(root)][1].get(id(node.live), [])


class Fingerprints:
    """Numbers modules: equal for those of one kind with equal attributes, submodules included."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[str, int] = {}

    def of(self, node: Node) -> int:
        """The number of a module."""
        if node.path not in self._known:
            held = tuple((n, self.of(child)) for n, child in node.children.items())
            attributes = {n: v for n, v in vars(node.live).items() if not n.startswith("_")}
            # A layer's index does not distinguish layers, but an option of torch's modules does.
            counts = not node.cls.__module__.startswith("torch.")
            own = tuple(
                (n, "index" if counts and type(v) is int and _is_index(node, n, v) else _seen(v))
                for n, v in attributes.items()
            )
            hooks = tuple(len(getattr(node.live, name)) for name in HOOKS)
            key = (node.cls, node.kind, own, held, hooks, tuple(node.buffers))
            self._known[node.path] = self._numbers.setdefault(key, len(self._numbers))
        return self._known[node.path]


def _is_index(node: Node, name: str, value: int) -> bool:
    """Whether an attribute is the index of an enclosing layer, and not equal to it by chance.

    It is equal by chance if the same module of the next layer has the same value.
    """
    steps: list[str] = []
    for above in node.outwards():
        if above.name == str(value) and above.parent is not None:
            beside = above.parent.children
            other = beside.get(str(value + 1)) or beside.get(str(value - 1))
            other = other.at(".".join(reversed(steps))) if other is not None else None
            if other is None or vars(other.live).get(name) != value:
                return True
        steps.append(above.name)
    return False


def _is_in(file: SourceFile, cls: type) -> bool:
    """Whether a class is the one that a file defines at its top level by that name.

    If the file defines the class or one of its methods several times, Python may have taken another
    definition than the last one.
    """
    name = cls.__qualname__
    lines = [(m.name, first_line(m)) for m in file.methods(name)]
    last = dict(lines)
    if name not in file.several and len(last) == len(lines):
        return name == cls.__name__ and name in file.classes
    codes = (f.__code__ for f in vars(cls).values() if isinstance(f, types.FunctionType))
    own = {(c.co_name, c.co_firstlineno) for c in codes if c.co_qualname == f"{name}.{c.co_name}"}
    return own <= last.items()


def _seen(value: object) -> Hashable:
    """A key for comparing attribute values of two modules."""
    if is_plain(value):
        return type(value), repr(value)
    if isinstance(value, nn.Module | torch.Tensor):
        return dotted(type(value))
    if isinstance(value, types.MethodType):
        return value.__name__
    if callable(value):
        return dotted(value) or id(value)
    return id(value)
