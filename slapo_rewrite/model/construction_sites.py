"""Construction sites: the expressions that make the submodules and parameters of a class."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass

from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.dataflow import uses_of
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import count_of

# Made in a function that is not a method of the class that keeps it, or of one around that.
RECORDED = "recorded"


@dataclass(frozen=True)
class Loop:
    """A loop around a construction."""

    # The `for` of a comprehension or of a statement; a `while`.
    node: ast.comprehension | ast.For | ast.While
    counter: str | None  # the local variable that counts its turns from 0, if there is one
    # Whether its turns are the elements of the list that it fills, from the first one on.
    counts: bool

    @property
    def index(self) -> str | None:
        """The local variable that counts the elements made from 0, if there is one."""
        return self.counter if self.counts else None


@dataclass(frozen=True, eq=False)
class Site:
    """An expression that makes a module or a parameter, and the name that it is given."""

    file: SourceFile  # the file it stands in
    class_name: str  # the class in whose method it stands; the model's, where it is in none
    function: ast.FunctionDef  # the function that holds the expression
    # Attribute path from the module of that class: `query`, `mlp.c_fc`, `layer.0` for a known
    # element, `layer.*` for elements made by a loop.
    path: str
    # Where it stands: `assign` (in the class that keeps the module), `argument` (in that of a
    # module around it), `recorded` (in a function that belongs to none). Or what is special about
    # it: `factory` (`from_config`, `ACT2FN[...]`), `alias` (another attribute's module),
    # `parameter`, `buffer`.
    kind: str
    statement: ast.stmt  # the innermost statement that holds `value`
    value: ast.expr  # the expression
    loops: tuple[Loop, ...]  # the loops around it, outermost first
    # Where the callee is a local variable, the statements that assign it.
    variable: tuple[ast.stmt, ...] = ()
    alias: str | None = None  # where `value` means an existing module, its path
    # Where `value` calls a function of this file that does no more than make the module, what it
    # calls, in the words that are known here.
    written_out: ast.Call | None = None

    @property
    def is_given(self) -> bool:
        """Whether the module is made outside of the class that keeps it."""
        return self.kind in ("argument", RECORDED)

    @property
    def call(self) -> ast.expr:
        """What makes it: the expression, or what the function does that this calls."""
        return self.written_out or self.value

    @property
    def callee(self) -> ast.expr | None:
        """What is called to make it; None where the expression is not a call."""
        return self.call.func if isinstance(self.call, ast.Call) else None

    @functools.cached_property
    def partial(self) -> ast.Call | None:
        """What is called, where that is `partial(Class, ...)`, or a name for it.

        Of constants, or where it has that name of names that are the same at the call.
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
        """Whether a value is a name that the function binds once, for an argument or by itself."""
        if not (isinstance(value, ast.Name) and self.variable):
            return False
        taken = [n for n in ast.walk(self.function) if isinstance(n, ast.arg) and n.arg == value.id]
        bound = uses_of(self.function, value.id, ast.Store)
        if taken:
            return value.id in parameters(self.function) and len(taken) == 1 and not bound
        plain = (s for s in self.function.body if isinstance(s, ast.Assign))
        return len(bound) == 1 and bound[0] in (target for s in plain for target in s.targets)

    def _named(self, name: str) -> ast.expr | None:
        """What a name is given, where one statement of the function, or else of the file, does."""
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
        """What the class gets, by place and by name; what a `partial` of it gives included."""
        assert isinstance(self.call, ast.Call)
        args, keywords = self.call.args, self.call.keywords
        if (made := self.partial) is not None:
            given = {keyword.arg for keyword in keywords}
            args = [*made.args[1:], *args]
            keywords = [*keywords, *(k for k in made.keywords if k.arg not in given)]
        return args, keywords

    @property
    def count(self) -> ast.expr | None:
        """How many turns the one loop around it takes, as an expression that can stand inside."""
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
