"""The rules that there are: each file of `rules/fusions` defines one."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

from slapo_rewrite.fusion.rule import Rule
from slapo_rewrite.source.bundle import rules_folder

PACKAGE = "slapo_rewrite.rules.fusions"


@functools.cache
def rules() -> dict[str, Rule]:
    """Every rule by its name, those that `apply_all` tries first before the others."""
    folder = rules_folder() / "fusions"
    found: list[Rule] = []
    for path in sorted(folder.glob("*.py")):
        if path.stem != "__init__":
            found += _defined(path)
    return {rule.name: rule for rule in sorted(found, key=lambda r: (-r.rank, r.name))}


def _defined(path: Path) -> list[Rule]:
    """The rules of a file; in a checkout `rules/` lies beside the package, not inside."""
    name = f"{PACKAGE}.{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return [
        value()
        for value in vars(sys.modules[name]).values()
        if isinstance(value, type)
        and issubclass(value, Rule)
        and "name" in vars(value)
        and value.__module__ == name
    ]
