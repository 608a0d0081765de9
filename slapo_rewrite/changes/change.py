"""The base class of all changes: a subclass says where it goes and what it writes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.places import Place
from slapo_rewrite.directive import Causes


@dataclass(frozen=True)
class Change:
    """One change of a class. Instances with equal changes at a place share them."""

    order: ClassVar[int] = 0  # the order of writing: changes that include others' lines come later
    # The prefix of the name of a subclass that only has such changes.
    prefix: ClassVar[str] = "TensorParallel"
    # The phrase about its instances in its docstring.
    says: ClassVar[str] = "whose layers are split over the tensor-parallel group"
    is_parallel: ClassVar[bool] = True  # whether it is part of tensor parallelism
    # Whether it remains valid whatever replaces the module.
    is_lasting: ClassVar[bool] = False

    @property
    def reads(self) -> str | None:
        """The relative path of a submodule that the new text reads in its changed form, if any."""
        return None

    def group(self, place: Place) -> Hashable:
        """A key: changes with the same key are written together."""
        return place

    def write(self, text: ClassText, here: Sequence[PlacedChange]) -> None:
        """Writes a group of changes that starts with this one; a single one by `write_at`."""
        (placed,) = here
        self.write_at(text, placed.place)

    def write_at(self, text: ClassText, place: Any) -> None:
        """Writes the change at its place."""
        raise NotImplementedError


@dataclass(frozen=True)
class PlacedChange:
    """A change at its place, with the directives that ask for it."""

    place: Place
    change: Change
    causes: Causes
