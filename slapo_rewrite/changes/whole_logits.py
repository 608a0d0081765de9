"""Logits by the table of an embedding that is split over its vocabulary."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.placement import Placement, at_node
from slapo_rewrite.changes.places import AtNode
from slapo_rewrite.code.build import call
from slapo_rewrite.sharding import TiedHead, head_of


@dataclass(frozen=True)
class GatherTiedHead(Change):
    """Where a method multiplies by an embedding's table: the whole logits on every rank."""

    says = "whose head is the table of a split embedding"

    def write_at(self, text: ClassText, place: AtNode) -> None:
        """Has the layer's own function compute the product.

        Raises:
            Unsupported: The product is not to be found there.
        """
        found = [node for _, node in text.nodes_at(place) if head_of(node)]
        if not found:
            raise errors.Unsupported(
                "the product with the table of a split embedding cannot be told apart here",
                at=text.span_of(place),
                cause=text.causes,
            )
        for node in found:
            embedding = head_of(node)
            assert embedding is not None
            name = text.helper("tensor_parallel", "tied_head")

            def make(
                made: cst.BaseExpression, name: str = name, layer: str = ast.unparse(embedding)
            ) -> cst.BaseExpression:
                assert isinstance(made, (cst.BinaryOperation, cst.Call))
                x = made.left if isinstance(made, cst.BinaryOperation) else made.args[0].value
                return call(name, x, layer)

            text.replace(node, make, "whole logits of a split table")


def place_tied_head(to: Placement, head: TiedHead) -> None:
    """Whole logits where the product with a split embedding's table stands."""
    at = at_node("tied_head", head.place)
    causes = tuple(to.states[head.embedding].causes())
    to.files.at(head.place).changes.add(head.owner, at, GatherTiedHead(), causes)
