"""A rewrite of the source in the middle of a schedule, as a value."""

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
    """A new class of the file that replaces a module's class."""

    name: str  # the class's name
    # How its tensors are made from the original's, by name; those that keep their names left out.
    weights: tuple[tuple[str, Weight], ...]


@dataclass(frozen=True)
class Rewrite:
    """The changes that one call of the schedule makes in the source."""

    edits: list[Edit]  # the edits of the model file
    references: tuple[Reference, ...] = ()  # the names that the new text uses from other modules
    # Paths of modules that the new text does not call, where the old one did.
    absorbed: tuple[str, ...] = ()
    # What was applied and what was left, for the record.
    notes: tuple[Mapping[str, object], ...] = field(default=())
    # New classes of the file that replace those of modules, by module path.
    classes: Mapping[str, NewClass] = field(default_factory=dict)
    again: bool = False  # whether to carry out the call once more, on the changed source
    # Paths of modules that are not called in every run any more, with all below them.
    idle: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # warnings for the user

    def after(self, earlier: Rewrite | None) -> Rewrite:
        """The same, with the records of what the call changed before."""
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
