"""Writes expressions in the places of matches: statements that are no more needed go."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slapo_rewrite.changes.replace_statement import ReplaceStatement
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.edit import Edit, Put
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.names import unique
from slapo_rewrite.patterns.replacement import Replaced


@dataclass(frozen=True)
class Writing:
    """An expression in the place of a match."""

    replaced: Replaced  # what it takes the place of
    text: str  # the expression
    what: str  # what it is, in a word
    moved: bool = False  # whether what was there goes elsewhere, with its comments


def apart(writings: Sequence[Writing], function: ast.FunctionDef) -> list[Writing]:
    """The same, where no name that one gives a result is given anew before that has been read."""
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
    """From where results are given names to where these are read last."""
    nodes = [replaced.node, *(node for node, _ in replaced.reads)]
    numbers = [node.lineno for node in nodes if isinstance(node, (ast.expr, ast.stmt))]
    return min(numbers), max(numbers)


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
