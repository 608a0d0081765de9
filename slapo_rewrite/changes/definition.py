"""A class as rewritten: what changes in it, and which of its instances agree on that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.places import Place
from slapo_rewrite.directive import Causes, merged_causes
from slapo_rewrite.model.tree import Node


@dataclass
class Definition:
    """What changes in a class for some of its instances."""

    changes: dict[Place, Change] = field(default_factory=dict)  # by the place in the class
    causes: dict[Place, Causes] = field(default_factory=dict)  # the directives behind each change
    # The constructions that these instances go through; a change at another one would not touch
    # them.
    present: set[Place] = field(default_factory=set)
    nodes: list[Node] = field(default_factory=list)  # the instances

    def agrees_with(self, other: Definition) -> bool:
        """Whether one text serves both: where both have a place, they want the same."""
        return all(
            self.changes.get(place) == other.changes.get(place)
            or not (place in self.changes or self.has(place))
            or not (place in other.changes or other.has(place))
            for place in self.changes.keys() | other.changes.keys()
        )

    def has(self, place: Place) -> bool:
        """Whether these instances have the place at all; other than constructions everyone has."""
        return place.made_at is None or place.made_at in self.present

    def absorb(self, other: Definition) -> None:
        """Takes in a definition that agrees."""
        self.changes.update(other.changes)
        for place, causes in other.causes.items():
            self.causes[place] = merged_causes(self.causes.get(place, ()), causes)
        self.present |= other.present
        self.nodes += other.nodes

    def only(self, places: set[Place]) -> Definition:
        """The definition with the changes at some places alone."""
        return Definition(
            {k: v for k, v in self.changes.items() if k in places},
            {k: v for k, v in self.causes.items() if k in places},
            self.present,
            self.nodes,
        )


def merged(definitions: Iterable[Definition]) -> list[Definition]:
    """As few definitions as the given ones need, in their order."""
    result: list[Definition] = []
    for definition in definitions:
        for known in result:
            if known.agrees_with(definition):
                known.absorb(definition)
                break
        else:
            result.append(definition)
    return result


def shared_changes(definitions: list[Definition]) -> set[Place]:
    """The places where every definition that has them wants the same."""
    return {
        place
        for each in definitions
        for place in each.changes
        if len({d.changes.get(place) for d in definitions if d.has(place)}) == 1
    }
