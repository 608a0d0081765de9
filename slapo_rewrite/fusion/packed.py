"""A module in the place of part of a `forward`: a subclass that holds it, and calls it there."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.edit.desks import Desks
from slapo_rewrite.edit.expressions import formatted
from slapo_rewrite.edit.lines import Lines
from slapo_rewrite.edit.splice import Edit
from slapo_rewrite.edit.subclasses import SubclassWriter
from slapo_rewrite.fusion.engine import Engine
from slapo_rewrite.fusion.places import removed
from slapo_rewrite.model.tree import Node
from slapo_rewrite.patterns.search import Match


@dataclass(frozen=True)
class Held:
    """The module that a subclass holds.

    Attributes:
        name: What it is called there.
        made: The expression that makes it.
        left: The submodules whose place it takes.
        before: Statements of the constructor that need those.
    """

    name: str
    made: str
    left: tuple[str, ...]
    before: tuple[str, ...] = ()


def subclass(
    engine: Engine,
    node: Node,
    held: Held,
    edits: Mapping[ast.stmt, Sequence[Edit]],
    new_name: str,
    doc: str,
) -> Edit:
    """The class of a module with another module in the place of some of its submodules.

    Args:
        engine: What the change belongs to.
        node: The module.
        held: What it holds.
        edits: What changes in its methods, by statement.
        new_name: The subclass's name.
        doc: Its docstring's line.

    Raises:
        Unsupported: The class has no constructor of its own.
    """
    file, cause = engine.file, engine.cause
    desks = Desks(engine.tree, engine.sources)
    writer = SubclassWriter(desks.main.lineages, desks.main.imports, engine.line_length)
    name = node.cls.__name__
    constructor = desks.main.lineages.method(name, "__init__")
    if constructor is None or desks.of(node.cls) is not desks.main:
        raise errors.Unsupported(
            f"`{name}` has no constructor in {file.path.name}, so it cannot hold `{held.name}`",
            at=cause.at,
        )
    lines = {s: Lines(around=list(changes)) for s, changes in edits.items()}
    made = f"self.{held.name} = {held.made}"
    deleted = f"del {', '.join(f'self.{each}' for each in held.left)}" if held.left else ""
    for text in (*held.before, made, deleted):
        if text:
            end = lines.setdefault(constructor.body[-1], Lines())
            end.after.append((text, (cause,), f"`{held.name}`"))
    text = writer.subclass(name, new_name, lines, {}, set(), doc)
    at = file.span(file.classes[name])[1]
    return Edit(at, at, "\n\n\n" + text.rstrip("\n"), (cause,), f"`{new_name}`")


def side_by_side(
    engine: Engine, group: Sequence[Match], name: str, sizes: Sequence[str] | None
) -> dict[ast.stmt, list[Edit]]:
    """One call in the place of several calls on one operand.

    `q = self.q(x).view(...)  ->  q, k, v = self.qkv(x).chunk(3, dim=-1); q = q.view(...)`

    Args:
        engine: What the change belongs to.
        group: The calls, in the order of the text.
        name: The module that gives all results, one after another along the last axis.
        sizes: The attributes that say how long each is; None where all are equally long.

    Raises:
        NoMatch: The calls do not stand side by side.
    """
    first = group[0]
    statements = [engine.sharing.statement_of(match.replaced.node) for match in group]
    function = engine.sharing.function_of(statements[0])
    for match, statement in zip(group, statements, strict=True):
        if match.root.regions != first.root.regions or hasattr(statement, "body"):
            raise errors.NoMatch(
                "these calls stand in different branches, so one call cannot give all results",
                at=first.place,
                also=[match.place, *([engine.cause.at] if engine.cause.at else [])],
            )
    names = [_bound(function, statements, number, group) for number in range(len(group))]
    operand = next(iter(first.operands.values()))
    cut = f"split([{', '.join(f'self.{s}' for s in sizes)}], dim=-1)" if sizes else ""
    cut = cut or f"chunk({len(group)}, dim=-1)"
    column = statements[0].col_offset
    call = f"{', '.join(names)} = self.{name}({operand}).{cut}"
    call = formatted(call, column, engine.line_length)
    edits: dict[ast.stmt, list[Edit]] = {}
    for number, (match, statement) in enumerate(zip(group, statements, strict=True)):
        here = edits.setdefault(statement, [])
        why = f"`{name}`"
        start, end = engine.file.span(statement)
        whole = (
            isinstance(statement, ast.Assign)
            and statement.value is match.replaced.node
            and ast.unparse(statement.targets[0]) == names[number]
        )
        if number == 0 and whole:
            here.append(Edit(start, end, call, (engine.cause,), why))
            continue
        if number == 0:
            pad = "\n" + " " * column
            here.append(Edit(start, start, call + pad, (engine.cause,), why))
        if whole:
            here.append(removed(engine.file, statement, engine.cause, why))
        else:
            span = engine.file.span(match.replaced.node)
            here.append(Edit(*span, names[number], (engine.cause,), why))
    return edits


def _bound(
    function: ast.FunctionDef, statements: Sequence[ast.stmt], number: int, group: Sequence[Match]
) -> str:
    """The local name for one of several results: that of its statement, or the submodule's."""
    statement = statements[number]
    first = (statements[0].lineno, statements[0].col_offset)
    if isinstance(statement, ast.Assign) and statements.count(statement) == 1:
        target = statement.targets[0]
        if len(statement.targets) == 1 and isinstance(target, ast.Name):
            last = (statement.end_lineno or 0, statement.end_col_offset or 0)
            others = [
                n
                for n in ast.walk(function)
                if isinstance(n, ast.Name) and n.id == target.id and n is not target
            ]
            if not any(first <= (n.lineno, n.col_offset) < last for n in others):
                return target.id
    leaf = (group[number].root.called or "").rpartition(".")[2]
    stem = leaf.removesuffix("_proj") or leaf
    taken = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    taken |= {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
    return next(n for n in (stem, leaf, f"{leaf}_output", f"{leaf}_result") if n not in taken)
