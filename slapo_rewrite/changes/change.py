"""What every kind of change has: a subclass says where it goes and what it writes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.places import Place
from slapo_rewrite.directive import Causes


@dataclass(frozen=True)
class Change:
    """One change of a class. Equal changes at one place are one for all instances."""

    order: ClassVar[int] = 0  # when it is written: what takes in others' lines comes after them
    # What a subclass that differs in such changes alone is called by.
    prefix: ClassVar[str] = "TensorParallel"
    # What is said of its instances.
    says: ClassVar[str] = "whose layers are split over the tensor-parallel group"
    is_parallel: ClassVar[bool] = True  # whether it belongs to splitting the class over ranks
    # Whether it stays with the module whatever else changes there.
    is_lasting: ClassVar[bool] = False

    @property
    def reads(self) -> str | None:
        """The module of the class, by its path from there, that it reads as it will have become."""
        return None

    def group(self, place: Place) -> Hashable:
        """What it is written together with: the same for all changes of one group."""
        return place

    def write(self, text: ClassText, here: Sequence[PlacedChange]) -> None:
        """Writes the changes of a group that begins with this: by `write_at`, if it is alone."""
        (placed,) = here
        self.write_at(text, placed.place)

    def write_at(self, text: ClassText, place: Any) -> None:
        """Writes the change at its place, which is of the kind that this change is for."""
        raise NotImplementedError


@dataclass(frozen=True)
class PlacedChange:
    """A change at its place, with the directives that ask for it."""

    place: Place
    change: Change
    causes: Causes
