"""Where the names that a file imports are defined."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator

from slapo_rewrite.changes.output_files import is_torch
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model.sources import Sources

# A definition: the module that contains it, and its name there; '' for the module itself.
Target = tuple[str, str]


def imported_names(sources: Sources, file: SourceFile) -> Iterator[tuple[str, Target]]:
    """The names that a file imports from Python files outside of torch, with their targets."""
    for local, dotted in _bound_by_imports(file):
        target = _target(sources, dotted)
        if target is not None:
            yield local, target


def _target(sources: Sources, dotted: str) -> Target | None:
    """The definition of an imported name; None for torch's, and for a package.

    Attributes of a package are handled where they are used.
    """
    module, _, name = dotted.rpartition(".")
    if is_torch(dotted) or hasattr(sys.modules.get(dotted), "__path__"):
        return None
    known = dotted in sys.modules or not module
    target = (dotted, "") if known else chased(sources, module, name)
    return None if is_torch(target[0]) else target


def _bound_by_imports(file: SourceFile) -> list[tuple[str, str]]:
    """The names that the imports of a file bind, each with the imported dotted name."""
    modules = [a.name for n in file.statements if isinstance(n, ast.Import) for a in n.names]
    dotted = [(name.partition(".")[0], name) for name in modules if "." in name]
    return [*file.imports.items(), *dotted]


def chased(sources: Sources, module: str, name: str) -> Target:
    """Follows re-exports to the definition of a name that is imported from a module."""
    for _ in range(20):  # ends for circular imports as well
        live = vars(sys.modules[module]).get(name) if module in sys.modules else None
        if isinstance(live, type | types.FunctionType):
            home, own = str(live.__module__), live.__name__
            if vars(sys.modules.get(home, object)).get(own) is live:
                return home, own
        if f"{module}.{name}" in sys.modules:
            return f"{module}.{name}", ""
        file = sources.file_named(module)
        if file is None or name not in file.imports:
            return module, name
        module, _, name = file.imports[name].rpartition(".")
        if not module:
            return name, ""
    return module, name
