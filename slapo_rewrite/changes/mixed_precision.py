"""Half precision for products: casts in methods, and layers that cast."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.bases import DeriveFrom
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.construction import UseParallelLayer
from slapo_rewrite.changes.placement import Placement, Requested, at_node
from slapo_rewrite.changes.places import AtBase, AtNode
from slapo_rewrite.code.arguments import given_by
from slapo_rewrite.code.build import call, expression
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Causes, Directive
from slapo_rewrite.model.layers import SUMMING, Layer, qualified
from slapo_rewrite.model.tree import Node
from slapo_rewrite.precision.casts import HALF, Operand, Precisions
from slapo_rewrite.precision.half_layers import FLOAT32_LAYERS, HALF_LAYERS, half_base

MODULE = "mixed_precision"
# The tensor method that casts to each dtype.
CASTS = {"bfloat16": "bfloat16", "float16": "half"}
# The prefix of layers that compute in each dtype.
NAMES = {"bfloat16": "BFloat16", "float16": "Float16"}
# The module with the half-precision variant of each tensor-parallel layer.
PARALLEL = {
    "ColumnParallelLinear": "mixed_parallel",
    "RowParallelLinear": "mixed_parallel",
    "KeyValueParallelLinear": "mixed_parallel",
    "ReplicatedLinear": "mixed_parallel",
    "ColumnParallelConv1D": "mixed_parallel_conv1d",
    "RowParallelConv1D": "mixed_parallel_conv1d",
    **{
        f"{kind}ParallelConv{axes}d": "mixed_parallel_convolution"
        for kind in ("Column", "Row", "Group")
        for axes in (1, 2)
    },
    "ParallelBatchNorm1d": "mixed_parallel_norms",
    "ParallelBatchNorm2d": "mixed_parallel_norms",
}


@dataclass(frozen=True)
class HalfPrecision(Requested):
    """A module and those in it compute products in half precision."""

    dtype: str  # the dtype's name
    # Operations, and modules by patterns of their paths, that stay in float32.
    keep: tuple[str, ...] = ()
    is_parallel = False

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        """Nowhere: the changes of all such requests are placed together."""


@dataclass(frozen=True)
class KeepFloat32(Requested):
    """An exception: a module and those in it compute in float32."""

    is_parallel = False

    def place(self, to: Placement, node: Node, cause: Directive) -> None:
        """Nowhere."""


@dataclass(frozen=True)
class UseHalfLayer(UseParallelLayer):
    """At a construction site: a layer that computes in half precision."""

    prefix = "Half"
    says = "that computes products in half precision"
    is_parallel = False


@dataclass(frozen=True)
class CastOperand(Change):
    """In a method: a cast of an operand of a call or a product."""

    operand: Operand
    method: str  # the tensor method that casts it
    function: str | None = None  # a helper instead, for a mask, which need not be a float

    prefix = "Half"
    says = "that computes products in half precision"
    is_parallel = False

    def write_at(self, text: ClassText, place: AtNode) -> None:
        """Calls the method on the operand's expression; raises if that is ambiguous."""
        for _, node in text.nodes_at(place):
            if isinstance(node, ast.Subscript):
                value = _assigned(node, text.file.statement_of(node))
            else:
                value = _operand(node, self.operand)
            if value is None:
                continue

            def make(made: cst.BaseExpression) -> cst.BaseExpression:
                if self.function is None:
                    return expression(f"{{value}}.{self.method}()", value=made)
                return call(text.helper(MODULE, self.function), made)

            why = f"computed in {'float32' if self.method == 'float' else 'half precision'}"
            text.replace(value, make, why)
            return
        raise errors.Unsupported(
            "the value to cast here cannot be told apart from its neighbours",
            **text.where(place),
            hint="write a call with separate arguments, or `a @ b`; or keep the called module in "
            "float32 with `keep`",
        )


def _assigned(node: ast.Subscript, statement: ast.stmt) -> ast.expr | None:
    """The value that a statement assigns to elements of a tensor."""
    if isinstance(statement, ast.Assign) and statement.targets == [node]:
        return statement.value
    return None


def _operand(node: ast.Call | ast.BinOp, operand: Operand) -> ast.expr | None:
    """The expression of an operand."""
    if isinstance(node, ast.BinOp):
        return {-1: node.left, 0: node.right}.get(operand.position)
    if operand.position == -1:
        return node.func.value if isinstance(node.func, ast.Attribute) else None
    given = given_by(node)
    found = next((value for name, value in given if name and name == operand.keyword), None)
    before = given[: operand.position + 1]
    if found is None and len(before) > operand.position and not any(n for n, _ in before):
        found = before[-1][1]
    if operand.element is None or found is None:
        return found
    if not isinstance(found, (ast.List, ast.Tuple)) or operand.element >= len(found.elts):
        return None
    element = found.elts[operand.element]
    return None if isinstance(element, ast.Starred) else element


def half_layer(layer: Layer, dtype: str) -> Layer | None:
    """The half-precision variant of a tensor-parallel layer; None if there is none."""
    if layer.name not in PARALLEL:
        return None
    precision = "Float32" if "Norm" in layer.name else NAMES[dtype]
    return replace(layer, module=PARALLEL[layer.name], name=f"{precision}{layer.name}")


def place_half_layer(to: Placement, node: Node, dtype: str, causes: Causes) -> None:
    """Places a layer that casts by itself, at the construction site or as the base of a class."""
    base = half_base(node.cls)
    if base is None:
        base = node.cls
        layer = Layer(*FLOAT32_LAYERS[qualified(base)])
    else:
        module, name = HALF_LAYERS[qualified(base)]
        layer = Layer(module, f"{NAMES[dtype]}{name}")
    is_summed = any(path == node.path for path, _ in to.followed.shared)
    if is_summed:
        summing = SUMMING.get(base) and half_layer(SUMMING[base], dtype)
        if summing is None:
            raise errors.Unsupported(
                f"{node.shown} works on parts, so its gradients have to be added up, and no layer "
                "both does that and casts",
                at=causes[0].at if causes else None,
                hint=f'keep it in float32: .autocast(keep=["{with_wildcards(node.path)}"])',
            )
        layer = summing
    if base is node.cls:
        use = UseParallelLayer(layer) if is_summed else UseHalfLayer(layer)
        to.files.making(node).changes.at_site(node, use, causes)
    else:
        to.home(node).changes.add(node.path, AtBase(), DeriveFrom(layer, base.__name__), causes)


def place_casts(
    to: Placement, found: Precisions, dtype: str, is_half: Callable[[str], bool], causes: Causes
) -> None:
    """Places casts in the methods where values change their precision.

    Modules in which a cast has no effect share the class with those that need it.
    """
    for cast in sorted(found.casts, key=repr):
        method = CASTS[dtype] if cast.to == HALF else "float"
        change = CastOperand(cast.operand, method, f"{method}_mask" if cast.is_mask else None)
        at, home = at_node("cast", cast.place, cast.operand), to.files.at(cast.place)
        for path, node in to.tree.nodes.items():
            runs = any(
                home.classes.holds(c, cast.place.line) for c in to.files.lineage(node.cls, home)
            )
            alike = runs and is_half(path) == is_half(cast.path) and found.alike(cast, path)
            if path == cast.path or alike:
                home.changes.add(path, at, change, causes)
