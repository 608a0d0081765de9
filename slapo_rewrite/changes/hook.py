"""A function of the user's own at a module's border: a hook on the module that was made."""

from __future__ import annotations

from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.imports import Function
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.places import AtSite, BehindSite
from slapo_rewrite.changes.state import Sync
from slapo_rewrite.code.text import accessor
from slapo_rewrite.model.tree import Node

HOOKS = {
    "fwd_pre": "register_forward_pre_hook",
    "fwd_post": "register_forward_hook",
    "bwd_post": "register_full_backward_hook",
}


@dataclass(frozen=True)
class RegisterHook(Change):
    """After a construction site: a hook on the module that was made."""

    mode: str
    function: Function

    def write_at(self, text: ClassText, place: AtSite) -> None:
        """Registers it there."""
        site = text.classes.sites[place.start]
        if place.index:
            raise errors.UnfollowableConstruction(
                f"`{site.path}` is made in a loop: a hook cannot be put on one element there",
                at=text.file.at(site.value),
                cause=text.causes,
                hint="put the sync on a module inside the element",
            )
        function = text.imports.function(self.function, text.causes)
        line = f"{accessor(site.path)}.{HOOKS[self.mode]}({function})"
        text.insert_after(site.statement, line, f"hook on `{site.path}`")


def place_hook(to: Placement, node: Node, sync: Sync, function: Function) -> None:
    """Registers a function of the user's own behind what makes a module."""
    causes = (sync.cause,)
    places = to.files.making(node).changes
    at, owner = places.site(node, causes)
    place = BehindSite(at.start, at.index, (sync.mode, function.name))
    places.add(owner.path, place, RegisterHook(sync.mode, function), causes)
