"""Collectives at local values of methods, as statements: `k = all_reduce_gradient(k)`."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.collective import Collective
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.placement import Placement, at_node
from slapo_rewrite.changes.places import AtNode
from slapo_rewrite.changes.state import Sync
from slapo_rewrite.code.build import code
from slapo_rewrite.code.dataflow import bound_in
from slapo_rewrite.code.sinking import is_alone
from slapo_rewrite.code.syntax import assignments, encloses, extent, position
from slapo_rewrite.code.text import Place
from slapo_rewrite.model.tree import Node
from slapo_rewrite.sharding.types import LocalValue, MissingCollective

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)


@dataclass(frozen=True)
class SyncValue(Change):
    """Reassigns a local variable to the result of a collective on it."""

    value: LocalValue  # the variable, and the statement to insert before or after
    collective: Collective

    def write_at(self, text: ClassText, place: AtNode) -> None:
        """Inserts the statement."""
        name = self.value.name
        line = f"{name} = {code(self.collective.of(name, text.helper))}"
        put = text.insert_after if self.value.is_bound else text.insert_before
        start = self.value.statement.at[:2]
        statement = next(s for s in text.file.statements if position(s) == start)
        put(statement, line, f"{self.collective.function} of `{name}`")


def place_value_sync(
    to: Placement, node: Node, value: LocalValue, collective: Collective, sync: Sync
) -> None:
    """Places a collective at a local value in the class of a module."""
    home, place = to.files.at(value.statement), at_node("sync", value.statement, value)
    home.changes.add(node.path, place, SyncValue(value, collective), (sync.cause,))


def value_of(files: OutputFiles, node: Node, sync: Sync) -> LocalValue | None:
    """The local value that a sync applies to, from its one assignment; None at a border."""
    if not isinstance(sync.value, str):
        return sync.value
    home = files.computing(node.cls)
    forward = home.classes.method(node.cls.__name__, "forward") if home else None
    if home is None or forward is None:
        raise errors.Unsupported(
            f"{node.shown} is a {node.cls.__module__}.{node.cls.__qualname__}: it has no "
            "`forward` in a file that is rewritten",
            at=sync.cause.at,
            hint="put the sync on a module around it, or leave out `of`",
        )
    bound = assignments(forward, sync.value)
    if (
        len(bound) != 1
        or not isinstance(bound[0], _SIMPLE[:3])
        or not is_alone(home.file, bound[0])
    ):
        lines = ", ".join(str(s.lineno) for s in bound)
        raise errors.Unsupported(
            f"`{sync.value}` is bound {f'in lines {lines}' if lines else 'by no statement'} of "
            f"`{node.cls.__name__}.forward`: it has to be one value",
            at=sync.cause.at,
            also=[home.file.at(s) for s in bound[:2]],
            hint="name a value that is bound by a single assignment, on a separate line",
        )
    return LocalValue(sync.value, Place(str(home.file.path), extent(bound[0])), is_bound=True)


def at_statement(files: OutputFiles, missing: MissingCollective) -> MissingCollective | None:
    """Moves a missing collective before the statement that contains its place.

    For a place in a loop, that is before the loop, once for all iterations. None if no statement
    can be inserted there, or if the loop assigns the variable.
    """
    assert missing.value is not None
    home, at = files.at(missing.value.statement), missing.value.statement.at
    around = [s for s in home.file.statements if encloses(extent(s), at)]
    function = max(n for n, s in enumerate(around) if isinstance(s, ast.FunctionDef))
    inside = around[function + 1 :]
    loop = next((s for s in inside if isinstance(s, ast.For | ast.While)), None)
    if loop is not None and missing.value.name in bound_in(loop):
        return None
    before = loop if loop is not None else inside[-1]
    if not isinstance(before, (*_SIMPLE, ast.For, ast.While)) or not is_alone(home.file, before):
        return None
    statement = Place(str(home.file.path), extent(before))
    return replace(missing, value=replace(missing.value, statement=statement))
