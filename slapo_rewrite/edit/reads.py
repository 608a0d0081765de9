"""Where a class reads the size of a layer that is split, it means the whole layer's."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from slapo_rewrite.edit.definition import Definition, ReadWhole
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.splice import Edit, apply_edits, moved
from slapo_rewrite.edit.text import accessor, simple_statements


def readings(
    lineages: Lineages, class_name: str, path: str, attribute: str
) -> Iterator[ast.Attribute]:
    """The places where a class reads an attribute of the module at a path below it."""
    wanted = f"{accessor(path)}.{attribute}"
    for method in lineages.methods(class_name):
        for node in ast.walk(method):
            if (
                isinstance(node, ast.Attribute)
                and _is_attribute(node)
                and node.attr == attribute
                and ast.unparse(node) == wanted
            ):
                yield node


class WholeSizes:
    """The edits that read whole sizes where a layer's own are read.

    Args:
        lineages: The classes of the model file.
        class_name: The class.
        definition: What changes in it.

    Attributes:
        by_statement: The edits, by the statement that they stand in.
    """

    def __init__(self, lineages: Lineages, class_name: str, definition: Definition) -> None:
        self.file = lineages.file
        wanted = {k[1]: w for k, w in definition.changes.items() if isinstance(w, ReadWhole)}
        self.by_statement: dict[ast.stmt, list[Edit]] = {}
        for method in lineages.methods(class_name) if wanted else ():
            for statement in simple_statements(method):
                for node in ast.walk(statement):
                    what = wanted.get(self.file.span(node)[1]) if _is_attribute(node) else None
                    if what is None or not isinstance(node, ast.Attribute):
                        continue
                    start, end = self.file.span(node.value)[1] + 1, self.file.span(node)[1]
                    causes = definition.causes.get(("read", end), ())
                    why = f"the size of the whole `{ast.unparse(node.value)}`"
                    edit = Edit(start, end, what.attribute, causes, why)
                    self.by_statement.setdefault(statement, []).append(edit)

    def segment(self, node: ast.AST) -> str:
        """The text of an expression, with whole sizes where a layer's own are read."""
        start, end = self.file.span(node)
        inside = [
            e
            for edits in self.by_statement.values()
            for e in edits
            if start <= e.start and e.end <= end
        ]
        return apply_edits(self.file.text[start:end], moved(inside, -start))[0]


def _is_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
