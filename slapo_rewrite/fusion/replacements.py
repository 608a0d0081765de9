"""Replaces matches by expressions, and removes statements that are no longer needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace

from slapo_rewrite.changes.replace_statement import ReplaceStatement
from slapo_rewrite.code.blocks import every_block
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.edit import Edit, Put
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.names import unique
from slapo_rewrite.code.sinking import is_alone
from slapo_rewrite.patterns.replacement import Replaced
from slapo_rewrite.patterns.value_graph import Graph


@dataclass(frozen=True)
class Writing:
    """The replacement of a match by an expression."""

    replaced: Replaced  # the text to replace
    text: str  # the expression
    what: str  # its name, in a word
    moved: bool = False  # whether the old text is moved elsewhere, with its comments


def apart(writings: Sequence[Writing], function: ast.FunctionDef) -> list[Writing]:
    """The same with renamed results where one name would be rebound before it is read."""
    found: list[Writing] = []
    taken = set(names_in(function))
    taken |= {name for writing in writings for _, name in writing.replaced.reads}
    for writing in writings:
        replaced = writing.replaced
        lines = _lines(replaced)
        for name in dict.fromkeys(name for _, name in replaced.reads):
            others = [w.replaced for w in found if any(name == n for _, n in w.replaced.reads)]
            if not any(_lines(o)[0] <= lines[1] and lines[0] <= _lines(o)[1] for o in others):
                continue
            free = unique(name, taken.__contains__, "_")
            taken.add(free)
            replaced = replace(
                replaced,
                target=re.sub(rf"\b{name}\b", free, replaced.target),
                reads=tuple((n, free if name == read else read) for n, read in replaced.reads),
            )
        found.append(replace(writing, replaced=replaced))
    return found


def _lines(replaced: Replaced) -> tuple[int, int]:
    """The first line that binds results, and the last line that reads them."""
    nodes = [replaced.node, *(node for node, _ in replaced.reads)]
    numbers = [node.lineno for node in nodes if isinstance(node, (ast.expr, ast.stmt))]
    return min(numbers), max(numbers)


def replacements(file: SourceFile, writings: Sequence[Writing]) -> dict[ast.stmt, ReplaceStatement]:
    """The changes that replace matches by expressions, by statement."""
    edits: dict[ast.stmt, list[Edit]] = {}
    above: dict[ast.stmt, list[str]] = {}
    here: dict[ast.stmt, list[Writing]] = {}
    gone: dict[ast.stmt, Writing] = {}
    for writing in writings:
        replaced = writing.replaced
        assert isinstance(replaced.node, ast.expr | ast.stmt)
        statement = file.statement_of(replaced.node)
        here.setdefault(statement, []).append(writing)
        if replaced.above:
            above.setdefault(statement, []).append(replaced.target + writing.text)
        else:
            text = writing.text
            if isinstance(replaced.node, ast.stmt):
                text = replaced.target + text
            edits.setdefault(statement, []).append(Edit(replaced.node, Put(text)))
        for node, name in replaced.reads:
            assert isinstance(node, ast.expr)
            reader = file.statement_of(node)
            here.setdefault(reader, []).append(writing)
            edits.setdefault(reader, []).append(Edit(node, Put(name)))
        gone |= dict.fromkeys(replaced.removed, writing)
    changes = {
        statement: ReplaceStatement(
            statement,
            ", ".join(dict.fromkeys(w.what for w in wanted)),
            tuple(edits.get(statement, ())),
            tuple(above.get(statement, ())),
            moved=all(w.moved for w in wanted),
        )
        for statement, wanted in here.items()
    }
    for statement, writing in gone.items():
        changes[statement] = ReplaceStatement(
            statement, writing.what, gone=True, moved=writing.moved
        )
    return changes


def idle_statements(
    graph: Graph, replaced: Collection[ast.AST], removed: Collection[ast.stmt], read: Set[str]
) -> list[ast.stmt]:
    """Dead statements of a function: without side effects, and with results that nothing reads.

    The `replaced` nodes get other text, which reads the names `read`; the `removed` statements are
    deleted already.
    """
    if graph.function is None:  # the modules of an `nn.Sequential`
        return []
    blocks = [graph.function.body, *every_block(graph.function)]
    nodes = list(ast.walk(graph.function))
    gone = {id(inner) for node in (*replaced, *removed) for inner in ast.walk(node)}
    found: list[ast.stmt] = []
    while True:
        idle = next(
            (
                statement
                for block in blocks
                for statement in block
                if id(statement) not in gone
                and (name := _named(statement)) is not None
                and name not in read
                and _is_idle(name, nodes, gone)
                and _is_pure(statement, graph)
                and is_alone(graph.file, statement)
                and any(id(other) not in gone for other in block if other is not statement)
            ),
            None,
        )
        if idle is None:
            return found
        found.append(idle)
        gone |= {id(inner) for inner in ast.walk(idle)}


def _named(statement: ast.stmt) -> str | None:
    """The one name that a statement binds, if it does nothing else."""
    match statement:
        case (
            ast.Assign(targets=[ast.Name(name)])
            | ast.AnnAssign(target=ast.Name(name), value=ast.expr())
        ):
            return name
        case ast.Import(names=[alias]) | ast.ImportFrom(names=[alias]):
            return alias.asname or alias.name
    return None


def _is_idle(name: str, nodes: Collection[ast.AST], gone: Set[int]) -> bool:
    """Whether a name was read, and only by text that is removed."""
    named = [n for n in nodes if isinstance(n, ast.Name) and n.id == name]
    updated = {id(n.target) for n in nodes if isinstance(n, ast.AugAssign)}
    reads = [n for n in named if not isinstance(n.ctx, ast.Store) or id(n) in updated]
    return bool(reads) and all(id(n) in gone for n in reads)


def _is_pure(statement: ast.stmt, graph: Graph) -> bool:
    """Whether a statement has no effect but to bind a name."""
    made = [value for value in graph.values if value.statement is statement]
    return all(v.pure and not v.random and v.overwrites is None for v in made) and not any(
        isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
        for node in ast.walk(statement)
    )
