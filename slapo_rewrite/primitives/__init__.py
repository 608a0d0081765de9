"""The schedule language's primitives, one a file, which has the primitive's name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections import UserDict
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from slapo_rewrite.primitives.base import Primitive

# Files that define none.
SHARED = {"base", "matched", "page", "recompute_budget"}


class Registry(UserDict[str, Any]):
    """Every primitive by its name, imported when it is asked for: most schedules need a few."""

    def __getitem__(self, name: str) -> Primitive:
        if (found := self.data[name]) is None:
            module = importlib.import_module(f"{__name__}.{name}")
            [found] = [
                value()
                for value in vars(module).values()
                if isinstance(value, type) and vars(value).get("name") == name
            ]
            self.data[name] = found
        return cast("Primitive", found)


@functools.cache
def registry() -> Registry:
    """Every primitive by its name."""
    names = {info.name for info in pkgutil.iter_modules(__path__)} - SHARED
    return Registry(dict.fromkeys(sorted(names)))
