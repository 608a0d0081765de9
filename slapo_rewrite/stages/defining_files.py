"""The files that define the modules around cuts, and the names that stages take from them."""

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

# The origin of an imported name: a module, and the name in it; '' for the module itself.
Origin = tuple[str, str]


@dataclass(frozen=True, eq=False)
class DefiningFile:
    """A file with classes of the model."""

    file: SourceFile
    world: Mapping[str, Any]  # the global names of its module
    module: str  # the module name for `pipeline.py`; with a leading dot for output files

    def value(self, name: str) -> Any:
        """The value of a global or built-in name; raises `KeyError` if there is none."""
        return self.world[name] if name in self.world else vars(builtins)[name]

    def origin(self, name: str) -> Origin | None:
        """The origin of a name of this file; None if the file does not bind it."""
        for node in ast.walk(self.file.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    if bound_by(alias) != name:
                        continue
                    shown = ast.unparse(alias)
                    if isinstance(node, ast.Import):
                        return shown, ""
                    if self.module.startswith("."):
                        return "." * node.level + (node.module or ""), shown
                    return self.file.resolve_import(node), shown
        return (self.module, name) if name in self.file.names else None


class DefiningFiles:
    """The files that define a model's classes, and the names that stages take from them."""

    def __init__(self, file: SourceFile, module: ModuleType, world: Mapping[str, Any]) -> None:
        self.main = DefiningFile(file, world, f".{file.path.stem}")  # the model file
        self.package = module.__name__.rpartition(".")[0]
        self._files: dict[str, DefiningFile | None] = {module.__name__: self.main}
        # The origins of names that the model file does not have.
        self.origins: dict[str, Origin] = {}
        self.values: dict[str, Any] = {}  # the values of these names

    def of(self, cls: type) -> DefiningFile | None:
        """The file that defines a class; None if it cannot be read.

        Also None for torch's classes, which stages call, except for `nn.Sequential`, a loop.
        """
        name = cls.__module__
        if is_torch(name) and cls is not nn.Sequential:
            return None
        if name not in self._files:
            self._files[name] = self._read(name)
        found = self._files[name]
        return found if found is not None and cls.__name__ in found.file.classes else None

    def known(self) -> Iterator[DefiningFile]:
        """The files that were read so far."""
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
        file.display = f"rewritten/{path.name}"  # its temporary path would not help users
        return DefiningFile(file, vars(module), f".{path.stem}")

    def origin(self, name: str) -> Origin | None:
        """The origin of a name in the stages; None if no file binds it."""
        return self.origins.get(name) or self.main.origin(name)

    def changing(self, modules: Iterable[object], by_itself: bool = False) -> frozenset[str]:
        """Attributes that may change after the modules' construction.

        With `by_itself`, only those that a step itself changes, not methods called between steps.
        """
        found = {self.main, *filter(None, (self.of(type(module)) for module in modules))}
        methods = [method for each in found for method in methods_in(each.file)]
        return CHANGING | attributes_set(run_in_forward(methods) if by_itself else methods)

    def names_of(self, function: ast.FunctionDef, home: DefiningFile, word: str) -> dict[str, str]:
        """New names in the stages for globals that a function reads, where these differ.

        `word` is the prefix for a name that has another meaning already.
        """
        if home is self.main:
            return {}
        read = sorted(read_in(function) - local_names(function))
        spelled = {name: self.spelled(name, home, word) for name in read}
        return {name: new for name, new in spelled.items() if new is not None and new != name}

    def spelled(self, name: str, home: DefiningFile, word: str) -> str | None:
        """The name in the stages for a global of a file; None if the file has no such name.

        It is the same name, unless that has another meaning in the model file or in another one:
        then it gets the prefix `word`.
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
        """Whether a name has this value in the stages, or is free."""
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
            module, first = home.module, name  # another binding of the name is in effect
        if not wanted:
            return (module, "") if spelled == name else (home.module, f"{name} as {spelled}")
        return module, imported_as(first, spelled)
