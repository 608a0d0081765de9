"""Finds the statements after which local variables of a function are dead."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slapo_rewrite.code.arguments import first_parameter
from slapo_rewrite.code.blocks import blocks, statements, with_statements
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.liveness import bound_around, dead_behind
from slapo_rewrite.code.sinking import is_alone
from slapo_rewrite.code.syntax import position

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
# Syntax and names by which a function keeps or inspects its local variables in other ways.
_OTHERWISE = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
_LOOKING = {"locals", "vars", "dir", "eval", "exec", "inspect", "sys"}
_TRYING = (ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True)
class Death:
    """A local variable that is dead after a statement."""

    statement: ast.stmt  # the statement
    name: str


def deaths(file: SourceFile, function: ast.FunctionDef) -> list[Death]:
    """Where a function may delete dead variables: each is bound there on every path.

    A variable is deleted in the block that binds it, or after a compound statement of that block.
    Variables in a `try` or `match`, in inner functions or in generators are left alone.
    """
    inner = (node for statement in function.body for node in ast.walk(statement))
    looks_at_names = not _LOOKING.isdisjoint(names_in(*function.body))
    if looks_at_names or any(isinstance(node, _OTHERWISE) for node in inner):
        return []
    found = [d for d in _Deaths(file, function).inside(function.body) if d.name]
    # A deletion unbinds the variable further on, and in the next iteration of a loop.
    while wrong := _unbound(function, found):
        found = [death for death in found if death not in wrong]
    return found


def dropping(
    function: ast.FunctionDef, behind: Mapping[ast.stmt, Sequence[ast.stmt]]
) -> ast.FunctionDef:
    """A copy of a function with statements inserted after some; the others are the same objects."""
    return with_statements(function, lambda each, made: [made, *behind.get(each, ())])


class _Deaths:
    """Walks over the blocks of a function to find dead variables."""

    def __init__(self, file: SourceFile, function: ast.FunctionDef) -> None:
        self.file, self.function = file, function
        self.bound, self.dead = bound_around(function), dead_behind(function)
        nodes = list(ast.walk(function))
        holding = [n for n in nodes if isinstance(n, (ast.GeneratorExp, *_TRYING))]
        self.kept: set[str | None] = {*names_in(*holding), first_parameter(function)}

    def inside(self, body: Sequence[ast.stmt], outer: Collection[str] = ()) -> Iterator[Death]:
        """The deaths in a block.

        `outer` names die after the statement that contains the block.
        """
        for statement in body:
            behind = self._behind(statement) - set(outer)
            if isinstance(statement, _LOOPS):
                inner = list(self.inside(statement.body, outer))
                inner += self.inside(statement.orelse, behind)
            elif isinstance(statement, _TRYING):
                continue
            else:
                taken = {*outer, *behind}
                inner = [d for block in blocks(statement) for d in self.inside(block, taken)]
            yield from inner
            dropped = {death.name for death in inner}
            yield from (
                Death(statement, n) for n in self._named(statement) if n in behind - dropped
            )

    def _behind(self, statement: ast.stmt) -> set[str]:
        """The names that can be deleted right after a statement."""
        if statement not in self.bound or not is_alone(self.file, statement):
            return set()
        if isinstance(statement, ast.If) and self.file.segment(statement).startswith("elif"):
            return set()  # no statement can be inserted between two branches
        before, after = self.bound[statement]
        # A context manager may suppress an exception, which leaves names of its body unbound.
        sure = before.sure if isinstance(statement, ast.With) else after.sure
        return set(sure & self.dead[statement]) - self.kept

    def _named(self, statement: ast.stmt) -> list[str]:
        """The names that a statement mentions, in the order of the text."""
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Delete)):
            return []
        named = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
        return list(dict.fromkeys(n.id for n in sorted(named, key=position)))


def _unbound(function: ast.FunctionDef, found: Sequence[Death]) -> list[Death]:
    """The deaths whose names may be unbound already at the deletion."""
    behind: dict[ast.stmt, list[ast.stmt]] = {}
    made: dict[ast.stmt, Death] = {}
    for death in found:
        drop = ast.Delete([ast.Name(death.name, ast.Del())])
        behind.setdefault(death.statement, []).append(drop)
        made[drop] = death
    bound = bound_around(dropping(function, behind))
    known = {s for s in statements(dropping(function, behind).body) if s in made}
    return [
        death
        for drop, death in made.items()
        if drop in known and (drop not in bound or death.name not in bound[drop][0].sure)
    ]
