"""A change of the source before the schedule goes on, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slapo_rewrite.changes.imports import Reference
from slapo_rewrite.code.splice import Edit

if TYPE_CHECKING:
    from slapo_rewrite.runtime.weights import Weight


@dataclass(frozen=True)
class NewClass:
    """A new class of the file that takes the place of a module's."""

    name: str  # of the class
    # What its tensors are made of, by name; those that keep their names left out.
    weights: tuple[tuple[str, Weight], ...]


@dataclass(frozen=True)
class Rewrite:
    """What one call of the schedule changes in the source."""

    edits: list[Edit]  # how the model file changes
    references: tuple[Reference, ...] = ()  # what the new text uses from elsewhere
    # Paths of modules that were called where the new text calls them no more.
    absorbed: tuple[str, ...] = ()
    # What was done and left undone, for the record.
    notes: tuple[Mapping[str, object], ...] = field(default=())
    # New classes of the file that take the place of modules, by their paths.
    classes: Mapping[str, NewClass] = field(default_factory=dict)
    again: bool = False  # whether the call is still to be carried out, on the changed source
    # Paths of modules that are not always called any more, whatever is below them.
    idle: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # what the user should know, in words

    def after(self, earlier: Rewrite | None) -> Rewrite:
        """The same, with what else the call changed before, for the record."""
        if earlier is None:
            return self
        before: dict[object, Any] = {n["rule"]: n for n in earlier.notes}
        notes: list[Mapping[str, object]] = []
        for note in self.notes:
            both = [before.get(note["rule"], {}), note]
            if applied := [path for each in both for path in each.get("applied", ())]:
                left = {"left": note["left"]} if "left" in note else {}
                why = {path: why for each in both for path, why in each.get("chosen", {}).items()}
                chosen = {"chosen": why} if why else {}
                applied = list(dict.fromkeys(applied))
                note = {"rule": note["rule"], "applied": applied, **chosen, **left}
            notes.append(note)
        return replace(
            self,
            absorbed=(*earlier.absorbed, *self.absorbed),
            idle=(*earlier.idle, *self.idle),
            notes=tuple(notes) or earlier.notes,
        )
