"""Changes of parameters: cut to a rank's part, added by one rank, or with summed gradients."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.collective import Collective
from slapo_rewrite.changes.output_files import is_torch
from slapo_rewrite.changes.packed_axes import length_of, place_blocks
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.places import AtParameter, AtReads, AtSite
from slapo_rewrite.changes.reads import cut_what_is_written, values_read
from slapo_rewrite.changes.state import Shard
from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.syntax import end_position
from slapo_rewrite.code.text import accessor
from slapo_rewrite.model.join import find_parameter_site
from slapo_rewrite.model.tree import Node
from slapo_rewrite.runtime.packed_axes import Packed, PackedSizes
from slapo_rewrite.sharding.types import layer_key


@dataclass(frozen=True)
class BehindParameter(Change):
    """A call after the construction of a parameter, or of the torch layer that has it."""

    name: str  # the parameter

    def insert(
        self, text: ClassText, place: AtParameter | AtSite, function: str, arguments: str, why: str
    ) -> None:
        """Inserts the call, with `arguments` after the module and the parameter's name."""
        site = text.classes.sites[place.start]
        owner, made = "self", f"self.{self.name}"
        if isinstance(place, AtSite):
            if site.loops:
                raise errors.UnfollowableConstruction(
                    f"`{site.path}` is constructed in a loop: `{self.name}` has no name there",
                    **text.where(site.value),
                    hint="create it in the constructor of a separate class",
                )
            owner = made = accessor(site.path)
        line = f'{text.helper("tensor_parallel", function)}({owner}, "{self.name}"{arguments})'
        bound = getattr(site.statement, "value", None)
        if isinstance(bound, ast.IfExp) and bound is not site.value:  # None for some instances
            line = f"if {made} is not None:\n    {line}"
        text.insert_after(site.statement, line, why)


@dataclass(frozen=True)
class ShardParameter(BehindParameter):
    """Cuts a parameter to this rank's part."""

    axis: int  # the axis that is split
    # The blocks packed along it: the argument `parts` of the function that cuts.
    parts: Packed | PackedSizes | None
    multiple_of: int = 0  # a rank's part of a block is a multiple of this; 0 for no condition

    says = "whose parameters are split over the tensor-parallel group"

    def write_at(self, text: ClassText, place: AtParameter | AtSite) -> None:
        """Inserts the cut after its construction."""
        packed = text.imports.value(self.parts, text.causes) if self.parts is not None else ""
        more = f", axis={self.axis}"
        more += f", parts={packed}" if packed else ""
        more += f", multiple_of={self.multiple_of}" if self.multiple_of else ""
        why = f"cut `{self.name}` to this rank's part"
        self.insert(text, place, "shard_parameter", more, why)
        if not isinstance(place, AtSite):
            cut_what_is_written(text, lambda node, _: is_name(node, "self"), self.name)


def place_shard(to: Placement, node: Node, shard: Shard) -> None:
    """Places the cut of a parameter: after its construction, or after that of its torch layer."""
    site = find_parameter_site(to.files.sources, node, shard.name)
    size = length_of(site, shard.axis)
    if is_torch(site.file.name):  # a torch layer creates the parameter
        changes = to.files.making(node).changes
        site, size = changes.sites[changes.site(node, (shard.cause,))[0].start], None
    elif site.file is not to.files.of_file(site.file).file:
        raise errors.UnfollowableConstruction(
            f"`{node.path}.{shard.name}` is created in another file, {site.file.display}",
            at=site.file.at(site.value),
            cause=shard.cause,
        )
    multiple_of = to.followed.multiples.get((layer_key(node), shard.name), 0)
    parts = place_blocks(to, node, shard, site, size)
    change = ShardParameter(shard.name, shard.axis, parts, multiple_of)
    to.add_behind_parameter(node, shard.name, "shard", change, shard.cause)


@dataclass(frozen=True)
class AddOnce(BehindParameter):
    """Marks a parameter that is added to partial sums: only one rank adds it."""

    says = "whose biases are added by one rank"

    def write_at(self, text: ClassText, place: AtParameter | AtSite) -> None:
        """Inserts the call after its construction."""
        why = f"`{self.name}` is added to a rank's partial sum"
        self.insert(text, place, "add_once", "", why)


def place_biases(to: Placement, node: Node) -> None:
    """Places `AddOnce` for parameters that a module with sharded parameters adds to its sums."""
    for key, name in sorted(to.followed.once, key=lambda found: found[1]):
        if key == layer_key(node):
            cause = to.states[node.path].shards[0].cause
            to.add_behind_parameter(node, name, "add_once", AddOnce(name), cause)


@dataclass(frozen=True)
class ReduceParameterGradient(Change):
    """Where methods read a whole parameter: all-reduces its gradient."""

    name: str  # the parameter

    prefix = "Replicated"
    says = "that runs on this rank's part: its gradients are summed"

    def write_at(self, text: ClassText, place: AtReads) -> None:
        """Wraps the parameter in every method that computes with it."""
        found = False
        why = f"`{self.name}` is used on this rank's part: its gradients are added up"
        reduced = Collective("all_reduce_gradient")
        for method in text.methods():
            if method.name.startswith("_init") or method.name == "__init__":
                continue
            for node in values_read(method, self.name):
                if place.end:
                    is_meant = place.end == end_position(node)
                else:
                    is_meant = is_name(node.value, "self")
                if is_meant:
                    text.replace(node, lambda made: reduced.of(made, text.helper), why)
                    found = True
        if not found:
            raise errors.Unsupported(
                f"no method of `{text.class_name}` reads `self.{self.name}`: there is no place to "
                "add up its gradients",
                at=text.at_class(),
                cause=text.causes,
            )
