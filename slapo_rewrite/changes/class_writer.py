"""Writes what changes in one class: in its own text, or as a subclass."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping
from dataclasses import replace

from slapo_rewrite.changes.change import Asked
from slapo_rewrite.changes.class_hierarchy import ClassHierarchy
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.definition import Definition
from slapo_rewrite.changes.elements import IndexSets
from slapo_rewrite.changes.imports import Imports
from slapo_rewrite.changes.places import AtForward, Place
from slapo_rewrite.changes.subclasses import Subclass, SubclassWriter
from slapo_rewrite.code.lines import Lines, written
from slapo_rewrite.code.splice import Edit
from slapo_rewrite.code.text import within
from slapo_rewrite.directive import merged_causes


class ClassWriter:
    """Edits one source file, class by class.

    Args:
        classes: The classes of the file.
        imports: Takes the names that the edits refer to.

    Attributes:
        subclasses: Writes the text of subclasses.
    """

    def __init__(self, classes: ClassHierarchy, imports: Imports) -> None:
        self.classes, self.imports = classes, imports
        self.file = classes.file
        self.subclasses = SubclassWriter(classes, imports)

    def in_place(self, class_name: str, definition: Definition, indices: IndexSets) -> list[Edit]:
        """The edits that make the class what `definition` says."""
        return written(self.file, self._lines(class_name, definition, indices))

    def subclass(
        self, new: Subclass, whole: Definition, extra: set[Place], indices: IndexSets
    ) -> str:
        """A subclass in which only the changes at `extra` stand.

        Args:
            new: The subclass.
            whole: Everything that its instances want, so that a statement is repeated as a whole.
            extra: What the class itself does not do.
            indices: The elements that each loop makes.
        """
        class_name = new.base
        borders: set[Place] = {place for place in extra if isinstance(place, AtForward)}
        inner = self._lines(class_name, whole.only(extra - borders), indices)
        around = self._around_forward(class_name, whole, borders, inner)
        if around is None:
            inner = self._lines(class_name, whole.only(extra), indices)
        lines = self._lines(class_name, whole, indices)
        # A loop that counts elements for some changes alone need not where all are made.
        changed = {s: _in_subclass(lines[s], inner[s]) for s in inner if s in lines}
        for method in self.classes.methods(class_name):
            # A constructor goes on from its base's; any other method is written anew as a whole.
            if method.name != "__init__" and any(within(method, s) for s in inner):
                changed |= {s: change for s, change in lines.items() if within(method, s)}
        return self.subclasses.subclass(new, changed) + (around or "")

    def _around_forward(
        self,
        class_name: str,
        definition: Definition,
        borders: set[Place],
        inner: Mapping[ast.stmt, Lines],
    ) -> str | None:
        """A method with collectives around the class's own `forward`, where that is enough."""
        forward = self.classes.method(class_name, "forward")
        wraps = [definition.changes[k] for k in sorted(borders, key=str)]
        if not wraps or forward is None or any(within(forward, s) for s in inner):
            return None
        causes = merged_causes(*(definition.causes.get(k, ()) for k in borders))
        return self.subclasses.around_forward(forward, wraps, causes)

    def _lines(
        self, class_name: str, definition: Definition, indices: IndexSets
    ) -> dict[ast.stmt, Lines]:
        """What changes in the class, by statement."""
        text = ClassText(self.classes, self.imports, class_name, definition.changes, indices)
        groups: dict[Hashable, list[Asked]] = {}
        for place, change in definition.changes.items():
            asked = Asked(place, change, definition.causes.get(place, ()))
            groups.setdefault(change.group(place), []).append(asked)
        # What takes in the lines of others comes after them.
        for here in sorted(groups.values(), key=lambda group: group[0].change.order):
            alone = len(here) == 1
            causes = here[0].causes if alone else merged_causes(*(each.causes for each in here))
            here[0].change.write(text.asked_by(causes), here)
        return text.lines


def _in_subclass(whole: Lines, extra: Lines) -> Lines:
    """What a subclass's constructor says at a statement that its base's has carried out.

    A statement that is repeated needs what follows it once more, but no size is cut twice.
    """
    repeated = extra.inside or extra.again
    after = [line for line in whole.after if line in extra.after or (repeated and not line.once)]
    return replace(whole, after=after, before=whole.before if repeated else extra.before)
