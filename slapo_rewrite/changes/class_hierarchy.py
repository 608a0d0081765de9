"""The classes of a file and their inheritance within it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.names import module_paths
from slapo_rewrite.code.syntax import end_position, position
from slapo_rewrite.code.text import Position
from slapo_rewrite.model.construction_sites import Site

# A call, subscript or product, after the method that contains it.
Found = tuple[ast.FunctionDef, ast.Call | ast.Subscript | ast.BinOp]


class ClassHierarchy:
    """Looks up methods and calls of a class, its own or inherited.

    `sites` has construction sites by the offset of their expression; `names` maps each class to its
    bases in the file, itself first.
    """

    def __init__(
        self, file: SourceFile, sites: Mapping[int, Site], names: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.file, self.sites, self.names = file, sites, names
        self._methods: dict[str, list[ast.FunctionDef]] = {}
        self._calls: dict[ast.FunctionDef, list[tuple[ast.Call, tuple[str, ...]]]] = {}

    def lineage(self, class_name: str) -> tuple[str, ...]:
        """The class and its bases in this file, in method resolution order."""
        return self.names.get(class_name, (class_name,))

    def method(self, class_name: str, name: str) -> ast.FunctionDef | None:
        """A method of the class, its own or inherited within this file."""
        found = (self.file.method(c, name) for c in self.lineage(class_name))
        return next((method for method in found if method is not None), None)

    def methods(self, class_name: str) -> list[ast.FunctionDef]:
        """The methods that its instances run, including those inherited within this file.

        An overridden method is among them if the overriding one calls it.
        """
        if class_name not in self._methods:
            self._methods[class_name] = list(self._run(class_name))
        return self._methods[class_name]

    def _run(self, class_name: str) -> Iterator[ast.FunctionDef]:
        lineage = self.lineage(class_name)
        above = {"super", *lineage[1:]}
        ended: set[str] = set()
        for name in lineage:
            own = [m for m in self.file.methods(name) if m.name not in ended]
            yield from own
            if name != lineage[-1]:
                ended |= {m.name for m in own if above.isdisjoint(names_in(m))}

    def calls_of(
        self, method: ast.FunctionDef, path: str
    ) -> list[tuple[ast.Call, tuple[str, ...]]]:
        """The calls of the module at a path, each with all paths that it may call."""
        if method not in self._calls:
            calls = (n for n in ast.walk(method) if isinstance(n, ast.Call))
            self._calls[method] = [(c, p) for c in calls if (p := module_paths(c.func, method))]
        return [(call, paths) for call, paths in self._calls[method] if path in paths]

    def nodes_at(self, class_name: str, at: Position) -> Iterator[Found]:
        """The calls, subscripts and products at a position in a class's methods."""
        for method in self.methods(class_name):
            for node in ast.walk(method):
                if not isinstance(node, (ast.Call, ast.Subscript, ast.BinOp)):
                    continue
                starts = [position(node)]
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    # If a method's name is on another line than its object, Python reports a
                    # position that starts at the name.
                    ending = node.func.end_col_offset or 0
                    length = len(node.func.attr.encode())
                    starts.append((node.func.end_lineno or node.lineno, ending - length))
                if at in [(*start, *end_position(node)) for start in starts]:
                    yield method, node

    def holds(self, class_name: str, line: int) -> bool:
        """Whether a line is in the text of a class."""
        node = self.file.classes.get(class_name)
        return node is not None and node.lineno <= line <= (node.end_lineno or line)

    def extends_forward(self, cls: type) -> bool:
        """Whether a class has no `forward`, or one that calls `super().forward`."""
        forward = self.file.method(cls.__name__, "forward")
        if forward is None:  # but one may have been assigned to the class
            return "forward" not in vars(cls)
        return any(is_call_of_super(n, "forward") for n in ast.walk(forward))


def is_call_of_super(node: ast.AST, method: str) -> bool:
    """Whether a node is `super().<method>(...)`."""
    match node:
        case ast.Call(func=ast.Attribute(ast.Call(func=ast.Name("super"), args=[]), name)):
            return name == method
    return False
