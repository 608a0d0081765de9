"""Writes expressions in the places of matches: statements that are no more needed go."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from slapo_rewrite.changes.replace_statement import ReplaceStatement
from slapo_rewrite.code.edit import Edit, Put
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.patterns.replacement import Replaced


@dataclass(frozen=True)
class Writing:
    """An expression in the place of a match.

    Attributes:
        replaced: What it takes the place of.
        text: The expression.
        what: What it is, in a word.
        moved: Whether what was there goes elsewhere, with its comments.
    """

    replaced: Replaced
    text: str
    what: str
    moved: bool = False


def replacements(file: SourceFile, writings: Sequence[Writing]) -> dict[ast.stmt, ReplaceStatement]:
    """What puts expressions in the places of matches, by statement.

    Args:
        file: The file of the matches.
        writings: The expressions; no two take the place of the same text.
    """
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
