"""Parameters: cut down to a rank's part, given attributes, or read with their gradients summed."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Asked, Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.collective import Collective
from slapo_rewrite.changes.packed_axes import length_of, place_blocks
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.places import AtParameter, AtReads
from slapo_rewrite.changes.reads import values_read
from slapo_rewrite.changes.state import Shard
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.join import find_parameter_site
from slapo_rewrite.model.tree import Node
from slapo_rewrite.runtime.packed_axes import Packed, PackedSizes
from slapo_rewrite.sharding.types import layer_key


@dataclass(frozen=True)
class ShardParameter(Change):
    """After a parameter's assignment: cut it down to this rank's part.

    Attributes:
        name: The parameter.
        axis: The axis that is split.
        parts: What the blocks packed along it are, as it is given to the function that cuts.
        multiple_of: What a rank's part of a block is a multiple of; 0 where it may be any.
    """

    name: str
    axis: int
    parts: Packed | PackedSizes | None
    multiple_of: int = 0

    says = "whose parameters are split over the tensor-parallel group"

    def write(self, text: ClassText, here: Sequence[Asked]) -> None:
        """Cuts it behind its construction, where that makes one."""
        site = _site(text, here)
        function = text.helper("tensor_parallel", "shard_parameter")
        packed = text.imports.value(self.parts, text.causes) if self.parts is not None else ""
        parts = f", parts={packed}" if packed else ""
        parts += f", multiple_of={self.multiple_of}" if self.multiple_of else ""
        line = f'{function}(self, "{self.name}", axis={self.axis}{parts})'
        bound = getattr(site.statement, "value", None)
        if isinstance(bound, ast.IfExp) and bound is not site.value:  # None for some instances
            line = f"if self.{self.name} is not None:\n    {line}"
        why = f"cut `{self.name}` to this rank's part"
        text.insert_after(site.statement, line, why)


def _site(text: ClassText, here: Sequence[Asked]) -> Site:
    (asked,) = here
    assert isinstance(asked.place, AtParameter)
    return text.classes.sites[asked.place.start]


def place_shard(to: Placement, node: Node, shard: Shard) -> None:
    """Cuts a parameter of a module where it is made.

    Raises:
        UnfollowableConstruction: It is made in another file than that of the module's class.
    """
    site = find_parameter_site(to.files.sources, node, shard.name)
    home = to.files.of_file(site.file)
    if site.file is not home.file:
        raise errors.UnfollowableConstruction(
            f"`{node.path}.{shard.name}` is made in another file, {site.file.display}",
            at=site.file.at(site.value),
            cause=shard.cause,
        )
    start = home.file.span(site.value)[0]
    home.changes.sites[start] = site
    parts = place_blocks(to, node, shard, site, length_of(site, shard.axis))
    multiple_of = to.followed.multiples.get((layer_key(node), shard.name), 0)
    change = ShardParameter(shard.name, shard.axis, parts, multiple_of)
    home.changes.add(node.path, AtParameter(start, (shard.name,)), change, (shard.cause,))


@dataclass(frozen=True)
class AddOnce(Change):
    """After the assignment of a parameter that is added to partial sums: one rank adds it.

    Attributes:
        name: The parameter.
    """

    name: str

    says = "whose biases are added by one rank"

    def write(self, text: ClassText, here: Sequence[Asked]) -> None:
        """Says so behind its construction."""
        site = _site(text, here)
        function = text.helper("tensor_parallel", "add_once")
        line = f'{function}(self, "{self.name}")'
        text.insert_after(site.statement, line, f"`{self.name}` is added to a rank's partial sum")


def place_biases(to: Placement, node: Node) -> None:
    """Has one rank alone add what a module with split parameters adds to its partial sums.

    Raises:
        UnfollowableConstruction: What makes the parameter is not in the file of the module's class.
    """
    for key, name in sorted(to.followed.once, key=lambda found: found[1]):
        if key == layer_key(node):
            cause = to.states[node.path].shards[0].cause
            to.add_behind_parameter(node, name, "add_once", AddOnce(name), cause)


@dataclass(frozen=True)
class ReduceParameterGradient(Change):
    """Where methods read a parameter that every rank has whole: its gradients are added up.

    Attributes:
        name: The parameter's.
    """

    name: str

    prefix = "Replicated"
    says = "that runs on this rank's part: its gradients are summed"

    def write(self, text: ClassText, here: Sequence[Asked]) -> None:
        """Adds them up in every method that computes with it."""
        (asked,) = here
        assert isinstance(asked.place, AtReads)
        found = False
        why = f"`{self.name}` is used on this rank's part: its gradients are added up"

        def make(node: cst.BaseExpression) -> cst.BaseExpression:
            return Collective("all_reduce_gradient").of(node, text.helper)

        for method in text.methods():
            if method.name.startswith("_init") or method.name == "__init__":
                continue
            for node in values_read(method, self.name):
                if asked.place.end:
                    is_meant = asked.place.end == (node.end_lineno, node.end_col_offset)
                else:
                    is_meant = isinstance(node.value, ast.Name) and node.value.id == "self"
                if is_meant:
                    statement = text.file.statement_of(node)
                    text.replace(node, statement, make, why)
                    found = True
        if not found:
            raise errors.Unsupported(
                f"no method of `{text.class_name}` reads `self.{self.name}`: there is no place to "
                "add up its gradients",
                at=text.at_class(),
                cause=text.causes,
            )
