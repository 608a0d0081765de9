"""The schedule language's primitives, one a file."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from slapo_rewrite.primitives.base import Primitive


@functools.cache
def registry() -> dict[str, Primitive]:
    """Every primitive by its name: each file of this package defines one."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name not in ("base", "page", "matched"):
            module = importlib.import_module(f"{__name__}.{info.name}")
            for value in vars(module).values():
                if (
                    isinstance(value, type)
                    and issubclass(value, Primitive)
                    and "name" in vars(value)  # not one that several are derived from
                ):
                    found[value.name] = value()
    return dict(sorted(found.items()))
