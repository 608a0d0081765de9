"""Where methods read what belongs to other modules: sizes of split layers, and parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from slapo_rewrite.edit.definition import Definition, ReadWhole
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.splice import Edit, apply_edits, moved
from slapo_rewrite.edit.text import accessor, simple_statements

# What is read of a parameter, and what is asked about it, without its numbers.
_FACTS = {"dtype", "device", "shape", "ndim", "is_meta", "requires_grad"}
_QUESTIONS = {"hasattr", "isinstance", "type", "id"}


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


def in_forward(lineages: Lineages, class_name: str, node: ast.AST) -> bool:
    """Whether an expression stands in the `forward` that instances of a class run."""
    forward = lineages.method(class_name, "forward")
    return forward is not None and any(inner is node for inner in ast.walk(forward))


def values_read(method: ast.FunctionDef, name: str) -> Iterator[tuple[ast.stmt, ast.Attribute]]:
    """The places where a method reads the numbers of an attribute of that name."""
    for statement in simple_statements(method):
        asked = set(map(id, _asked_about(statement)))
        for node in ast.walk(statement):
            if (
                isinstance(node, ast.Attribute)
                and _is_attribute(node)
                and node.attr == name
                and id(node) not in asked
            ):
                yield statement, node


def is_question(method: ast.FunctionDef, end: tuple[int, int]) -> bool:
    """Whether what a method reads at a place, by its end, is asked about without its numbers."""
    found = (*_asked_about(method), *(n for n in ast.walk(method) if _is_call_of(n, {"hasattr"})))
    return any((n.end_lineno, n.end_col_offset) == end for n in found if isinstance(n, ast.expr))


def _asked_about(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _FACTS:
            yield node.value
        elif isinstance(node, ast.Call) and _is_call_of(node, _QUESTIONS):
            yield from node.args
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            yield from (node.left, *node.comparators)


def _is_call_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


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
