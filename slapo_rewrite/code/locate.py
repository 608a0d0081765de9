"""Finds the file and the module name of a SOURCE argument: a path or a dotted name."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import keyword
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from slapo_rewrite import errors

# Module names that the tool itself uses.
_TAKEN = {"__main__", "slapo_rewrite", "slapo_rewrite_output", "rules", "schedule_file"}


def module_name(path: Path) -> str:
    """The module name of a file: within its package, or its own name.

    If a file outside of packages has the name of another importable module, or no valid name, it
    gets another one: it must not shadow that module.
    """
    name = package_of(path) or path.stem
    return name if "." in name and package_of(path) else free_name(name)


def free_name(stem: str) -> str:
    """An identifier that is no module name of Python, an installed package or the tool."""
    name = re.sub(r"\W", "_", stem)
    name = name if name.isidentifier() else f"_{name}"
    installed = [p for p in sys.path if {"site-packages", "dist-packages"} & set(Path(p).parts)]
    while (
        keyword.iskeyword(name)
        or name in _TAKEN
        or name in sys.stdlib_module_names
        or importlib.machinery.PathFinder.find_spec(name, installed) is not None
    ):
        name += "_"
    return name


def package_of(path: Path) -> str:
    """The dotted module name of a file in a package; '' for a file outside of packages."""
    path = path.absolute()
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    if not (folder / "__init__.py").is_file():
        return ""
    while (folder / "__init__.py").is_file():
        parts.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(parts))


def locate(source: str) -> tuple[Path, str]:
    """The file and the dotted module name of a SOURCE argument.

    Nothing is imported if the dotted name can be found in folders.
    """
    path = Path(source)
    if path.is_file() and path.suffix != ".py":
        raise errors.SourceError(
            f"`{source}` is not a Python file: its name does not end in .py",
            hint="convert a notebook with `jupyter nbconvert --to script`"
            if path.suffix == ".ipynb"
            else None,
        )
    if path.is_dir() and (os.sep in source or source.endswith(".py")):
        raise errors.SourceError(
            f"`{source}` is a folder", hint="name the file in it that defines the model"
        )
    if source.endswith(".py"):
        if not path.is_file():
            raise errors.SourceError(f"there is no file `{source}`", hint=near_files(path))
        return path, module_name(path)
    if not all(part.isidentifier() for part in source.split(".")):
        raise errors.SourceError(
            f"`{source}` is neither a Python file nor the dotted name of a module",
            hint=near_files(path),
        )
    found = _find_module(source)
    if found is None:
        here = file_below(Path(), source.split("."))  # the current folder is not on the path
        near = f"give its file: {here}" if here else _near_modules(source) or near_files(path)
        raise errors.SourceError(f"there is no module `{source}`", hint=near)
    return found, source


def _find_module(name: str) -> Path | None:
    """The file of a module, without importing the packages above it where possible."""
    loaded = sys.modules.get(name)
    if loaded is not None and (getattr(loaded, "__file__", None) or "").endswith(".py"):
        return Path(str(loaded.__file__))
    if (found := file_in_package(name)) is not None:
        return found
    try:  # a package that extends its own search path
        spec = importlib.util.find_spec(name)
    except Exception:  # raised by the package, which `find_spec` imports
        return None
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def file_in_package(name: str) -> Path | None:
    """The file of a module in the folders of its package, without importing the package."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    found = (file_below(Path(folder), rest) for folder in folders)
    return next((file for file in found if file is not None), None)


def file_below(folder: Path, names: Sequence[str]) -> Path | None:
    """The file of a module or package, by its dotted name's parts from a folder."""
    path = folder.joinpath(*names)
    files = (path / "__init__.py", *([path.with_name(f"{path.name}.py")] if names else []))
    return next((file for file in files if file.is_file()), None)


def near_files(path: Path) -> str | None:
    """A hint with Python files of similar names beside a missing one."""
    folder = path.parent if path.parent.is_dir() else Path()
    names = {p.stem: str(p) for p in folder.glob("*.py")}
    near = errors.nearest(path.name.removesuffix(".py"), names, 0.6)
    return errors.offered(names[n] for n in near)


def _near_modules(name: str) -> str | None:
    """A hint with the modules beside the first segment that does not exist."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        parent = _find_module(".".join(parts[:count]))
        if parent is None:
            continue
        if parent.name != "__init__.py":
            return f"`{'.'.join(parts[:count])}` is a module, not a package: {parent}"
        names = {p.stem for p in parent.parent.glob("*.py")}
        names |= {p.parent.name for p in parent.parent.glob("*/__init__.py")}
        head, asked = ".".join(parts[:count]), parts[count]
        near = [f"{head}.{n}" for n in errors.nearest(asked, names - {"__init__"})]
        whole = [".".join([n, *parts[count + 1 :]]) for n in near]
        there = [name for name in whole if _find_module(name)] or near
        return errors.offered(there)
    return None


def package_for(path: Path, name: str) -> str:
    """The package that relative imports of a module refer to."""
    if path.name == "__init__.py":
        return name
    package = name.rpartition(".")[0]
    return package or package_of(path).rpartition(".")[0]
