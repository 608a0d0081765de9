"""Takes the definitions that are used, and what they need, out of a Python file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

LINE_LENGTH = 88  # black's default, which emitted files keep

RUNTIME = "slapo_rewrite.runtime"


@dataclass
class Picked:
    """Part of a file.

    Attributes:
        text: Imports and definitions, without the file's docstring.
        docstring: The file's docstring.
        helpers: Names used of other runtime modules.
    """

    text: str
    docstring: str | None
    helpers: dict[str, set[str]] = field(default_factory=dict)


def pick(text: str, names: Iterable[str], taken: ast.Module | None = None) -> Picked:
    """The definitions of `names`, and of what they refer to, in the file's order.

    Args:
        text: The file.
        names: Top-level names that are wanted.
        taken: The file as parsed, if that was done already.

    Raises:
        KeyError: The file does not define one of the names.
    """
    tree = taken or ast.parse(text)
    defined = _definitions(tree)
    wanted: set[str] = set()
    waiting = sorted(names)
    for name in waiting:
        if name not in defined:
            raise KeyError(name)
    while waiting:
        name = waiting.pop()
        if name in wanted:
            continue
        wanted.add(name)
        used = _names_in(*defined[name])
        waiting += sorted(used & defined.keys() - wanted)
    statements = {id(s): s for name in wanted for s in defined[name]}
    ordered = [s for s in tree.body if id(s) in statements]
    used = _names_in(*ordered)
    groups, helpers = _imports(tree, text, used)
    lines = text.splitlines()
    blocks = ["\n".join(lines[_first_line(lines, s) - 1 : s.end_lineno]) for s in ordered]
    pieces = ["\n".join(group) for group in groups]
    head = "\n\n".join(pieces)
    body = ""
    previous: ast.stmt | None = None
    for statement, block in zip(ordered, blocks, strict=True):
        big = isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        after_big = previous is None or isinstance(previous, (ast.FunctionDef, ast.ClassDef))
        if previous is None:
            gap = "\n\n\n" if big else "\n\n"
        else:
            gap = "\n\n\n" if big or after_big else "\n"
        body += gap + block
        previous = statement
    combined = (head + body) if head else body.lstrip("\n")
    return Picked(combined + "\n", ast.get_docstring(tree, clean=False), helpers)


def _definitions(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Top-level statements by the names that they bind."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name):
                        found.setdefault(node.id, []).append(statement)
    return found


def _names_in(*statements: ast.stmt) -> set[str]:
    names: set[str] = set()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Global):
                names.update(node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"^\w+$", node.value))  # a quoted annotation
    return names


def _first_line(lines: list[str], statement: ast.stmt) -> int:
    """Where a definition begins, its decorators and the comment above it included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    line = min([statement.lineno, *(d.lineno for d in decorators)])
    while line > 1 and lines[line - 2].startswith("#"):
        line -= 1
    return line


def _imports(
    tree: ast.Module, text: str, used: set[str]
) -> tuple[list[list[str]], dict[str, set[str]]]:
    """The import lines in use, in their groups, and the names of other runtime modules."""
    groups: list[list[str]] = []
    helpers: dict[str, set[str]] = {}
    local: list[str] = []
    previous_end = None
    for statement in tree.body:
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            continue
        if previous_end is None or statement.lineno > previous_end + 1:
            groups.append([])
        previous_end = statement.end_lineno
        aliases = [a for a in statement.names if (a.asname or a.name).split(".")[0] in used]
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            aliases = list(statement.names)
        if not aliases:
            continue
        shown = [a.name + (f" as {a.asname}" if a.asname else "") for a in aliases]
        if isinstance(statement, ast.Import):
            groups[-1] += [f"import {name}" for name in shown]
            continue
        module = statement.module or ""
        if statement.level == 1 or module.startswith(RUNTIME):
            name = module.removeprefix(RUNTIME).lstrip(".")
            if name:
                helpers.setdefault(name, set()).update(a.name for a in aliases)
                local.append(import_line(f".{name}", shown))
            else:  # from slapo_rewrite.runtime import tensor_parallel
                for alias in aliases:
                    helpers.setdefault(alias.name, set()).update(
                        _attributes(tree, alias.asname or alias.name)
                    )
                local.append(import_line(".", shown))
            continue
        groups[-1].append(import_line("." * statement.level + module, shown))
    if local:
        groups.append(local)
    return [g for g in groups if g], helpers


def _attributes(tree: ast.Module, name: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    }


def import_line(module: str, names: list[str]) -> str:
    """`from module import names`, as black lays it out."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {n},\n" for n in names) + ")"
