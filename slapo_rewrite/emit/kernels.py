"""`kernels.py` of an output: the kernels in use, each with its PyTorch reference, in one file."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from slapo_rewrite.emit.used_definitions import LINE_LENGTH, Definitions, Picked, import_groups

FOLDER = Path(__file__).resolve().parents[1] / "runtime" / "kernels"


@functools.cache
def libraries() -> dict[str, Definitions]:
    """The files of kernels by name, each after those that it needs."""
    found = {
        p.stem: Definitions(p.read_text(encoding="utf-8")) for p in sorted(FOLDER.glob("*.py"))
    }
    ordered: dict[str, Definitions] = {}

    def place(name: str) -> None:
        if name not in ordered:
            for needed in _needed(found[name].tree):
                place(needed)
            ordered[name] = found[name]

    found.pop("__init__", None)
    for name in found:
        place(name)
    return ordered


def _needed(tree: ast.Module) -> list[str]:
    """The kernel files that a file imports from."""
    return [n.module for n in tree.body if isinstance(n, ast.ImportFrom) and n.level and n.module]


def picked(names: Iterable[str]) -> Picked:
    """The public functions of these names and all that they need, as one file.

    Raises:
        KeyError: There is none of one of the names.
    """
    files, wanted = libraries(), dict[str, set[str]]()
    for name in names:
        home = next((m for m, library in files.items() if name in library.defined), None)
        if home is None:
            raise KeyError(name)
        wanted.setdefault(home, set()).add(name)
    bodies: list[str] = []
    imports: dict[str, set[str]] = {}
    legend: dict[str, str] = {}
    for module in reversed(files):
        if module not in wanted:
            continue
        part = files[module].pick(wanted[module])
        for other, used in part.helpers.items():
            wanted.setdefault(other, set()).update(used)
        for line in (line for group in part.imports for line in group):
            _add(line, imports)
        heading = (part.docstring or "").partition("\n")[0]
        bodies.insert(0, f"# {heading}\n\n\n" + part.body.strip("\n"))
        legend = {**legend_of(part.docstring or ""), **legend}
    docstring = "Kernels that the model uses, each with its reference in PyTorch.\n"
    if legend:
        shapes = ", ".join(f"{letter} {meaning}" for letter, meaning in legend.items())
        docstring += "\n" + textwrap.fill(f"Shapes: {shapes}.", LINE_LENGTH) + "\n"
    groups = [group.splitlines() for group in import_groups(imports)]
    return Picked(groups, "\n\n" + "\n\n\n".join(bodies), docstring)


def _add(line: str, imports: dict[str, set[str]]) -> None:
    """Adds what an import line imports: names by module, '' for the module itself."""
    statement = ast.parse(line).body[0]
    if isinstance(statement, ast.ImportFrom):
        if not statement.level:
            imports.setdefault(statement.module or "", set()).update(
                a.name for a in statement.names
            )
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            shown = alias.name + (f" as {alias.asname}" if alias.asname else "")
            imports.setdefault(shown, set()).add("")


def legend_of(docstring: str) -> dict[str, str]:
    """What the letters of a file's shapes mean; one letter means the same in every file."""
    found = re.search(r"^Shapes: (.*?)\.$", docstring, re.S | re.M)
    parts = [" ".join(part.split()) for part in found[1].split(",")] if found else []
    return {letter: meaning for letter, _, meaning in (part.partition(" ") for part in parts)}
