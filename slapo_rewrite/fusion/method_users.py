"""Finds the modules that run a method or function."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node, Tree


class Sharing:
    """Tells which modules run each method and function of the model file."""

    def __init__(self, tree: Tree, sources: Sources) -> None:
        self.tree, self.file = tree, sources.main
        self._by_class: dict[type, set[int]] = {}

    def sharers(self, function: ast.FunctionDef) -> list[Node]:
        """The modules that run a method or function."""
        return [n for n in self.tree.nodes.values() if id(function) in self._run_by(n.cls)]

    def _run_by(self, cls: type) -> set[int]:
        """The functions of the file that modules of a class may run, by id."""
        if cls not in self._by_class:
            self._by_class[cls] = set(map(id, self._reached(cls)))
        return self._by_class[cls]

    def _reached(self, cls: type) -> Iterator[ast.FunctionDef]:
        seen: set[int] = set()
        names = {n for c in cls.__mro__ if c.__module__ == self.file.name for n in vars(c)}
        pending = [m for name in sorted(names) for m in self._methods(cls, name)]
        while pending:
            function = pending.pop()
            if id(function) in seen:
                continue
            seen.add(id(function))
            yield function
            named = names_in(function)
            pending += [self.file.functions[n] for n in sorted(named & self.file.functions.keys())]

    def _methods(self, cls: type, name: str) -> Iterator[ast.FunctionDef]:
        """The method of a name that is called, and those that it reaches by `super()`."""
        mro = list(cls.__mro__)
        while mro:
            found = next((c for c in mro if name in vars(c)), None)
            if found is None or found.__module__ != self.file.name:
                return
            method = self.file.method(found.__name__, name)
            if method is None:
                return
            yield method
            if "super" not in names_in(method):
                return
            mro = mro[mro.index(found) + 1 :]

    def functions(self) -> list[ast.FunctionDef]:
        """The functions and methods of the file."""
        return list({id(function): function for function, _ in self._homes.values()}.values())

    def function_of(self, node: ast.AST) -> ast.FunctionDef:
        """The method or function of the file that contains a node, or is the node."""
        return self._homes[id(node)][0]

    def owner_of(self, function: ast.FunctionDef) -> str | None:
        """The class of a method; None for a plain function of the file."""
        return self._homes[id(function)][1]

    @functools.cached_property
    def _homes(self) -> dict[int, tuple[ast.FunctionDef, str | None]]:
        """The function and class of each node of the file inside a function."""
        of_classes = [(m, name) for name in self.file.classes for m in self.file.methods(name)]
        every = [*((function, None) for function in self.file.functions.values()), *of_classes]
        return {
            id(node): (function, owner)
            for function, owner in every
            for node in ast.walk(function)
            if isinstance(node, (ast.expr, ast.stmt))
        }
