"""The registry of rules: each file of `rules/fusions` defines one."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path

from slapo_rewrite.bundle import rules_folder
from slapo_rewrite.fusion.rule import Rule

PACKAGE = "slapo_rewrite.rules.fusions"


@functools.cache
def rules() -> dict[str, Rule]:
    """All rules by name, in the order in which `apply_all` tries them."""
    folder = _package(PACKAGE, rules_folder())
    names = sorted(path.stem for path in folder.glob("*.py"))
    found = (rule for n in names if n != "__init__" for rule in _defined(f"{PACKAGE}.{n}"))
    return {rule.name: rule for rule in sorted(found, key=lambda r: (-r.rank, r.name))}


def _package(name: str, rules_folder: Path) -> Path:
    """The folder of a package in `rules/`, which in a checkout is beside our package."""
    above, _, last = name.rpartition(".")
    folder = _package(above, rules_folder) / last if above != "slapo_rewrite" else rules_folder
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return folder


def _defined(name: str) -> list[Rule]:
    """The rules of a module."""
    return [
        value()
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type)
        and issubclass(value, Rule)
        and "name" in vars(value)
        and value.__module__ == name
    ]
