"""The schedule language's primitives, one a file, which has the primitive's name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_rewrite.primitives.base import Primitive

SHARED = {
    "argument_types",
    "base",
    "held",
    "matched",
    "page",
    "recompute_budget",
}  # files that define none


class Registry(MutableMapping[str, "Primitive"]):
    """Every primitive by its name, imported when it is asked for: most schedules need a few."""

    def __init__(self) -> None:
        names = {info.name for info in pkgutil.iter_modules(__path__)} - SHARED
        self._known: dict[str, Primitive | None] = dict.fromkeys(sorted(names))

    def __getitem__(self, name: str) -> Primitive:
        if (found := self._known[name]) is None:
            module = importlib.import_module(f"{__name__}.{name}")
            [found] = [
                value()
                for value in vars(module).values()
                if isinstance(value, type) and vars(value).get("name") == name
            ]
            self._known[name] = found
        return found

    def __setitem__(self, name: str, primitive: Primitive) -> None:
        self._known[name] = primitive

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known  # a mapping's own looks it up

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


@functools.cache
def registry() -> Registry:
    """Every primitive by its name."""
    return Registry()
