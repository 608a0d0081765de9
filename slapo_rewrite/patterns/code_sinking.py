"""Decides whether statements around a branch can move into its arms without changing results."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.blocks import every_block
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.sinking import Sunk, is_alone
from slapo_rewrite.code.text import within

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
# The greatest number of statements outside of the match that may move as well.
_OTHERS = 2


def drawn(
    file: SourceFile, function: ast.FunctionDef, branch: ast.If, wanted: Iterable[ast.stmt]
) -> Sunk | str | None:
    """The statements to move into the arms of a branch, so that the wanted ones are together.

    Words if that would change results or be hard to read; None if the branch does not separate the
    wanted statements.
    """
    block = next(b for b in every_block(function) if branch in b)
    wanted = list(wanted)
    places = [n for n, s in enumerate(block) if any(within(s, inner) for inner in wanted)]
    place = block.index(branch)
    if len(places) < 2 or not places[0] <= place <= places[-1]:
        return None
    if not all(any(within(s, inner) for s in block) for inner in wanted):
        return "there is another branch in between"
    before, after = block[min(places) : place], block[place + 1 : max(places) + 1]
    around = [*before, *after]
    if not all(isinstance(statement, _SIMPLE) for statement in around):
        return "there is a compound statement in between"
    if any(isinstance(statement, ast.Expr) for statement in before):
        return "there is a call in between whose result is not used"
    if sum(statement not in wanted for statement in around) > _OTHERS:
        return "the code in between would have to be in both branches"
    if not _is_plain(file, branch):
        return "it is an `elif`, has one, or is on one line"
    if not all(is_alone(file, statement) for statement in around):
        return "a statement around it shares its line with another"
    if (lost := _lost(file, branch.test, before)) is not None:
        return f"its condition reads `{lost}`, which has another value further up"
    return Sunk(file, branch, before, after)


def way_hint(node: ast.AST, function: ast.FunctionDef | None) -> str | None:
    """The hint for a branch whose condition reads arguments of the function."""
    if not isinstance(node, ast.If) or function is None:
        return None
    arguments = {*parameters(function)} - {"self"}
    named = [n.id for n in ast.walk(node.test) if isinstance(n, ast.Name) and n.id in arguments]
    if not named:
        return None
    return f'if it always takes one branch, name it: concrete_args={{"{named[0]}": ...}}'


def _is_plain(file: SourceFile, branch: ast.If) -> bool:
    """Whether both arms are on lines of their own, below `if` and `else`."""
    if not file.segment(branch).startswith("if") or branch.body[0].lineno == branch.lineno:
        return False
    if not branch.orelse:
        return True
    column = branch.body[0].col_offset
    end = branch.body[-1].end_lineno or branch.body[-1].lineno
    own_line = all(
        file.line(line).strip().partition("#")[0].rstrip() in ("", "else:")
        for line in range(end + 1, branch.orelse[0].lineno)
    )
    return branch.orelse[0].col_offset == column and own_line


def _lost(file: SourceFile, test: ast.expr, before: Sequence[ast.stmt]) -> str | None:
    """Something that a condition reads and that may differ above some statements."""
    bound = {n.id for s in before for n in ast.walk(s) if _is_store(n) and isinstance(n, ast.Name)}
    for node in ast.walk(test) if before else ():
        match node:
            case ast.Name(id=name) if name in bound:
                return name
            case ast.Attribute(attr=name) if _is_stored(file, name):
                return name
            case ast.Call() | ast.Subscript() | ast.NamedExpr() | ast.Await():
                return ast.unparse(node)
    return None


def _is_stored(file: SourceFile, name: str) -> bool:
    """Whether an attribute of this name is assigned outside of constructors."""
    made = {
        id(node)
        for cls in file.classes
        if (constructor := file.method(cls, "__init__")) is not None
        for node in ast.walk(constructor)
    }
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and _is_store(node)
        and id(node) not in made
        for node in ast.walk(file.tree)
    )


def _is_store(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
