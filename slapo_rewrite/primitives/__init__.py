"""The primitives of the schedule language, each in a file of its name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections import UserDict
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from slapo_rewrite.primitives.base import Primitive

# Files that define no primitive.
SHARED = {"base", "matched", "page", "recompute_budget"}


class Registry(UserDict[str, Any]):
    """All primitives by name, each imported on first access: most schedules need a few."""

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
    """All primitives by name."""
    names = {info.name for info in pkgutil.iter_modules(__path__)} - SHARED
    return Registry(dict.fromkeys(sorted(names)))
