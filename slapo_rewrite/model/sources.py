"""The files that a model's classes come from, and what their constructors make."""

from __future__ import annotations

import ast
import itertools
import os
import re
import sys
import types
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.code.arguments import first_parameter
from slapo_rewrite.code.evaluate import is_plain
from slapo_rewrite.code.facts import Submodule, dotted
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.groups import grouped
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.construction_calls import Call
from slapo_rewrite.model.construction_sites import Site, find_later_sites, find_sites
from slapo_rewrite.model.constructor_values import Frame
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import HOOKS

# How a class puts something into a module that another class made, and not into a list of its own.
_DEEP_KINDS = {
    *("assign", "setattr", "add_module", "argument", "alias", "helper", "factory"),
    *("parameter", "buffer"),
}


class Sources:
    """The files that the classes of a model come from, each read once.

    The main one is rewritten; classes of the `editable` modules may be as well.
    """

    def __init__(self, main: SourceFile, editable: Collection[str] = ()) -> None:
        self.main, self.editable = main, editable
        self._files: dict[str, SourceFile | None] = {main.name: main}
        self._paths: dict[str, str | None] = {}
        self._made: dict[type, Maker] = {}
        self.known: dict[tuple[int, str], Site] = {}
        # What was made of the functions of modules, by their number; kept for those who read them.
        self.scopes: dict[int, list[Any]] = {}
        self.followed: dict[Any, Any] = {}
        # Live modules as facts, by their ids, each with the module.
        self.submodules: dict[int, tuple[nn.Module, Submodule]] = {}
        self.fingerprints = Fingerprints()
        self._nodes: dict[int, tuple[Node, dict[int, list[Node]]]] = {}
        self._made_at: dict[int, tuple[Node, dict[Call, dict[str, nn.Module]]]] = {}

    def file_of(self, cls: type) -> SourceFile | None:
        """The file that defines a class; None where it has none that can be read."""
        return self.file_named(cls.__module__)

    def defines(self, file: SourceFile, cls: type) -> bool:
        """Whether a file defines a class; one that lies elsewhere is not read to tell."""
        name = cls.__module__
        if name not in self._files and not self._lies_at(name, file.path):
            return False
        return self.file_named(name) is file

    def _lies_at(self, name: str, path: Path) -> bool:
        if name not in self._paths:
            found = getattr(sys.modules.get(name), "__file__", None)
            self._paths[name] = os.path.realpath(found) if found else None
        return self._paths[name] == os.path.realpath(path)

    def file_named(self, name: str) -> SourceFile | None:
        """The file of a module that has been imported."""
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
        """The classes along the MRO that have a source, most derived first, without torch's own."""
        own = [c for c in cls.__mro__ if not c.__module__.startswith("torch.nn.")]
        found = [(self.file_of(c), c.__name__) for c in own]
        return [(f, name) for f, name in found if f is not None and name in f.classes]

    def check_originals(self, root: Node) -> None:
        """Refuses a model that is split already, or whose methods call their object something else.

        Raises:
            Unsupported: A layer is an output's, or a method calls its object otherwise than `self`.
        """
        for node in root.walk():
            if hasattr(node.live, "sharded_parameters"):
                raise errors.Unsupported(
                    f"{node.shown} is a {node.cls.__name__} that shares its weight with other "
                    "ranks already: the file was rewritten before",
                    hint="rewrite the original, by one schedule that asks for everything",
                )
        for cls in dict.fromkeys(c for node in root.walk() for c in node.cls.__mro__):
            if not self.defines(self.main, cls):
                continue
            for method in self.main.methods(cls.__name__):
                is_static = isinstance(vars(cls).get(method.name), staticmethod | classmethod)
                if not is_static and (name := first_parameter(method)) not in ("self", None):
                    raise errors.Unsupported(
                        f"`{cls.__name__}.{method.name}` calls its object `{name}`, and what "
                        "methods do is read by the name `self`",
                        at=self.main.at(method),
                        hint="rename it to `self`; without an object it is a @staticmethod",
                    )

    def maker(self, cls: type) -> Maker:
        """What the constructors of a class make."""
        if cls not in self._made:
            self._made[cls] = Maker(self, cls)
        return self._made[cls]

    def regrown(self) -> None:
        """Forgets what it knows of nodes, since the tree has others now."""
        self._nodes.clear()
        self._made_at.clear()
        self.known.clear()
        self.scopes.clear()
        self.followed.clear()
        self.submodules.clear()
        self.fingerprints = Fingerprints()

    def made_at(self, root: Node, call: Call) -> dict[str, nn.Module]:
        """The modules of a model that a call made, by their first paths; elements left out too."""
        if id(root) not in self._made_at:
            found: dict[Call, dict[str, nn.Module]] = {}
            for path, live in root.live.named_modules():
                for place in construction_calls.stack_of(live)[:1]:
                    found.setdefault(place, {})[path] = live
            self._made_at[id(root)] = root, found
        return self._made_at[id(root)][1].get(call, {})

    def same_live(self, node: Node) -> list[Node]:
        """The other nodes that hold the same module."""
        root = node.root
        if id(root) not in self._nodes:
            self._nodes[id(root)] = root, grouped((id(each.live), each) for each in root.walk())
        return [n for n in self._nodes[id(root)][1].get(id(node.live), []) if n is not node]


@dataclass(frozen=True, eq=False)
class Level:
    """A class along the MRO whose constructor runs, and the call that made it run."""

    cls: type
    file: SourceFile
    frame: Frame | None
    call: ast.Call | None
    function: ast.FunctionDef | None


class Maker:
    """The sites of a class along its MRO; a base class is read only where that is needed."""

    def __init__(self, sources: Sources, cls: type) -> None:
        self.sources = sources
        self.cls = cls
        self.levels: list[Level] = []
        self._pending = _levels(sources, cls)
        self._patterns: list[_Patterns] = []
        self.level_of: dict[Site, int] = {}
        self._matches: dict[str, list[tuple[Site, tuple[str, ...]]]] = {}

    def match(self, relative: str) -> list[tuple[Site, tuple[str, ...]]]:
        """The sites that may make a path, in the order in which they are carried out."""
        if relative not in self._matches:
            found: list[tuple[Site, tuple[str, ...]]] = []
            head = relative.partition(".")[0]
            for patterns in self._each():
                here = patterns.match(relative)
                found = [*here, *found]
                if here and any(not s.guards for s in patterns.near(head)):
                    break
            self._matches[relative] = found
        return self._matches[relative]

    def near(self, relative: str) -> list[Site]:
        """The sites of the attribute that a path begins with."""
        head = relative.partition(".")[0]
        return [s for patterns in self._each() for s in patterns.near(head)]

    def _each(self) -> Iterator[_Patterns]:
        number = 0
        while number < len(self._patterns) or self._grow():
            yield self._patterns[number]
            number += 1

    def _grow(self) -> bool:
        """Reads one class more along the MRO; False where there is none."""
        level = next(self._pending, None)
        if level is None:
            return False
        patterns = _Patterns()
        for sites in find_sites(level.file, level.cls.__name__).values():
            patterns.extend(sites)
            self.level_of.update((s, len(self.levels)) for s in sites)
        self.levels.append(level)
        self._patterns.append(patterns)
        return True

    @cached_property
    def has_deep(self) -> bool:
        """Whether the class itself puts modules into modules that other classes make."""
        constructed = [c for c in self.cls.__mro__ if "__init__" in vars(c)]
        own = itertools.takewhile(lambda c: c.__module__ == self.cls.__module__, constructed)
        return any(patterns.deep for _, patterns in zip(own, self._each(), strict=False))

    @cached_property
    def later(self) -> _Patterns:
        """The sites in other methods than the constructor."""
        found = _Patterns()
        for cls in reversed(self.cls.__mro__):
            file = self.sources.file_of(cls) if cls is not nn.Module else None
            if file is not None and cls.__name__ in file.classes:
                for sites in find_later_sites(file, cls.__name__).values():
                    found.extend(sites)
        return found

    @cached_property
    def constructor(self) -> ast.FunctionDef | None:
        """The function that takes the arguments of an instantiation."""
        next(self._each(), None)
        return self.levels[0].function if self.levels else None

    def stored(self, level: Level) -> dict[str, str]:
        """The parameters that a constructor keeps in attributes as they are."""
        found: dict[str, str] = {}
        for path, (site, *others) in find_sites(level.file, level.cls.__name__).items():
            plain = not others and not site.steps and "." not in path
            if plain and site.kind == "argument" and isinstance(site.value, ast.Name):
                found.setdefault(site.value.id, path)
        return found


class _Patterns:
    """Sites by path pattern."""

    def __init__(self) -> None:
        self._exact: dict[str, list[Site]] = {}
        self._globs: dict[str, tuple[re.Pattern[str], list[Site]]] = {}
        self.deep = False

    def extend(self, sites: list[Site]) -> None:
        for site in sites:
            self.deep |= "." in site.path and not site.container and site.kind in _DEEP_KINDS
            if "*" not in site.path:
                self._exact.setdefault(site.path, []).append(site)
            else:
                self._globs.setdefault(site.path, (site.pattern, []))[1].append(site)

    def match(self, relative: str) -> list[tuple[Site, tuple[str, ...]]]:
        """The sites that may make this path, with what each `*` stands for."""
        found: list[tuple[Site, tuple[str, ...]]] = [(s, ()) for s in self._exact.get(relative, ())]
        for regex, sites in self._globs.values():
            match = regex.fullmatch(relative)
            if match:
                found += [(s, match.groups()) for s in sites]
        return found

    def near(self, name: str) -> list[Site]:
        """The sites of an attribute."""
        return self._exact.get(name, [])


def _levels(sources: Sources, cls: type) -> Iterator[Level]:
    """The constructors that run when a class is instantiated, the most derived first."""
    mro = list(cls.__mro__)
    position = 0
    frame: Frame | None = None
    call: ast.Call | None = None
    while position < len(mro):
        each = mro[position]
        file = sources.file_of(each) if each is not nn.Module else None
        if file is None or each.__name__ not in file.classes or "__init__" not in vars(each):
            position += 1
            continue
        function = file.method(each.__name__, "__init__")
        yield Level(each, file, frame, call, function)
        if function is None:
            position += 1
            continue
        call, position = _next_constructor(function, mro, position)
        frame = Frame(function)


def _next_constructor(
    function: ast.FunctionDef, mro: list[type], position: int
) -> tuple[ast.Call | None, int]:
    """The call by which a constructor runs the next one, and where that is in the MRO."""
    names = [c.__name__ for c in mro]
    for call in ast.walk(function):
        match call:
            case ast.Call(func=ast.Attribute(value=owner, attr="__init__")):
                pass
            case _:
                continue
        match owner:
            case ast.Call(func=ast.Name(id="super"), args=[]):
                return call, position + 1
            case ast.Call(func=ast.Name(id="super"), args=[ast.Name(id=name), *_]):
                if name in names:
                    return call, names.index(name) + 1
            case ast.Name(id=name) | ast.Attribute(attr=name):
                if name in names[position:]:
                    return None, names.index(name)
    return None, len(mro)


class Fingerprints:
    """One number for all modules of a kind whose attributes are equal, all the way down."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[str, int] = {}

    def of(self, node: Node) -> int:
        """The number of a module."""
        if node.path not in self._known:
            held = tuple((n, self.of(child)) for n, child in node.children.items())
            attributes = {n: v for n, v in vars(node.live).items() if not n.startswith("_")}
            # What counts the layers tells no layer from another; an option of torch's modules does.
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
    """Whether an attribute is the number of a layer around it, and not equal to that by chance.

    By chance, the same module of a layer beside it has the same.
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


def _seen(value: object) -> Hashable:
    """What a reader sees of an attribute."""
    if is_plain(value):
        return type(value), repr(value)
    if isinstance(value, nn.Module | torch.Tensor):
        return dotted(type(value))
    if isinstance(value, types.MethodType):
        return value.__name__
    if callable(value):
        return dotted(value) or id(value)
    return id(value)
