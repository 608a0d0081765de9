"""Local names that only a replaced text reads: the statements that give them go with it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Set

from slapo_rewrite.code.blocks import every_block
from slapo_rewrite.code.sinking import is_alone
from slapo_rewrite.patterns.value_graph import Graph


def idle_statements(
    graph: Graph, replaced: Collection[ast.AST], removed: Collection[ast.stmt], read: Set[str]
) -> list[ast.stmt]:
    """Statements of a function that compute, without an effect, what nothing reads any more.

    Args:
        graph: The function.
        replaced: What other text takes the place of.
        removed: The statements that go already.
        read: The names that the new text reads.
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
    """The one name that a statement binds, where it does nothing else."""
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
    """Whether a name was read, and is read by nothing but what goes."""
    named = [n for n in nodes if isinstance(n, ast.Name) and n.id == name]
    updated = {id(n.target) for n in nodes if isinstance(n, ast.AugAssign)}
    reads = [n for n in named if not isinstance(n.ctx, ast.Store) or id(n) in updated]
    return bool(reads) and all(id(n) in gone for n in reads)


def _is_pure(statement: ast.stmt, graph: Graph) -> bool:
    """Whether nothing but the name that it gives comes of a statement."""
    made = [value for value in graph.values if value.statement is statement]
    return all(v.pure and not v.random and v.overwrites is None for v in made) and not any(
        isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
        for node in ast.walk(statement)
    )
