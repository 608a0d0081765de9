"""Rewritten definitions of a class: their changes, and the instances that share them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.places import Place
from slapo_rewrite.directive import Causes, merged_causes
from slapo_rewrite.model.tree import Node


@dataclass
class Definition:
    """The changes of a class for some of its instances."""

    changes: dict[Place, Change] = field(default_factory=dict)  # by place
    causes: dict[Place, Causes] = field(default_factory=dict)  # the directives behind each change
    # The construction sites that these instances execute; changes at other sites do not affect
    # them.
    present: set[Place] = field(default_factory=set)
    nodes: list[Node] = field(default_factory=list)  # the instances

    def agrees_with(self, other: Definition) -> bool:
        """Whether one class text serves both: at each place that both have, changes are equal."""
        return all(
            self.changes.get(place) == other.changes.get(place)
            or not (place in self.changes or self.has(place))
            or not (place in other.changes or other.has(place))
            for place in self.changes.keys() | other.changes.keys()
        )

    def has(self, place: Place) -> bool:
        """Whether these instances have a place; only construction sites may be missing."""
        return place.made_at is None or place.made_at in self.present

    def absorb(self, other: Definition) -> None:
        """Merges a definition that agrees."""
        self.changes.update(other.changes)
        for place, causes in other.causes.items():
            self.causes[place] = merged_causes(self.causes.get(place, ()), causes)
        self.present |= other.present
        self.nodes += other.nodes

    def only(self, places: set[Place]) -> Definition:
        """The definition with the changes at some places only."""
        return Definition(
            {k: v for k, v in self.changes.items() if k in places},
            {k: v for k, v in self.causes.items() if k in places},
            self.present,
            self.nodes,
        )


def merged(definitions: Iterable[Definition]) -> list[Definition]:
    """Merges definitions that agree, in their order."""
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
    """The places where all definitions that have the place have the same change."""
    return {
        place
        for each in definitions
        for place in each.changes
        if len({d.changes.get(place) for d in definitions if d.has(place)}) == 1
    }
