"""Picks the used definitions, and those that they need, from a Python file."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slapo_rewrite.code.blocks import first_line
from slapo_rewrite.code.dataflow import names_in, uses_of
from slapo_rewrite.code.file import SourceFile, lines_of
from slapo_rewrite.code.import_lines import import_line
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.splice import Edit, apply_edits
from slapo_rewrite.code.text import bound_by
from slapo_rewrite.groups import grouped

RUNTIME = "slapo_rewrite.runtime"


@dataclass
class Picked:
    """The picked part of a file."""

    imports: list[list[str]]  # import lines, in groups
    body: str  # the definitions
    docstring: str | None  # the file's docstring
    # The names that it uses from other runtime modules.
    helpers: dict[str, set[str]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Imports and definitions, without the file's docstring."""
        head = "\n\n".join("\n".join(group) for group in self.imports)
        return (head + self.body).lstrip("\n") + "\n"


class Definitions:
    """A Python file whose top-level definitions can be picked one by one."""

    def __init__(self, text: str, tree: ast.Module | None = None) -> None:
        self.text, self.tree = text, tree or ast.parse(text)
        self.lines = lines_of(text)
        self.defined = _definitions(self.tree)
        imports = [s for s in self.tree.body if isinstance(s, ast.ImportFrom)]
        self.handed_on = {a.name for s in imports for a in s.names if a.asname == a.name}
        self._used: dict[int, set[str]] = {}

    def pick(self, names: Iterable[str], compiled: Collection[str] = ()) -> Picked:
        """The definitions of `names`, and those that they use, in the file's order.

        Names that the file re-exports (`import name as name`) are imported. The `compiled` ones get
        the decorator `@torch.compile`.
        """
        names = set(names)
        statements = {id(s) for name in self.closure(names) for s in self.defined[name]}
        ordered = [s for s in self.tree.body if id(s) in statements]
        used = names | {name for s in ordered for name in self._names_in(s)}
        groups, helpers = _imports(self.tree, used)
        if compiled:
            groups.insert(0, ["import torch"])
        body = "".join(
            self._gap(before, statement) + self._block(statement, compiled)
            for before, statement in zip([None, *ordered], ordered, strict=False)
        )
        return Picked(groups, body, ast.get_docstring(self.tree, clean=False), helpers)

    def closure(self, names: Iterable[str]) -> set[str]:
        """The names, and all names of this file that their definitions use."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found and name not in self.handed_on:
                found.add(name)
                for statement in self.defined[name]:
                    waiting += self._names_in(statement) & self.defined.keys()
        return found

    def _names_in(self, statement: ast.stmt) -> set[str]:
        if id(statement) not in self._used:
            self._used[id(statement)] = _names_in(statement)
        return self._used[id(statement)]

    def _block(self, statement: ast.stmt, compiled: Collection[str]) -> str:
        first = _first_line(self.lines, statement)
        lines = self.lines[first - 1 : statement.end_lineno]
        if isinstance(statement, ast.FunctionDef) and statement.name in compiled:
            lines.insert(statement.lineno - first, "@torch.compile")
        return "\n".join(lines)

    def _gap(self, before: ast.stmt | None, statement: ast.stmt) -> str:
        """Blank lines as black sets them: two around functions and classes, one around `try`."""
        big = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if isinstance(statement, big) or isinstance(before, big):
            return "\n\n\n"
        apart = before is None or isinstance(before, ast.Try) or isinstance(statement, ast.Try)
        return "\n\n" if apart else "\n"


# Marks a statement at the end of its first line, or a parameter, as needed for a feature.
MARK = re.compile(r"  # for (\w+)$", re.MULTILINE)


def with_features(text: str, features: Collection[str]) -> str:
    """A file's text without marks, and without code that is marked for other features.

    The `else` of a removed `if` stays; uses of a removed parameter are replaced by its default.
    """
    lines = text.split("\n")
    marks = {n: found[1] for n, line in enumerate(lines, 1) if (found := MARK.search(line))}
    idle = {n for n, feature in marks.items() if feature not in features}
    left_out, outwards, edits = set(idle), Counter[int](), list[Edit]()
    file = SourceFile(Path(), "runtime", text, ast.parse(text))
    nodes = [*ast.walk(file.tree)] if idle else []
    classes = {each: node for node in nodes if isinstance(node, ast.ClassDef) for each in node.body}
    for node in nodes:
        if isinstance(node, ast.stmt) and node.lineno in idle:
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
            if isinstance(node, ast.If) and node.orelse:
                stays = range(node.orelse[0].lineno, (node.end_lineno or 0) + 1)
                left_out.difference_update(stays)
                outwards.update(stays)
        if isinstance(node, ast.FunctionDef):
            defaults = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
            given = (*defaults, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
            for name, default in ((a.arg, d) for a, d in given if a.lineno in idle and d):
                for owner in (node, classes.get(node, node)):
                    left_out.update(_told_of(name, owner, lines))
                written = ast.unparse(default)
                edits += [Edit.instead_of(file, use, written) for use in uses_of(node, name)]
    lines = [MARK.sub("", line) for line in apply_edits(text, edits)[0].split("\n")]
    kept = (n for n in range(1, len(lines) + 1) if n not in left_out)
    return "\n".join(lines[n - 1].removeprefix("    " * outwards[n]) for n in kept)


def _told_of(name: str, owner: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> Iterator[int]:
    """The lines of a docstring that describe an argument."""
    depth = None
    doc = owner.body[0]
    for n in range(doc.lineno, (doc.end_lineno or 0)):
        text = lines[n - 1].lstrip()
        indent = len(lines[n - 1]) - len(text)
        if depth is None or indent <= depth:
            depth = indent if text.startswith(f"{name}: ") else None
        if depth is not None:
            yield n


def _definitions(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Top-level statements by the names that they bind."""
    return grouped((name, each) for each in tree.body for name in bound_names(each))


def bound_names(statement: ast.stmt) -> list[str]:
    """The names that a definition, an assignment or a guarded import binds."""
    if isinstance(statement, ast.Try):
        inner = [name for s in statement.body for name in bound_names(s)]
        imports = [s for s in statement.body if isinstance(s, (ast.Import, ast.ImportFrom))]
        aliases = [a for s in imports for a in s.names]
        return inner + [bound_by(a) for a in aliases]
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [*names_in(*targets)]


def _names_in(statement: ast.stmt) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Global):
            names.update(node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(re.findall(r"^\w+$", node.value))  # a quoted annotation
    return names


def _first_line(lines: list[str], statement: ast.stmt) -> int:
    """The first line of a definition, including decorators and the comment above."""
    line = first_line(statement)
    while line > 1 and lines[line - 2].startswith("#"):
        line -= 1
    return line


def _imports(tree: ast.Module, used: set[str]) -> tuple[list[list[str]], dict[str, set[str]]]:
    """The used import lines, in groups, and the used names of other runtime modules."""
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
        if isinstance(node, ast.Attribute) and is_name(node.value, name)
    }


def imported_outside(line: str) -> Iterator[tuple[str, ast.alias]]:
    """The imports of a line from other places than helpers: pairs of module and name.

    The module is '' for an `import` statement.
    """
    statement = ast.parse(line).body[0]
    assert isinstance(statement, ast.Import | ast.ImportFrom)
    if isinstance(statement, ast.Import):
        yield from (("", alias) for alias in statement.names)
    elif not statement.level:
        yield from ((statement.module or "", alias) for alias in statement.names)


def add_import(imports: dict[str, set[str]], module: str, alias: ast.alias) -> None:
    """Adds a result of `imported_outside` to the names by module that `import_groups` takes."""
    shown = alias.name + (f" as {alias.asname}" if alias.asname else "")
    imports.setdefault(module or shown, set()).add(shown if module else "")
