"""One class of a file, while changes are written into it."""

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
    """Takes what changes in the text of a class.

    `imports` takes the names that the changes refer to, `wanted` is all that changes, by its place,
    and `indices` has the elements that each loop makes.
    """

    causes: Causes = ()  # the directives that ask for what is written

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
        self.lines: dict[ast.stmt, Lines] = {}  # what changes, by statement

    def asked_by(self, causes: Causes) -> ClassText:
        """The same class, for what these directives ask for."""
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
        """One of them."""
        return self.classes.method(self.class_name, name)

    def forward(self) -> ast.FunctionDef:
        """The class's `forward`; `Unsupported` where it has none in this file."""
        found = self.method("forward")
        if found is None:
            raise errors.Unsupported(
                f"`{self.class_name}` has no `forward` of its own to put the collective in",
                at=self.at_class(),
                cause=self.causes,
                hint="put the sync on a module inside or around it",
            )
        return found

    def at_class(self) -> errors.Span:
        """Where the class is defined."""
        return self.file.at(self.file.classes[self.class_name])

    # What changes -----------------------------------------------------------------------------

    def at(self, statement: ast.stmt) -> Lines:
        """What changes around a statement, to be added to."""
        return self.lines.setdefault(statement, Lines())

    def replace(
        self,
        node: ast.expr | ast.stmt,
        make: Callable[[Any], cst.CSTNode],
        why: str,
        *,
        outer: bool = False,
    ) -> None:
        """Puts something in the place of a node of a method; see `code.edit.Edit`."""
        statement = self.file.statement_of(node)
        self.at(statement).inside.append((Edit(node, make, outer), self.causes, why))

    def put(self, node: ast.expr, text: str, why: str) -> None:
        """Puts an expression, given by its text, in the place of another."""
        self.replace(node, lambda _: parsed(text), why)

    def insert_before(self, statement: ast.stmt, text: str, why: str) -> None:
        """Puts a statement before another."""
        self.at(statement).before.append(Line(text, self.causes, why))

    def insert_after(self, statement: ast.stmt, text: str, why: str, *, once: bool = False) -> None:
        """Puts a statement behind another."""
        self.at(statement).after.append(Line(text, self.causes, why, once))

    def place(self, statement: ast.stmt, edit: TextEdit, why: str) -> None:
        """Puts text in the place of statements from this one on, or beside it."""
        self.at(statement).around.append(edit.caused_by(self.causes, why))

    # Where ------------------------------------------------------------------------------------

    def nodes_at(self, place: AtNode) -> Iterator[Found]:
        """The calls and subscripts at a place, with the method that they are in."""
        return self.classes.nodes_at(self.class_name, place.at)

    def where(self, at: ast.AST | AtNode) -> dict[str, Any]:
        """The place of what a refusal is of, and who asks for it."""
        if isinstance(at, ast.AST):
            return {"at": self.file.at(at), "cause": self.causes}
        return {"at": self.file.shown(at.at), "cause": self.causes}
