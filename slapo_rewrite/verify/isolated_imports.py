"""Imports schedule, original and output, and keeps them from importing the tool."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
import types
from collections.abc import Mapping
from pathlib import Path


class ToolBlocker:
    """Refuses imports of the tool, and records which files of the output tried."""

    def __init__(self, tool: str, out: Path) -> None:
        self.tool, self.out = tool, out
        self.tried: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """The import hook: raises for the tool, and leaves other modules to other finders."""
        if name.split(".")[0] != self.tool:
            return
        for frame in reversed(traceback.extract_stack()[:-1]):
            file = Path(frame.filename)
            if "importlib" not in frame.filename:
                if self.out in file.parents:
                    self.tried.append(f"{file.name}:{frame.lineno} imports {name}")
                break
        raise ImportError(f"an output must not need the tool, yet `{name}` is imported")

    def install(self) -> None:
        """Blocks imports of the tool from now on, also of modules that are loaded already."""
        for name in [n for n in sys.modules if n.split(".")[0] == self.tool]:
            del sys.modules[name]
        sys.meta_path.insert(0, self)


def load_file(path: Path, name: str, search: list[str] | None = None) -> types.ModuleType:
    """Imports the file at `path` as module `name`; as a package if `search` is given."""
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_beside(path: Path) -> types.ModuleType:
    """Imports the file at `path` in a package with the files beside it."""
    return importlib.import_module(f"{_package('slapo_twin', path.parent)}.{path.stem}")


def load_schedule(path: Path) -> types.ModuleType:
    """Imports a schedule file, which may import files beside it."""
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return load_file(path, "slapo_schedule")
    finally:
        sys.path.pop(0)


def free_name(wanted: str, otherwise: str) -> str:
    """`wanted` if it can be a module's name and no module has it; else `otherwise`."""
    if not wanted.isidentifier() or wanted in sys.modules or wanted in sys.stdlib_module_names:
        return otherwise
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(wanted) is None:
            return wanted
    return otherwise


def import_original(source: Mapping[str, str]) -> types.ModuleType:
    """Imports the original: a module by name, or a file, in its package if it has one."""
    if "module" in source:
        return importlib.import_module(source["module"])
    path = Path(source["file"])
    names, folder = [path.stem] if path.name != "__init__.py" else [], path.parent
    while (folder / "__init__.py").exists() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    # As if it ran in its own folder; appended last, so that it hides no other module.
    sys.path.append(str(folder))
    if len(names) == 1:
        return load_file(path, f"original_{path.stem}")
    return importlib.import_module(".".join(names))


def _package(wanted: str, folder: Path) -> str:
    """Creates a package of a folder's files, with the wanted name if it is free."""
    module = types.ModuleType(free_name(wanted, "rewritten_output"))
    module.__path__ = [str(folder)]
    sys.modules[module.__name__] = module
    return module.__name__


def import_output(
    out: Path, stem: str, support: str | None = None
) -> tuple[types.ModuleType, types.ModuleType | None]:
    """Imports the rewritten model's module, and the one that gathers full weights, if any.

    `support` is the name of the folder beside the output with its helpers.
    """
    if support is not None:
        package = _package(out.parent.name, out.parent)
        rewritten = importlib.import_module(f"{package}.{out.name}.{stem}")
        if (out.parent / support / "loading.py").exists():
            return rewritten, importlib.import_module(f"{package}.{support}.loading")
        return rewritten, None
    if (out / "__init__.py").exists():
        package = free_name(out.name, "rewritten_output")
        load_file(out / "__init__.py", package, [str(out)])
    else:
        package = _package(out.name, out)
    rewritten = importlib.import_module(f"{package}.{stem}")
    if (out / "loading.py").exists():
        return rewritten, importlib.import_module(f"{package}.loading")
    return rewritten, rewritten if hasattr(rewritten, "full_state_dict") else None
