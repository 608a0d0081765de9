"""Edits of import statements: other modules, replacement, removal, insertion."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping, Sequence, Set

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.layout import formatted
from slapo_rewrite.code.runs import past_comment
from slapo_rewrite.code.splice import Edit

LINE_LENGTH = 88  # black's default, which emitted files keep


def from_module(file: SourceFile, node: ast.ImportFrom, module: str) -> Edit:
    """`from ..a import b  ->  from package.a import b`; names and layout stay."""
    start, _ = file.span(node)
    words = [*("." * node.level), *([node.module] if node.module else [])]
    space = r"[\s\\]*"  # also matches a continued line
    found = re.compile(f"from{space}({space.join(map(re.escape, words))})").match(file.text, start)
    assert found is not None
    return Edit(*found.span(1), module)


def instead(file: SourceFile, node: ast.stmt, lines: Sequence[str]) -> Edit:
    """Replaces a statement by others."""
    pad = "\n" + " " * node.col_offset
    laid_out = pad.join(formatted(line, node.col_offset, file.line_length) for line in lines)
    return Edit(*file.span(node), laid_out)


def without(file: SourceFile, node: ast.stmt) -> Edit:
    """Removes a statement with its line."""
    start, end = file.span(node)
    return Edit(start - 1, end, "") if start else Edit(0, end + 1, "")


def is_remarked(file: SourceFile, node: ast.stmt) -> bool:
    """Whether a statement shares its lines with a comment or another statement."""
    start, end = file.span(node)
    around = file.text[:start].rpartition("\n")[2] + file.text[end:].partition("\n")[0]
    return bool(around.strip()) or "#" in file.segment(node)


def below(file: SourceFile, statement: ast.stmt | None, text: str) -> Edit:
    """Inserts text below an import; without one, below the file's docstring or at its beginning.

    The text starts with the line breaks that separate it from the import.
    """
    if statement is not None:
        place = past_comment(file, file.span(statement)[1])
        return Edit(place, place, text)
    first = file.tree.body[0] if file.tree.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        end = file.span(first)[1]
        return Edit(end, end, "\n\n" + text.lstrip("\n"))
    return Edit(0, 0, text.lstrip("\n") + "\n\n")


def import_line(module: str, names: Sequence[str]) -> str:
    """`from module import names`, formatted as `black` does."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {n},\n" for n in names) + ")"


def import_groups(imports: Mapping[str, Set[str]]) -> list[str]:
    """Import lines in groups: the standard library, other packages, relative imports.

    `imports` has the names by module; the name '' imports the module itself.
    """
    groups: tuple[list[str], ...] = [], [], []
    for module in sorted(imports, key=lambda m: ("" not in imports[m], m)):
        is_standard = module.split(".")[0] in sys.stdlib_module_names
        group = groups[2 if module.startswith(".") else not is_standard]
        if "" in imports[module]:
            group.append(f"import {module}")
        if names := sorted(imports[module] - {""}):
            group.append(import_line(module, names))
    return ["\n".join(group) for group in groups if group]
