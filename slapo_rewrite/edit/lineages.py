"""The classes of the model file, with those of it that they are derived from."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from slapo_rewrite.edit.definition import Key
from slapo_rewrite.edit.text import accessor
from slapo_rewrite.source.index import SourceFile
from slapo_rewrite.source.sites import Site


class Lineages:
    """Looks up what a class has, in its own text or by inheritance.

    Args:
        file: The model file.
        sites: Construction sites by the first character of their expression.
        names: Each class and those of the file that it is derived from.
    """

    def __init__(
        self, file: SourceFile, sites: Mapping[int, Site], names: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.file, self.sites, self.names = file, sites, names
        self._methods: dict[str, list[ast.FunctionDef]] = {}

    def lineage(self, class_name: str) -> tuple[str, ...]:
        """The class and those of this file that it is derived from, in the order of look-up."""
        return self.names.get(class_name, (class_name,))

    def method(self, class_name: str, name: str) -> ast.FunctionDef | None:
        """A method, the class's own or one that it inherits in this file."""
        found = (self.file.method(c, name) for c in self.lineage(class_name))
        return next((method for method in found if method is not None), None)

    def methods(self, class_name: str) -> list[ast.FunctionDef]:
        """The methods that its instances run, those that it inherits in this file included.

        One that another takes the place of is among them if that one calls it.
        """
        if class_name not in self._methods:
            self._methods[class_name] = list(self._run(class_name))
        return self._methods[class_name]

    def _run(self, class_name: str) -> Iterator[ast.FunctionDef]:
        above = {"super", *self.lineage(class_name)[1:]}
        ended: set[str] = set()
        for name in self.lineage(class_name):
            own = [m for m in self.file.methods(name) if m.name not in ended]
            yield from own
            ended |= {m.name for m in own if above.isdisjoint(_names(m))}

    def home(self, class_name: str, key: Key) -> str:
        """The class in whose text a change stands that is no method's."""
        if key[0] in ("site", "parameter", "hook"):
            return self.sites[key[1]].class_name
        if key[0] == "base":
            return self.lineage(class_name)[-1]
        if key[0] == "mixin":
            return str(key[1])
        found = (c for c in self.lineage(class_name) if self.file.method(c, "__init__"))
        return next(found, class_name) if key[0] == "size" else class_name

    def places(self, class_name: str, key: Key) -> list[ast.FunctionDef] | None:
        """The methods in which a change of a class stands; None where it is no method's."""
        methods = self.methods(class_name)
        match key[0]:
            case "forward":
                return [m for m in methods if m.name == "forward"][:1]
            case "call":
                called = accessor(key[1])
                return [m for m in methods if any(_calls(node, called) for node in ast.walk(m))]
            case "gradient":
                return [m for m in methods if any(_reads(node, key[1]) for node in ast.walk(m))]
            case "argument" | "loss" | "statistic" | "part" | "text" | "read":
                line = key[1] if key[0] != "read" else self.file.text.count("\n", 0, key[1]) + 1
                return [m for m in methods if m.lineno <= line <= (m.end_lineno or line)]
        return None

    def holds(self, class_name: str, line: int) -> bool:
        """Whether a line stands in the text of a class."""
        node = self.file.classes.get(class_name)
        return node is not None and node.lineno <= line <= (node.end_lineno or line)

    def extends_forward(self, class_name: str) -> bool:
        """Whether a class has no `forward`, or one that leaves the layer's work to `super()`."""
        forward = self.file.method(class_name, "forward")
        return forward is None or any(
            isinstance(n, ast.Call) and ast.unparse(n.func) == "super().forward"
            for n in ast.walk(forward)
        )


def _names(method: ast.FunctionDef) -> set[str]:
    return {node.id for node in ast.walk(method) if isinstance(node, ast.Name)}


def _calls(node: ast.AST, called: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == called


def _reads(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name
