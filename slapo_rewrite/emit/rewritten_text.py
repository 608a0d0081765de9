"""The text of a rewritten file, with its edits and without imports that become unused."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from slapo_rewrite.code import import_lines
from slapo_rewrite.code.file import SourceFile, lines_of
from slapo_rewrite.code.lines import Lines, removals
from slapo_rewrite.code.splice import Change, Edit, apply_edits
from slapo_rewrite.directive import merged_causes

UNUSED = "import only the names that are used"


def rewritten(
    file: SourceFile,
    edits: Sequence[Edit],
    own: Sequence[Edit],
    earlier: Sequence[Change] = (),
    original: SourceFile | None = None,
) -> tuple[str, list[Change]]:
    """The text of a file with its edits, and without imports that become unused.

    `file` is the file before these edits. `own` are the edits of its classes and functions,
    `earlier` the lines that previous edits wrote, and `original` the file before all edits, if that
    is a different one.
    """
    text, _ = apply_edits(file.text, edits)
    idle = idle_imports(file, text, [*own, *earlier], original, {e.start for e in edits})
    edits, idle = _instead_of_a_first_line(edits, idle)
    # Edits inside a removed import are part of its removal.
    kept = [e for e in edits if not any(i.start < e.start and e.end < i.end for i in idle)]
    # A redirected import leaves unused names out itself.
    idle = [i for i in idle if not any(e.start <= i.start < e.end for e in kept)]
    return apply_edits(file.text, [*kept, *idle], earlier)


def _instead_of_a_first_line(
    edits: Sequence[Edit], idle: list[Edit]
) -> tuple[Sequence[Edit], list[Edit]]:
    """Moves text added below the file's first line to that line, if the line is removed."""
    first = next((i for i in idle if not i.start), None)
    below = first and next((e for e in edits if e.start == e.end == first.end - 1), None)
    if below is None:
        return edits, idle
    instead = replace(below, start=0, text=below.text.lstrip("\n"))
    return [instead if e is below else e for e in edits], [i for i in idle if i is not first]


def idle_names(file: SourceFile, text: str) -> Set[str]:
    """The imported names that a file uses, but its rewritten text does not."""
    return (file.imports.keys() & used_in(file.tree)) - used_in(file.parsed(text))


def idle_imports(
    file: SourceFile,
    text: str,
    edits: Sequence[Edit | Change],
    original: SourceFile | None = None,
    places: Set[int] = frozenset(),
) -> list[Edit]:
    """Removes imported names that the original uses but the rewritten text does not.

    Other edits are at `places`, such as new imports after an import that may be removed. `original`
    is the file before all edits, if that is a different one.
    """
    idle = idle_names(original or file, text) & file.imports.keys()
    causes = merged_causes(*(e.causes for e in edits))
    removed: list[Edit] = []
    gone: dict[ast.stmt, Lines] = {}
    for node in file.tree.body if idle else ():
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        kept = [a for a in node.names if (a.asname or a.name) not in idle]
        if len(kept) == len(node.names) or import_lines.is_remarked(file, node):
            continue  # a comment there may be about the import: both stay
        if not kept and file.span(node)[1] not in places:
            gone[node] = Lines(gone=(causes, UNUSED))
            continue
        placed = import_lines.without(file, node)
        if kept:
            names = ast.unparse(ast.Import(kept)).removeprefix("import ")
            lead = "import"
            if isinstance(node, ast.ImportFrom):
                lead = f"from {file.resolve_import(node)} import"
            placed = import_lines.instead(file, node, [f"{lead} {names}"])
        removed.append(placed.caused_by(causes, UNUSED))
    return [*removed, *removals(file, gone)]


def used_in(tree: ast.Module) -> set[str]:
    """The names that a file uses, including names in strings (`__all__`, quoted annotations)."""
    used: set[str] = set()
    waiting: list[Any] = [tree]
    while waiting:  # twice as fast as `ast.walk`, and whole files are walked
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.update(re.findall(r"\w+", node.value))
        elif isinstance(node, ast.AST):
            waiting += [getattr(node, name, None) for name in node._fields]
    return used


def check_text(text: str, file: SourceFile) -> None:
    """Checks that the text parses, and defines all classes and functions of the original."""

    def defined(tree: ast.Module) -> set[str]:
        return {n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}

    lost = defined(file.tree) - defined(file.parsed(text))
    if lost:
        raise AssertionError(f"the rewritten file no longer defines {sorted(lost)}")


def carried(changes: Sequence[Change], before: str, after: str) -> list[Change]:
    """Maps changed lines to a text that contains some of the definitions in a new layout."""
    matcher = difflib.SequenceMatcher(None, lines_of(before), lines_of(after), False)
    found = []
    for change in changes:
        lines = [
            (first + max(change.first - 1 - a, 0), last - max(b - change.last, 0))
            if tag == "equal"
            else (first, last)
            for tag, a, b, first, last in matcher.get_opcodes()
            if a < change.last and b > change.first - 1
        ]
        if lines:
            found.append(replace(change, first=lines[0][0] + 1, last=max(lines[-1][1], 1)))
    return found
