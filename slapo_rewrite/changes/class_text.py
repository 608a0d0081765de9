"""Collects the text changes of one class."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.class_hierarchy import ClassHierarchy, Found
from slapo_rewrite.changes.elements import IndexSets
from slapo_rewrite.changes.imports import Imports
from slapo_rewrite.changes.places import AtNode, Place
from slapo_rewrite.code.build import parsed
from slapo_rewrite.code.edit import Edit
from slapo_rewrite.code.lines import Line, Lines
from slapo_rewrite.code.splice import Edit as TextEdit
from slapo_rewrite.directive import Causes


class ClassText:
    """The text changes of a class, by statement.

    `imports` collects the names that the new text refers to, `wanted` has all changes of the class
    by place, and `indices` has the elements that each loop constructs.
    """

    causes: Causes = ()  # the directives behind the current change

    def __init__(
        self,
        classes: ClassHierarchy,
        imports: Imports,
        class_name: str,
        wanted: Mapping[Place, object],
        indices: IndexSets,
    ) -> None:
        self.classes, self.imports, self.class_name = classes, imports, class_name
        self.wanted, self.indices = wanted, indices
        self.file = classes.file
        self.lines: dict[ast.stmt, Lines] = {}  # the changes, by statement

    def asked_by(self, causes: Causes) -> ClassText:
        """The same class, for changes caused by these directives."""
        same = copy.copy(self)
        same.causes = causes
        return same

    def helper(self, module: str, name: str) -> str:
        """The reference to a name of a helper module."""
        return self.imports.helper(module, name, self.causes)

    def methods(self) -> list[ast.FunctionDef]:
        """The methods that instances of the class run."""
        return self.classes.methods(self.class_name)

    def method(self, name: str) -> ast.FunctionDef | None:
        """The method of a name, if the class has it in this file."""
        return self.classes.method(self.class_name, name)

    def forward(self) -> ast.FunctionDef:
        """The class's `forward`; raises `Unsupported` if it has none in this file."""
        found = self.method("forward")
        if found is None:
            raise errors.Unsupported(
                f"`{self.class_name}` defines no `forward` for the collective",
                at=self.at_class(),
                cause=self.causes,
                hint="put the sync on a module inside or around it",
            )
        return found

    def at_class(self) -> errors.Span:
        """The place of the class's definition."""
        return self.file.at(self.file.classes[self.class_name])

    # What changes -----------------------------------------------------------------------------

    def at(self, statement: ast.stmt) -> Lines:
        """The changes around a statement, for adding to."""
        return self.lines.setdefault(statement, Lines())

    def replace(
        self,
        node: ast.expr | ast.stmt,
        make: Callable[[Any], cst.CSTNode],
        why: str,
        *,
        outer: bool = False,
    ) -> None:
        """Replaces a node of a method; see `code.edit.Edit`."""
        statement = self.file.statement_of(node)
        self.at(statement).inside.append((Edit(node, make, outer), self.causes, why))

    def put(self, node: ast.expr, text: str, why: str) -> None:
        """Replaces an expression by a text."""
        self.replace(node, lambda _: parsed(text), why)

    def insert_before(
        self, statement: ast.stmt, text: str, why: str, tests: tuple[ast.expr, ...] = ()
    ) -> None:
        """Inserts a statement before another."""
        self.at(statement).before.append(Line(text, self.causes, why, tests=tests))

    def insert_after(self, statement: ast.stmt, text: str, why: str, *, once: bool = False) -> None:
        """Inserts a statement after another."""
        self.at(statement).after.append(Line(text, self.causes, why, once))

    def place(self, statement: ast.stmt, edit: TextEdit, why: str) -> None:
        """Adds an edit that replaces statements from this one on, or inserts text beside it."""
        self.at(statement).around.append(edit.caused_by(self.causes, why))

    # Where ------------------------------------------------------------------------------------

    def nodes_at(self, place: AtNode) -> Iterator[Found]:
        """The calls, subscripts and products at a place, each after its method."""
        return self.classes.nodes_at(self.class_name, place.at)

    def where(self, at: ast.AST | AtNode) -> dict[str, Any]:
        """The keyword arguments of an error: the place, and the directives that ask."""
        if isinstance(at, ast.AST):
            return {"at": self.file.at(at), "cause": self.causes}
        return {"at": self.file.shown(at.at), "cause": self.causes}
