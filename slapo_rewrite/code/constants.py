"""Evaluates constants of the tool's own files from their source, without importing them.

They import torch, which takes seconds and is not needed for printing information about them.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

from slapo_rewrite.bundle import rules_folder

LIGHT = "slapo_rewrite.examples"  # imported normally: it does not import torch


class Constants(dict[str, Any]):
    """The values of a file's top-level names, evaluated on demand."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tree = ast.parse(path.read_text(encoding="utf-8"))  # the file's syntax tree

    def __missing__(self, name: str) -> Any:
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id)], value=value) if id == name:
                    self[name] = self.value(value)
                    return self[name]
                case ast.ImportFrom(module=str(home), names=names, level=0):
                    for alias in names:
                        if (alias.asname or alias.name) == name:
                            return _imported(home, alias.name)
        return vars(builtins)[name]

    def value(self, node: ast.expr) -> Any:
        """The value of an expression of the file."""
        return eval(compile(ast.Expression(node), "<constant>", "eval"), {}, self)


@functools.cache
def constants(home: str) -> Constants:
    """The constants of a module of the tool."""
    _, *parts = home.split(".")
    folder = Path(__file__).parents[1]
    if parts[:1] == ["rules"]:
        folder, parts = rules_folder(), parts[1:]
    path = folder.joinpath(*parts)
    return Constants(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def _imported(home: str, name: str) -> Any:
    if home == LIGHT:
        return getattr(importlib.import_module(home), name)
    if not home.startswith("slapo_rewrite."):
        raise NameError(f"`{name}` of {home} is only known after its import")
    return constants(home)[name]


class Class:
    """A class of a file, read from its source."""

    def __init__(self, file: Constants, node: ast.ClassDef) -> None:
        self.doc = ast.get_docstring(node) or ""  # its docstring
        self._file, self._body = file, node.body

    @classmethod
    def named(cls, home: str, name: str) -> Class:
        """The class of a module that has this `name` attribute."""
        file = constants(home)
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and (found := cls(file, node)).get("name") == name:
                return found
        raise KeyError(name)

    def get(self, attribute: str, default: Any = None) -> Any:
        """The value of a class attribute."""
        for node in self._body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id)], value=ast.expr() as value)
                    | ast.AnnAssign(target=ast.Name(id), value=ast.expr() as value)
                ) if id == attribute:
                    return self._file.value(value)
        return default

    def stub(self, method: str) -> inspect.Signature:
        """The signature of a static method, without annotations."""
        stub = next(n for n in self._body if isinstance(n, ast.FunctionDef) and n.name == method)
        namespace: dict[str, Any] = {}
        text = f"from __future__ import annotations\n{ast.unparse(stub)}"  # never evaluates them
        exec(text, namespace)
        own = inspect.signature(namespace[method])
        plain = [p.replace(annotation=p.empty) for p in own.parameters.values()]
        return own.replace(parameters=plain, return_annotation=own.empty)
