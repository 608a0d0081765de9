"""The files in which the modules on the way to a cut have their `forward`, and their names."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import is_torch
from slapo_rewrite.code.dataflow import read_in
from slapo_rewrite.code.file import SourceFile, read_once
from slapo_rewrite.code.liveness import local_names
from slapo_rewrite.code.text import bound_by, imported_as
from slapo_rewrite.stages.environment import CHANGING
from slapo_rewrite.stages.function_syntax import (
    attributes_set,
    methods_in,
    run_in_forward,
)

# Where stages import a name from: a module, and what of it; '' for the module itself.
Origin = tuple[str, str]


@dataclass(frozen=True, eq=False)
class DefiningFile:
    """A file with classes of the model."""

    file: SourceFile
    world: Mapping[str, Any]  # the names of its module
    module: str  # how `pipeline.py` imports it; files of the output by a dot

    def value(self, name: str) -> Any:
        """What a name that is not local means here; `KeyError` where that is nothing."""
        return self.world[name] if name in self.world else vars(builtins)[name]

    def origin(self, name: str) -> Origin | None:
        """Where a name of this file comes from; None for one that it does not bind."""
        for node in ast.walk(self.file.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    if bound_by(alias) != name:
                        continue
                    shown = ast.unparse(alias)
                    if isinstance(node, ast.Import):
                        return shown, ""
                    return self._imported_from(node), shown
        return (self.module, name) if name in self.file.names else None

    def _imported_from(self, node: ast.ImportFrom) -> str:
        if self.module.startswith("."):
            return "." * node.level + (node.module or "")
        return self.file.resolve_import(node)


class DefiningFiles:
    """The files that define a model's classes, and the names that stages take from them."""

    def __init__(self, file: SourceFile, module: ModuleType, world: Mapping[str, Any]) -> None:
        self.main = DefiningFile(file, world, f".{file.path.stem}")  # the model file
        self.package = module.__name__.rpartition(".")[0]
        self._files: dict[str, DefiningFile | None] = {module.__name__: self.main}
        # Where names come from that the model file does not have.
        self.origins: dict[str, Origin] = {}
        self.values: dict[str, Any] = {}  # what they stand for

    def of(self, cls: type) -> DefiningFile | None:
        """The file that defines a class; None where none can be read.

        Nor for torch's, which the stages call, but for `nn.Sequential`, which is a loop.
        """
        name = cls.__module__
        if is_torch(name) and cls is not nn.Sequential:
            return None
        if name not in self._files:
            self._files[name] = self._read(name)
        found = self._files[name]
        return found if found is not None and cls.__name__ in found.file.classes else None

    def known(self) -> Iterator[DefiningFile]:
        """Those that were read so far."""
        yield from filter(None, self._files.values())

    def _read(self, name: str) -> DefiningFile | None:
        module = sys.modules.get(name)
        path = Path(getattr(module, "__file__", None) or "")
        if module is None or path.suffix != ".py":
            return None
        try:
            if not self.package or name.rpartition(".")[0] != self.package:
                return DefiningFile(read_once(path, name), vars(module), name)
            file = SourceFile.read(path, name)
        except (errors.SourceError, OSError):
            return None
        file.display = f"rewritten/{path.name}"  # where it lies meanwhile tells nobody anything
        return DefiningFile(file, vars(module), f".{path.stem}")

    def origin(self, name: str) -> Origin | None:
        """Where stages import a name from; None for one that no file binds."""
        return self.origins.get(name) or self.main.origin(name)

    def changing(self, modules: Iterable[object], by_itself: bool = False) -> frozenset[str]:
        """Attributes that are not what they were when the modules were made.

        Those `by_itself` a step changes, whatever else is called between steps.
        """
        found = {self.main, *filter(None, (self.of(type(module)) for module in modules))}
        methods = [method for each in found for method in methods_in(each.file)]
        return CHANGING | attributes_set(run_in_forward(methods) if by_itself else methods)

    def names_of(self, function: ast.FunctionDef, home: DefiningFile, word: str) -> dict[str, str]:
        """How the stages call the names that a function reads of its file, where otherwise.

        `word` goes before a name that means something else already.
        """
        if home is self.main:
            return {}
        read = sorted(read_in(function) - local_names(function))
        spelled = {name: self.spelled(name, home, word) for name in read}
        return {name: new for name, new in spelled.items() if new is not None and new != name}

    def spelled(self, name: str, home: DefiningFile, word: str) -> str | None:
        """How the stages call what a name means in a file; None where it means nothing.

        By the name itself, unless that means something else in the model file, or in another one:
        then `word` goes before it.
        """
        try:
            value = home.value(name)
        except KeyError:
            return None
        spelled = name
        while not self._means(spelled, value):
            spelled = f"{word}_{spelled}"
        if home is not self.main and spelled not in self.main.world and name in home.world:
            self.values[spelled] = value
            self.origins[spelled] = self._origin(home, name, spelled, value)
        return spelled

    def _means(self, name: str, value: Any) -> bool:
        """Whether a name means a value in the stages, or can be given it."""
        if name in self.values:
            return self.values[name] is value
        try:
            return self.main.value(name) is value
        except KeyError:
            return True

    @staticmethod
    def _origin(home: DefiningFile, name: str, spelled: str, value: Any) -> Origin:
        module, wanted = home.origin(name) or (home.module, name)
        first = wanted.partition(" as ")[0]
        if wanted and getattr(sys.modules.get(module), first, None) is not value:
            module, first = home.module, name  # bound in several ways, and by another one of them
        if not wanted:
            return (module, "") if spelled == name else (home.module, f"{name} as {spelled}")
        return module, imported_as(first, spelled)
