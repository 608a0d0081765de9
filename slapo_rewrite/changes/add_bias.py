"""Decomposition of a linear layer into product and bias addition, at its call sites."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.around_forward import WrapForward
from slapo_rewrite.changes.border_syncs import calls
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.collective import Collective
from slapo_rewrite.changes.imports import Function
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.places import AtCalls
from slapo_rewrite.code.build import call, expression
from slapo_rewrite.directive import merged_causes
from slapo_rewrite.model.layers import MULTIPLIED, Layer, qualified
from slapo_rewrite.model.tree import Node


@dataclass(frozen=True)
class AddBias(Change):
    """At the calls of a linear layer: the product, with the bias added to it."""

    product: str  # `linear`, or `matmul` where the weight is not transposed
    before: Collective | None  # the collective on the layer's input, if any
    after: Collective | None  # the collective on the product, if any
    # The parameters used with parts: their gradients are all-reduced.
    shared: frozenset[str] = frozenset()

    prefix = "Decomposed"
    says = "that adds biases of linear layers by itself"
    is_parallel = False

    def write_at(self, text: ClassText, place: AtCalls) -> None:
        """Replaces every call by the product and the sum."""
        why = f"the bias of `{place.path}` is added separately"
        hint = (
            "do not decompose a layer that is called through a container or a loop, or that an "
            "earlier line has replaced, by a fused function for example"
        )
        for node in calls(text, place, self, "the sum", hint):
            if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
                raise errors.Unsupported(
                    f"`{ast.unparse(node.func)}` is not called with its input alone",
                    **text.where(node),
                )
            text.replace(node, lambda made: self._sum(made, text), why)

    def _sum(self, made: cst.Call, text: ClassText) -> cst.BaseExpression:
        layer, value = made.func, made.args[0].value

        def parameter(name: str) -> cst.BaseExpression:
            node = cst.Attribute(layer, cst.Name(name))
            if name not in self.shared:
                return node
            return Collective("all_reduce_gradient").of(node, text.helper)

        product: cst.BaseExpression
        if self.before is None and self.after is None and not self.shared:
            # `linear_product` calls the layer if something has wrapped it since.
            function = text.helper("kernels", "linear_product")
            product = call(function, value, layer)
        else:
            if self.before is not None:
                value = self.before.of(value, text.helper)
            if self.product == "linear":
                function = text.imports.functional("linear", text.causes)
                product = call(function, value, parameter("weight"))
            else:
                product = expression("{x} @ {w}", x=value, w=parameter("weight"))
            if self.after is not None:
                product = self.after.of(product, text.helper)
        return expression("{product} + {bias}", product=product, bias=parameter("bias"))


def place_decomposed(to: Placement, node: Node, layer: Layer | None) -> None:
    """Places the decomposition of a layer, with its collectives, at its call sites."""
    state = to.states[node.path]
    assert node.owner is not None and state.decompose is not None
    cause = state.decompose.cause
    hooks = [s.cause for s in state.syncs if isinstance(s.op, Function)]
    wraps = [cause for _, cause in state.asks(WrapForward)]
    around = _around(layer)
    if hooks or wraps or around is None:
        others = [*hooks, *wraps, *state.causes()]
        raise errors.Unsupported(
            f"{node.shown} cannot be decomposed: another request needs a call of the layer",
            at=cause.at,
            cause=others,
            hint="a layer split over its inputs is decomposed with fwd_post all_reduce, one "
            "split over its outputs without a gather",
        )
    calling, caller, relative = to.calling(node)
    shared = frozenset(name for path, name in to.followed.shared if path == node.path)
    what = AddBias(MULTIPLIED[qualified(node.cls)], *around, shared)
    causes = merged_causes([cause], state.causes())
    calling.changes.add(caller.path, AtCalls(relative, "bias"), what, causes)


def _around(layer: Layer | None) -> tuple[Collective | None, Collective | None] | None:
    """The collectives before and after a layer's product; None if the layer does more."""
    if layer is None:
        return None, None
    more = dict(layer.keywords).keys() - {"parts"}
    if layer.name.startswith("ColumnParallel") and more <= {"reduce_input_gradient"}:
        return (None if more else Collective("all_reduce_gradient")), None
    if layer.name.startswith("RowParallel") and not more:
        return None, Collective("all_reduce")
    return None
