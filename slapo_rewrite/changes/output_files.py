"""The files that may be rewritten, with the changes collected for each.

These are the model file, the schedule file, and every other file outside of torch that defines
classes of the model. For a class of such another file, changes go to its construction or call sites
where that is possible; its file is rewritten only for changes inside of the class.
"""

from __future__ import annotations

import functools
import keyword
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.changes.change_set import ChangeSet
from slapo_rewrite.changes.class_hierarchy import ClassHierarchy
from slapo_rewrite.changes.construction import Construction, UseSubclass
from slapo_rewrite.changes.imports import EAGER, KERNEL_FILES, Imports
from slapo_rewrite.changes.places import EndOfConstructor
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.names import unique
from slapo_rewrite.code.text import Place, joined_path
from slapo_rewrite.directive import Causes, Directive
from slapo_rewrite.model.join import Sources, known_site
from slapo_rewrite.model.layers import base_of
from slapo_rewrite.model.tree import Node, Tree

# The names of helper modules, which lie in the output folder as well.
_RESERVED = {p.stem for p in (Path(__file__).parents[1] / "runtime").glob("*")} - {EAGER}
_RESERVED |= {"modules", "pipeline", *KERNEL_FILES}


@dataclass
class OutputFile:
    """The changes collected for one file."""

    file: SourceFile
    changes: ChangeSet  # the changes of its classes
    classes: ClassHierarchy
    imports: Imports  # the names that it needs from helper modules


class OutputFiles:
    """The output files: one for each file that defines classes of the model, except torch's."""

    def __init__(self, tree: Tree, sources: Sources) -> None:
        self.sources = sources
        self._classes = list({node.cls: None for node in tree.nodes.values()})
        self._files: dict[str, OutputFile] = {}
        self._by_path: dict[str, OutputFile] = {}
        self._by_class: dict[type, OutputFile | None] = {}
        self._siblings: dict[str, tuple[str, ...]] = {}
        self._same: dict[int, dict[int, Directive]] = {}
        self._stems: dict[str, str] = {}
        self.main = self._open(sources.main)  # the model file's
        self.stem(sources.main)
        seen: set[type] = set()
        for node in tree.nodes.values():
            if node.cls not in seen:
                seen.add(node.cls)
                for file in self._working_in(node):
                    self._open(file)

    def shares_of(self, tree: Tree) -> dict[str, set[str]]:
        """The attributes that change at the end of constructors, by module path."""
        found: dict[str, set[str]] = {}
        for file in self._files.values():
            for path, changes in file.changes.by_path.items():
                names = {p.attribute for p in changes if isinstance(p, EndOfConstructor)}
                found.setdefault(path, set()).update(names)
        return {path: found.get(stands, set()) for path, stands in self._stand_ins(tree).items()}

    def made_in(self, tree: Tree) -> Iterator[tuple[Node, Construction, Causes]]:
        """The modules that get another class, each with the change and its directives."""
        meant: dict[str, tuple[Construction, Causes]] = {}
        for file in self._files.values():
            for (owner, place), changes in file.changes.made.items():
                causes = file.changes.causes[owner][place]
                for path, change in changes.items():
                    if isinstance(change, Construction):
                        meant[path] = change, causes
        for path, stands in self._stand_ins(tree).items():
            if stands in meant:
                yield tree.nodes[path], *meant[stands]

    def _stand_ins(self, tree: Tree) -> dict[str, str]:
        """Maps the path of each module to that of the module whose changes it shares."""
        own = self.stand_in()
        first = tree.first_paths()
        return {path: own(first[id(node.live)]) for path, node in tree.nodes.items()}

    def _working_in(self, node: Node) -> Iterator[SourceFile]:
        """The files that construct a module's contents or define its computation."""
        held = node.children.keys() | node.parameters.keys()
        holds = bool(held) or any(map(_may_tell_a_size, _own(node.live)))
        for base in node.cls.__mro__:
            if base.__module__ in self.sources.editable:
                makes = True
            elif is_torch(base.__module__):
                continue
            else:
                own = vars(base)
                code = getattr(own.get("__init__"), "__code__", None)
                makes = "forward" in own and holds
                # A torch layer creates its parameters in `super().__init__`.
                is_layer = base_of(base) is not None
                makes |= code is not None and (is_layer or not held.isdisjoint(code.co_names))
            file = self.sources.file_of(base) if makes else None
            if file is not None:
                yield file

    def _open(self, file: SourceFile) -> OutputFile:
        """The output file of a source file, created on first use."""
        if file.name not in self._files:
            output = self._files[file.name] = self._new(file, self._classes)
            output.changes.siblings, output.changes.same = self._siblings, self._same
            self._by_class.clear()
            path = file.path
            for name in (str(path), os.path.realpath(path), os.path.abspath(path)):
                self._by_path[name] = output
        return self._files[file.name]

    def _new(self, file: SourceFile, classes: list[type]) -> OutputFile:
        names = {
            cls.__name__: tuple(c.__name__ for c in cls.__mro__ if self.sources.defines(file, c))
            for cls in classes
            # Classes of two files may have the same name.
            if cls.__name__ not in file.classes or self.sources.defines(file, cls)
        }
        changes = ChangeSet(self.sources, file)
        return OutputFile(file, changes, ClassHierarchy(file, changes.sites, names), Imports(file))

    def __iter__(self) -> Iterator[OutputFile]:
        return iter(self._files.values())

    def named(self, module: str) -> OutputFile:
        """The output file of a Python module that has one."""
        return self._files[module]

    def of(self, cls: type) -> OutputFile | None:
        """The file that defines a class; None if it may not be rewritten."""
        if cls not in self._by_class:
            defining = (o for o in self._files.values() if self.sources.defines(o.file, cls))
            self._by_class[cls] = next(defining, None)
        return self._by_class[cls]

    def computing(self, cls: type) -> OutputFile | None:
        """The file that defines the `forward` of a class, if it may be rewritten."""
        return self._with_method(cls, "forward")

    def constructing(self, cls: type) -> OutputFile | None:
        """The file that defines the constructor of a class, likewise."""
        return self._with_method(cls, "__init__")

    def _with_method(self, cls: type, method: str) -> OutputFile | None:
        home = self.of(cls)
        if home is None or home.classes.method(cls.__name__, method):
            return home
        return self.of(next(c for c in cls.__mro__ if method in vars(c))) or home

    def lineage(self, cls: type, output: OutputFile) -> tuple[str, ...]:
        """The class and its bases, as far as one file defines them."""
        if self.of(cls) is output:
            return output.classes.lineage(cls.__name__)
        if cls.__name__ in output.file.classes:  # another class of that name
            return ()
        return output.classes.names.get(cls.__name__, ())

    def is_other(self, output: OutputFile) -> bool:
        """Whether a file is neither the model's nor the schedule's."""
        return output is not self.main and output.file.name not in self.sources.editable

    def stem(self, file: SourceFile) -> str:
        """The name of a file in the output folder, without its extension."""
        if file.name in self.sources.editable:
            return "modules"
        if file.name not in self._stems:
            *above, name = [*file.package.split("."), file.path.stem]
            name = above.pop() if name == "__init__" else _identifier(name)
            taken = {*_RESERVED, *self._stems.values()}
            while name in taken and any(above):
                name = f"{above.pop()}_{name}"
            name = f"{name}_model" if name in _RESERVED else name
            self._stems[file.name] = unique(name, taken.__contains__, "_")
        return self._stems[file.name]

    def making(self, node: Node) -> OutputFile:
        """The file with a module's construction site; the model file if that is not known."""
        site = known_site(self.sources, node)
        return self.of_file(site.file) if site else self.main

    def of_file(self, file: SourceFile) -> OutputFile:
        """The output file of a source file; the model file for one of torch's."""
        return self.main if is_torch(file.name) else self._open(file)

    def use_at(self, making: SourceFile, home: SourceFile, name: str, original: str) -> UseSubclass:
        """The change that makes a construction site in `making` use a class of the file `home`."""
        if home is making:
            return UseSubclass(name, original)
        is_above = any(m.startswith(f"{making.name}.") for m in home.imports.values())
        return UseSubclass(name, original, self.stem(home), is_above)

    def holds(self, filename: str) -> bool:
        """Whether a file may be rewritten."""
        return filename in self._by_path

    def text_of(self, filename: str) -> str | None:
        """The current text of a file that may be rewritten; None for other files."""
        output = self._by_path.get(filename)
        return output.file.text if output is not None else None

    def at(self, place: Place) -> OutputFile:
        """The output file of a place; the model file for a place in another file."""
        return self._by_path.get(place.filename, self.main)

    def span(self, place: Place) -> errors.Span:
        """A place for a message, also for one in a file that is not rewritten."""
        output = self._by_path.get(place.filename)
        return place.shown() if output is None else output.file.shown(place.at)

    def siblings(self, known: Mapping[str, tuple[str, ...]]) -> None:
        """Sets, for the first of several equal list elements, the names of all of them."""
        self._siblings.clear()
        self._siblings.update(known)

    def stands_for(self) -> dict[str, str]:
        """Maps the path of each of several equal list elements to that of the first."""
        return {
            joined_path(path.rpartition(".")[0], name): path
            for path, names in self._siblings.items()
            for name in names
        }

    def stand_in(self) -> Callable[[str], str]:
        """Returns a function from a module's path to that of the module that stands in for it."""
        elements = self.stands_for()

        @functools.cache  # shared parents are computed once
        def told(path: str) -> str:
            if not path:
                return path
            above, _, name = path.rpartition(".")
            own = joined_path(told(above), name)
            return elements.get(own, own)

        return told

    def asked_alike(self, states: Mapping[str, ModuleRequests]) -> None:
        """Records which directives made the same requests for equal list elements."""
        own = self.stand_in()
        pairs = {}  # few, since modules share states
        for path, state in states.items():
            of_its_kind = states.get(own(path), state)
            pairs[id(of_its_kind), id(state)] = of_its_kind, state
        for of_its_kind, state in pairs.values():
            for mine, other in zip(of_its_kind.every_cause(), state.every_cause(), strict=True):
                if mine.number != other.number:
                    self._same.setdefault(mine.number, {})[other.number] = other


def _identifier(stem: str) -> str:
    """A file's name as a valid identifier, so that it can be imported."""
    plain = unicodedata.normalize("NFKC", stem)  # as Python normalises identifiers
    name = re.sub(r"\W", "_", plain.strip("_") if plain.startswith("__") else plain)
    name = name if name.isidentifier() else f"model_{name}"
    return f"{name}_model" if keyword.iskeyword(name) else name


def is_torch(module: str) -> bool:
    """Whether a module is part of torch, which is never rewritten."""
    return module.partition(".")[0] in ("torch", "builtins")


def _own(module: object) -> Iterator[object]:
    """The values of a module's own attributes, without those of `nn.Module`."""
    return (v for k, v in vars(module).items() if not k.startswith("_") and k != "training")


def _may_tell_a_size(value: object) -> bool:
    return type(value) is int or (hasattr(value, "__dict__") and not callable(value))
