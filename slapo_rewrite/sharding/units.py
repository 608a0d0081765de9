"""The units in which a layer must be split: whole heads, or equal numbers of features.

If each of a layer's features becomes several later (as repeated heads of one feature do), all ranks
must have the same number: uneven shares of this layer would not match those of other layers.

If a layer's features are regrouped in heads, each rank must have whole heads. A number of heads in
an attribute refuses world sizes that do not divide it. Otherwise the layer must know the unit: a
number that `forward` computes from the tensor's size would only be rounded.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from slapo_rewrite.code.names import is_name
from slapo_rewrite.code.syntax import assignments, tree_of
from slapo_rewrite.model.layers import Unit
from slapo_rewrite.model.tree import Node
from slapo_rewrite.sharding.operation_places import (
    calling_frame,
    expression_at,
    function_at,
    place_of,
)
from slapo_rewrite.sharding.rank_state import Run
from slapo_rewrite.sharding.tracked_sizes import Attribute, Shape
from slapo_rewrite.sharding.types import CannotFollow, LayerKey, layer_key

EVEN = Unit("1", 1)


def note_even(run: Run, tensor: torch.Tensor, axis: int) -> None:
    """Records that a tensor's source must be split evenly along an axis.

    The reason: each element along the axis becomes several.
    """
    node = run.tree.nodes.get(run.flow.of(tensor).source or "")
    if node is not None and run.full_shape(tensor)[axis] not in run.followed.even:
        run.followed.units.setdefault(layer_key(node), EVEN)


def note_step(run: Run, tensor: torch.Tensor, axis: int, step: int) -> None:
    """Records that each rank's share of a part's parameters must be a multiple of `step`.

    The reason: the model takes every `step`-th element of the tensor along the axis.
    """
    path, whole = run.flow.of(tensor).source or "", run.full_shape(tensor)[axis]
    shards = [
        shard.name
        for shard in run.request.parameters.get(path, ())
        if run.full_shape(getattr(run.tree.nodes[path].live, shard.name))[shard.axis] == whole
    ]
    if not shards:
        raise CannotFollow(
            f"this takes one of every {step} elements of a split axis, but no parameter is known "
            "that is packed this way",
            path or None,
            "gather the value first, or cut it with `split` or `chunk`",
        )
    for name in shards:
        key = layer_key(run.tree.nodes[path]), name
        run.followed.multiples[key] = math.lcm(step, run.followed.multiples.get(key, 1))


def note_unit(
    run: Run,
    tensor: torch.Tensor,
    sizes: Sequence[int],
    chosen: int,
    outs: Sequence[int],
    whole: Shape,
) -> None:
    """Records the unit in which the layer that a tensor comes from must be split into heads.

    The tensor's features are regrouped in the axes `outs`, and the axis `chosen` of these counts
    the heads. `whole` is the result's shape in the whole model, `sizes` the call's arguments.
    """
    inner = [axis for axis in outs if axis > chosen]
    path = run.origins.get(id(tensor))
    if len(inner) != 1 or path is None:
        return
    size, count, node = sizes[inner[0]], sizes[chosen], run.tree.nodes[path]
    key, attribute = layer_key(node), head_of(run, tensor, size)
    if run.followed.units.get(key) == EVEN:
        del run.followed.units[key]
    if attribute is not None:
        run.followed.heads[key] = attribute
    if run.wanted.sizes & set(getattr(count, "attributes", ())) or int(size) != whole[inner[0]]:
        return  # the attribute checks divisibility itself, or the size depends on it
    if attribute is not None:
        run.followed.units[key] = Unit(f"self.{attribute}", int(size))
        return
    text = (
        _made_of(node, size)
        or _multiple(node, size)
        or _written(run, node, len(sizes), inner[0], list(outs).index(inner[0]))
    )
    if text is not None:
        known = run.followed.units.get(key, Unit(text, int(size)))
        run.followed.units[key] = Unit(text, int(size) if known.size == size else 0)
        return
    # Instances of a class may have different head sizes: the number must be the same for all.
    unit = Unit(str(int(size)), int(size))
    fits = not run.has_values and run.followed.units.setdefault(key, unit) == unit
    if not fits and int(count) not in (-1, whole[chosen]):
        raise CannotFollow(
            f"`{path}` gives heads of {int(size)} features. This line computes the number of "
            "heads from a rank's features, and some numbers of ranks would cut a head",
            path,
            "keep a head's size in an integer attribute of the module that builds the layer",
        )


def head_of(run: Run, tensor: torch.Tensor, size: int) -> str | None:
    """The attribute with this size, of the module that owns the layer a tensor comes from."""
    path = run.origins.get(id(tensor))
    node = run.tree.nodes[path] if path is not None else None
    for attribute in getattr(size, "attributes", ()):
        if node and node.owner and node.owner.live.__dict__.get(attribute.name) is size:
            return str(attribute.name)
    return None


def single_head(run: Run, tensor: torch.Tensor, size: int) -> tuple[LayerKey, str] | None:
    """The layer whose output is a single head, of the size of another layer's heads beside it."""
    attribute = head_of(run, tensor, size)
    if attribute is None:
        return None
    node = run.tree.nodes[run.origins[id(tensor)]]
    owner, _ = key = layer_key(node)
    beside = {name for (cls, _), name in run.followed.heads.items() if cls is owner}
    layer: Any = node.live
    alone = getattr(layer, "out_features", None) == size
    return (key, attribute) if alone and attribute in beside else None


def _made_of(node: Node, size: int) -> str | None:
    """A size's expression, if it uses attributes of the layer's owner only."""
    made: str | None = getattr(size, "text", None)
    mine = all(node.owner and a.cls is node.owner.cls for a in getattr(size, "attributes", ()))
    return ast.unparse(ast.parse(made, mode="eval")) if made and mine else None


def _multiple(node: Node, size: int) -> str | None:
    """A size as a product of a constant and an attribute, `3 * self.head_size`.

    Only if the class's code has that product: a factor known from the run alone may be a batch's.
    """
    owner = node.owner
    attributes: tuple[Attribute, ...] = getattr(size, "attributes", ())
    if owner is None or len(attributes) != 1 or attributes[0].cls is not owner.cls:
        return None
    name = attributes[0].name
    one: Any = getattr(owner.live, name, 0)
    for found in ast.walk(tree_of(owner.cls)):
        if not isinstance(found, ast.BinOp) or not isinstance(found.op, ast.Mult):
            continue
        for times, read in ((found.left, found.right), (found.right, found.left)):
            if not isinstance(times, ast.Constant) or not isinstance(read, ast.Attribute):
                continue
            if read.attr == name and is_name(read.value, "self") and times.value * one == size:
                return ast.unparse(found)
    return None


def _written(run: Run, node: Node, count: int, axis: int, inner: int) -> str | None:
    """A size's source text, if the constructor of the layer's owner can evaluate it."""
    frame = calling_frame()
    place = place_of(frame) if frame is not None else None
    if frame is None or place is None or node.owner is None:
        return None
    call, around = expression_at(place, run.editable), partial(function_at, frame, run.editable)
    expr = _size_at(call, count, axis, inner, around)
    if isinstance(expr, ast.Name) and (function := around()) is not None:
        expr = _always(expr.id, function) or expr
    code = frame.f_code
    known = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    match expr:
        case ast.Constant(value=int()):
            return ast.unparse(expr)
        case ast.Name(id=name):
            return name if name not in known and name in frame.f_globals else None
        case ast.Attribute() | ast.Subscript(slice=ast.Constant()):
            root: ast.expr = expr
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            mine = is_name(root, "self") and frame.f_locals.get("self") is node.owner.live
            return ast.unparse(expr) if mine else None
    return None


def _size_at(
    call: ast.expr | None,
    count: int,
    axis: int,
    inner: int,
    function: Callable[[], ast.FunctionDef | None],
) -> ast.expr | None:
    """The expression of an axis's size in a call of `view` or `unflatten`."""
    if not isinstance(call, ast.Call):
        return None
    given: list[ast.expr] = list(call.args)
    if ast.unparse(call.func).endswith("unflatten"):
        given, axis, count = given[-1:], inner, 0
    if len(given) == 1 and isinstance(given[0], ast.Name) and (around := function()) is not None:
        called = _always(given[0].id, around)
        given = called.elts if isinstance(called, ast.Tuple) else given
    if len(given) in (1, 2) and isinstance(given[-1], (ast.Tuple, ast.List)):
        given = given[-1].elts
    if count and len(given) != count and any(isinstance(g, ast.Starred) for g in given):
        given, axis = given[axis - count :], 0  # counted from the end
    plain = not any(isinstance(g, ast.Starred) for g in given[axis:])
    return (
        given[axis]
        if axis < len(given) and plain and (count in (0, len(given)) or not axis)
        else None
    )


def _always(name: str, function: ast.FunctionDef) -> ast.expr | None:
    """The value of a local variable that a function assigns once, at its top level."""
    match assignments(function, name):
        case [ast.Assign(targets=[ast.Name()], value=found) as bound] if bound in function.body:
            given = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
            return None if name in given else found
    return None
