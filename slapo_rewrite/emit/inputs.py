"""The inputs of an output beside source and schedule: the modules that these import.

Installed packages are identified by their versions; all other files are the user's own and may
change at any time. Nothing is imported to find a module, so that a manipulated record cannot run
code.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.locate import file_below, file_in_package
from slapo_rewrite.code.own_files import is_own
from slapo_rewrite.schedule.load import MODULE as SCHEDULE

# Modules of Python whose results do not depend on time or environment.
_STEADY = frozenset({
    "__future__", "abc", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "decimal", "enum", "fractions", "functools", "heapq", "itertools", "keyword", "math", "numbers",
    "operator", "re", "statistics", "string", "textwrap", "types", "typing", "weakref",
})  # fmt: skip
# Names, or words in names, of functions that read other data or print: `from_pretrained`.
_ELSEWHERE = frozenset({
    "__file__", "__import__", "breakpoint", "device_count", "eval", "exec", "globals", "available",
    "env", "environ", "getenv", "load", "loads", "open", "pretrained", "print", "read",
})  # fmt: skip


def may_change(path: Path, known: Collection[str]) -> bool:
    """Whether a file of the user's may behave differently later although its text is the same.

    It may read files, the clock or the environment, or print. Deny by default: True unless its text
    rules that out. `known` are the modules and packages whose hashes or versions are recorded.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, SyntaxError, ValueError):
        return True
    packages = {*_STEADY, *(name.partition(".")[0] for name in known)}
    for node in ast.walk(tree):
        names, modules = [], []
        match node:
            case ast.Name(name) | ast.Attribute(attr=name):
                names = [name]
            case ast.Import(aliases):
                modules = [alias.name for alias in aliases]
            case ast.ImportFrom(module, aliases, level):
                names = [alias.name for alias in aliases]
                modules = [module] if module and not level else []
        if any(name in _ELSEWHERE or _ELSEWHERE & {*name.split("_")} for name in names):
            return True
        if any(module.partition(".")[0] not in packages for module in modules):
            return True
    return False


def own_modules(
    source: SourceFile, schedule: ast.Module, loaded: Collection[str]
) -> dict[str, Path]:
    """The user's own modules that source and schedule import, directly or indirectly.

    Maps their dotted names to their files.
    """
    found: dict[str, Path] = {}
    waiting = [*loaded, *_prefixes(source.name), *imported(schedule, None)]
    if is_own(str(source.path)):
        waiting += imported(source.tree, source)
    while waiting:
        name = waiting.pop()
        path = getattr(sys.modules.get(name), "__file__", None)
        if name in found or name in (SCHEDULE, source.name, "__main__"):
            continue
        if isinstance(path, str) and is_own(path) and os.path.isfile(path):
            found[name] = Path(path)
            waiting += _prefixes(name)
            try:
                file = SourceFile.read(Path(path), name)
            except errors.SourceError:
                continue
            waiting += imported(file.tree, file)
    return dict(sorted(found.items()))


def imported(tree: ast.Module, file: SourceFile | None) -> Iterator[str]:
    """Dotted names in a file's imports that may be modules; with `file` relative imports too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _prefixes(alias.name)
        elif isinstance(node, ast.ImportFrom) and (file is not None or not node.level):
            base = file.resolve_import(node) if file is not None else node.module or ""
            yield from _prefixes(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _prefixes(name: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`, `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def find(name: str, source: Path, schedule: Path) -> Path | None:
    """The file of a module by its name, as source and schedule would import it."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    root = source.absolute().parent
    while (root / "__init__.py").is_file():
        root = root.parent
    for base in (schedule.absolute().parent, *map(Path, sys.path), root):
        if (file := file_below(base, parts)) is not None:
            return file
    return file_in_package(name)  # an editable install
