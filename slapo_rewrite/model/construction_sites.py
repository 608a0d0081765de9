"""Construction sites: the expressions that make the submodules and parameters of a class."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass

from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.dataflow import uses_of
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import count_of

# Made in a function that is not a method of the class of the module's owner or an ancestor.
RECORDED = "recorded"


@dataclass(frozen=True)
class Loop:
    """A loop around a construction."""

    # The `for` of a comprehension, or a `for` or `while` statement.
    node: ast.comprehension | ast.For | ast.While
    counter: str | None  # the local variable that counts iterations from 0, if any
    # Whether its iterations are the elements of the list that it fills, in order.
    counts: bool

    @property
    def index(self) -> str | None:
        """The local variable that is the index of the list's element, if there is one."""
        return self.counter if self.counts else None


@dataclass(frozen=True, eq=False)
class Site:
    """An expression that makes a module or a parameter, and the path where that is stored."""

    file: SourceFile  # the file that contains it
    class_name: str  # the class whose method contains it, or else the model's class
    function: ast.FunctionDef  # the function that contains the expression
    # Attribute path from the module of that class: `query`, `mlp.c_fc`, `layer.0` for a known
    # element, `layer.*` for elements made by a loop.
    path: str
    # Where it is: `assign` (in the class that stores the module), `argument` (in the class of an
    # ancestor), `recorded` (in a function of neither). Or what it makes: `factory`
    # (`from_config`, `ACT2FN[...]`), `alias` (another attribute's module), `parameter`, `buffer`.
    kind: str
    statement: ast.stmt  # the innermost statement that contains `value`
    value: ast.expr  # the expression
    loops: tuple[Loop, ...]  # the loops around it, outermost first
    # If the callee is a local variable, the statements that assign it.
    variable: tuple[ast.stmt, ...] = ()
    alias: str | None = None  # if `value` is an existing module, its path
    # If `value` calls a function of this file that only makes the module, the call in that
    # function, written in the caller's variables.
    written_out: ast.Call | None = None

    @property
    def is_given(self) -> bool:
        """Whether the module is made outside of the class that stores it."""
        return self.kind in ("argument", RECORDED)

    @property
    def call(self) -> ast.expr:
        """The expression, or the body of the function that it calls, written out."""
        return self.written_out or self.value

    @property
    def callee(self) -> ast.expr | None:
        """The callee of the call; None if the expression is not a call."""
        return self.call.func if isinstance(self.call, ast.Call) else None

    @functools.cached_property
    def partial(self) -> ast.Call | None:
        """The `partial(Class, ...)` that is called, directly or by a name; else None.

        Its arguments must be constants, or, if it has a name, variables that are never rebound.
        """
        if {"functools", "functools.partial"}.isdisjoint(self.file.imports.values()):
            return None
        found = self.callee
        if isinstance(found, ast.Name):
            found = self._named(found.id)
        if not isinstance(found, ast.Call) or not found.args or not isinstance(self.call, ast.Call):
            return None
        given = [*found.args[1:], *(k.value for k in found.keywords)]
        plain = all(isinstance(each, ast.Constant) or self._is_given_once(each) for each in given)
        plain &= all(k.arg is not None for k in [*found.keywords, *self.call.keywords])
        is_partial = self.file.qualified(found.func) == "functools.partial"
        return found if plain and is_partial else None

    def _is_given_once(self, value: ast.expr) -> bool:
        """Whether a value is a variable that the function binds once, as a parameter or inside."""
        if not (isinstance(value, ast.Name) and self.variable):
            return False
        taken = [n for n in ast.walk(self.function) if isinstance(n, ast.arg) and n.arg == value.id]
        bound = uses_of(self.function, value.id, ast.Store)
        if taken:
            return value.id in parameters(self.function) and len(taken) == 1 and not bound
        plain = (s for s in self.function.body if isinstance(s, ast.Assign))
        return len(bound) == 1 and bound[0] in (target for s in plain for target in s.targets)

    def _named(self, name: str) -> ast.expr | None:
        """The value of a name that a single statement of the function, or of the file, assigns."""
        bound: tuple[ast.stmt, ...] = self.variable
        if not bound:
            if any(isinstance(n, ast.arg) and n.arg == name for n in ast.walk(self.function.args)):
                return None
            stored = uses_of(self.file.tree, name, ast.Store)  # in whichever scope
            bound = tuple(map(self.file.statement_of, stored))
            if any(statement not in self.file.tree.body for statement in bound):
                return None
        match bound:
            case [ast.Assign(targets=[ast.Name()], value=value)]:
                return value
        return None

    @property
    def arguments(self) -> tuple[list[ast.expr], list[ast.keyword]]:
        """The positional and keyword arguments of the class, those of a `partial` included."""
        assert isinstance(self.call, ast.Call)
        args, keywords = self.call.args, self.call.keywords
        if (made := self.partial) is not None:
            given = {keyword.arg for keyword in keywords}
            args = [*made.args[1:], *args]
            keywords = [*keywords, *(k for k in made.keywords if k.arg not in given)]
        return args, keywords

    @property
    def count(self) -> ast.expr | None:
        """The number of iterations of its only loop, as an expression valid inside it; or None."""
        if len(self.loops) != 1 or not self.loops[0].counts:
            return None
        node = self.loops[0].node
        if isinstance(node, ast.While):
            return None
        count = count_of(node.iter)
        inside = [node] if isinstance(node, ast.comprehension) else [node.target, *node.body]
        if count is None or not _named(*inside, context=ast.Store).isdisjoint(_named(count)):
            return None
        return count


def _named(*nodes: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    """The names and attributes that some nodes read, or bind."""
    named = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute))
    found = (n for n in named if isinstance(n.ctx, context))
    return {n.id if isinstance(n, ast.Name) else n.attr for n in found}
