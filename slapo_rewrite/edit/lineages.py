"""The classes of the model file, with those of it that they are derived from."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from slapo_rewrite.edit.definition import Key
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

    def lineage(self, class_name: str) -> tuple[str, ...]:
        """The class and those of this file that it is derived from, in the order of look-up."""
        return self.names.get(class_name, (class_name,))

    def method(self, class_name: str, name: str) -> ast.FunctionDef | None:
        """A method, the class's own or one that it inherits in this file."""
        found = (self.file.method(c, name) for c in self.lineage(class_name))
        return next((method for method in found if method is not None), None)

    def methods(self, class_name: str) -> Iterator[ast.FunctionDef]:
        """The methods, those that it inherits in this file included."""
        for name in self.lineage(class_name):
            yield from self.file.methods(name)

    def home(self, class_name: str, key: Key) -> str:
        """The class in whose text a change stands."""
        if key[0] in ("site", "parameter", "hook"):
            return self.sites[key[1]].class_name
        if key[0] == "base":
            return self.lineage(class_name)[-1]
        if key[0] == "mixin":
            return str(key[1])
        if key[0] in ("size", "forward"):
            wanted = "__init__" if key[0] == "size" else "forward"
            found = (c for c in self.lineage(class_name) if self.file.method(c, wanted))
            return next(found, class_name)
        if key[0] in ("argument", "loss", "statistic", "part", "read", "text"):
            line = key[1] if key[0] != "read" else self.file.text.count("\n", 0, key[1]) + 1
            return next((c for c in self.lineage(class_name) if self.holds(c, line)), class_name)
        return class_name

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
