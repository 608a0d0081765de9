"""Places sharded layers: at their construction sites, or as the base of their own class."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.bases import DeriveFrom
from slapo_rewrite.changes.construction import ReplaceModule, UseParallelLayer, unknown_unit
from slapo_rewrite.changes.late import Late
from slapo_rewrite.changes.packed_axes import place_blocks
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.places import AtBase
from slapo_rewrite.changes.pretrained import MAPPED, keep_checkpoints
from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.code.text import within
from slapo_rewrite.code.written_out import with_arguments
from slapo_rewrite.directive import Causes, merged_causes
from slapo_rewrite.model.construction_calls import first_class_of
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.join import Sources, find_site, given_partial, known_site, size_at
from slapo_rewrite.model.layers import IN_UNITS, Layer, Unit, base_of, replicated, size_of
from slapo_rewrite.model.tree import Node
from slapo_rewrite.sharding.types import layer_key


def place_layer(
    to: Placement,
    node: Node,
    layer: Layer,
    other: Callable[[Layer], Layer] | None = None,
    others: Causes = (),
) -> None:
    """Places a sharded layer at its construction site, or as the base of its own class.

    `place_replacement` handles replaced modules. `other` makes a variant, for the causes `others`.
    """
    causes, base = merged_causes(to.causes(node), others), base_of(node.cls)
    assert base is not None
    if base is node.cls and to.states[node.path].replacement:
        return
    fitted = _fitted(to, node, layer)
    fitted = fitted if other is None else other(fitted)
    if (made_as := first_class_of(node.live)) is not node.cls:
        site = known_site(to.files.sources, node)
        raise errors.UnfollowableConstruction(
            f"{node.shown} is constructed as a `{made_as.__name__}`, but later becomes a "
            f"`{node.cls.__name__}`",
            at=site.file.at(site.value) if site is not None else None,
            cause=causes,
            hint=f"construct a `{node.cls.__name__}`",
        )
    if base is not node.cls:
        what = DeriveFrom(fitted, base.__name__)
        to.home(node).changes.add(node.path, AtBase(), what, causes)
    else:
        use = UseParallelLayer(fitted)
        to.files.making(node).changes.at_site(node, use, causes)


def place_replacement(to: Placement, node: Node, layer: Layer | None) -> None:
    """Places a replacement at a module's construction site, sharded if requested."""
    new = to.states[node.path].replacement
    assert new is not None
    causes = merged_causes([new.cause], to.causes(node))
    fitted = _fitted(to, node, layer) if layer and base_of(node.cls) is node.cls else None
    what = ReplaceModule(new.target, new.arguments, new.weights, fitted)
    to.files.making(node).changes.at_site(node, what, causes)
    if new.weights:
        keep_checkpoints(to.files, node, MAPPED, (new.cause,))


def _fitted(to: Placement, node: Node, layer: Layer) -> Layer:
    """The layer with its unit of splitting, replication and packed blocks from the analysis."""
    key = layer_key(node)
    if (name := to.followed.replicated.get(key)) and node.owner is not None:
        shared = Unit(f"self.{name}", int(getattr(node.owner.live, name)))
        # The expression is for all instances, whose sizes may differ.
        layer = replicated(layer, replace(_unit(to, node, shared), size=0)) or layer
    elif (unit := to.followed.units.get(key)) and layer.name in IN_UNITS:
        layer = replace(layer, unit=_unit(to, node, _named(to, node, layer, unit)))
    if "parts" not in dict(layer.keywords):
        return layer
    state = to.states[node.path]
    shard = next((s for s in state.shards if s.as_sizes), state.shards[0])
    site, size = None, None
    if base_of(node.cls) is node.cls:
        site = find_site(to.files.sources, node)
        made: ast.expr = site.call
        if state.replacement is not None and state.replacement.arguments is not None:
            made = ast.parse(f"_({state.replacement.arguments})", mode="eval").body
        size = size_of(layer, made) if isinstance(made, ast.Call) else None
    parts = place_blocks(to, node, shard, site, size)
    return replace(layer, keywords=(*dict(layer.keywords, parts=parts).items(),))


def _named(to: Placement, node: Node, layer: Layer, unit: Unit) -> Unit:
    """Replaces a number as unit by a factor of the layer's size expression with this value, if any.

    Models of other sizes, such as a small one, then have their own unit.
    """
    site = known_site(to.files.sources, node) if unit.text.isdecimal() else None
    if site is None or base_of(node.cls) is not node.cls or not isinstance(site.call, ast.Call):
        return unit
    left = [size for size in [size_of(layer, site.call)] if size is not None]
    named = set()
    while left:
        match left.pop():
            case ast.BinOp(a, ast.Mult(), b):
                left += [a, b]
            case factor if names_in(factor) and size_at(factor, site, node) == unit.size:
                named.add(ast.unparse(factor))
    return Unit(named.pop(), unit.size) if len(named) == 1 else unit


def _unit(to: Placement, node: Node, unit: Unit) -> Unit:
    """The unit of a layer in names that exist at its construction site.

    For a layer constructed in its owner's arguments, these are the other arguments of that call.
    """
    sources, owner = to.files.sources, node.owner
    text = ast.parse(unit.text, mode="eval").body
    if owner is None or base_of(node.cls) is not node.cls or not names_in(text):
        return unit
    site = find_site(sources, node)
    methods = {m for f, name in sources.classes(owner.cls) for m in f.methods(name)}
    if not site.is_given or site.function in methods:
        return unit
    call = find_site(sources, owner) if owner.parent is not None else None
    turned = [[loop.node for loop in made.loops] for made in (call, site) if made is not None]
    if call is not None and turned[0] == turned[1] and within(call.value, site.value):
        told = _in_arguments(text, sources, owner, call)
        if told is not None and size_at(told, site, node) == unit.size:
            return Unit(ast.unparse(told), unit.size)
    raise unknown_unit(unit, site, to.causes(node))


def _in_arguments(expr: ast.expr, sources: Sources, owner: Node, site: Site) -> ast.expr | None:
    """An expression of a class, in terms of the arguments of the call that constructs an instance.

    None if it depends on more than the unchanged constructor parameters, or if an argument may not
    be evaluated twice.
    """
    found, call = sources.constructor(owner.cls), site.call
    if found is None or not isinstance(call, ast.Call) or site.partial is not None:
        return None
    if given_partial(site, owner) is not None:  # which gives more than stands there
        return None
    file, constructor = found
    late = Late(file, constructor, constructor.body[-1])
    meaning = late.meaning(expr)
    names = {*names_in(meaning)}
    if not names <= {*parameters(constructor)} or names & late.bound.keys():
        return None
    return with_arguments(meaning, constructor, call)
