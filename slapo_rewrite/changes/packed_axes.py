"""Writes the sizes of blocks packed along an axis, at the construction site of the tensor.

A schedule gives the sizes of one configuration, but the output runs with others as well. So it has
expressions: the summands of the axis's own size, such as `(n_head + 2 * n_kv) * head_dim`, or the
sizes by which `forward` takes the result apart. If neither is known to be right, the output has the
numbers, and raises when it is built with another size.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.class_hierarchy import ClassHierarchy
from slapo_rewrite.changes.late import Late, names_read
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.state import Shard
from slapo_rewrite.code.dataflow import uses_of
from slapo_rewrite.code.text import Place
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.join import size_at
from slapo_rewrite.model.layers import Written
from slapo_rewrite.model.tree import Node
from slapo_rewrite.runtime.packed_axes import Packed, PackedSizes
from slapo_rewrite.sharding.packed_parts import described, reduced

# A sum of products of names: the coefficient of each product.
_Sum = Counter[tuple[str, ...]]
_MAKES_TENSORS = {f"torch.{name}" for name in ("empty", "zeros", "ones", "rand", "randn")}
_SIZES = ("split_size_or_sections", "split_size", "split_sizes")


@dataclass(frozen=True)
class _Block:
    """The size of a block as a product, in names that exist at the construction site."""

    factors: tuple[ast.expr, ...]  # the factors
    meaning: _Sum  # the product with its names replaced by their definitions, multiplied out


class _BlockWriter:
    """Writes the sizes of the blocks of one tensor."""

    def __init__(self, classes: ClassHierarchy, node: Node, site: Site) -> None:
        self.classes, self.node, self.site = classes, node, site
        self.owner = node if site.kind in ("parameter", "buffer") else node.owner or node
        self.late = Late(site.file, site.function, site.statement)
        self.count = 1
        # Local names of methods that take blocks apart, and attributes set outside the constructor.
        self.own: set[str] = set()

    def parts(
        self, shard: Shard, full: int, size: ast.expr | None, places: Iterable[tuple[Place, int]]
    ) -> Packed | PackedSizes | None:
        """The value of the argument `parts`; None for one block.

        `full` is the size of the axis, and `size` its expression at the construction site. `places`
        are the calls and subscripts that take the blocks apart, each with the index of the slice in
        the subscript.
        """
        count = self.count = len(shard.parts)
        pieces, ends = self._taken_apart(places)
        if count == 1:
            return None
        if _is_number(shard) and _are_alike(pieces, ends, count):
            return Packed(count)
        cuts = [self._told(sizes) for sizes in pieces]
        size = size if size is not None and self._value(size) == full else None
        if ends:
            cuts.append(self._between(ends, size, full))
        found = self._found(shard.parts, size, [cut for cut in cuts if cut])
        if found is None or None in cuts:
            return PackedSizes(_sizes(shard, full))
        if all(block.meaning == found[0].meaning for block in found):
            return Packed(count)
        sizes: Any = Written(f"({', '.join(map(ast.unparse, self._products(found)))})")
        return Packed(sizes)

    def _found(
        self, ratio: tuple[int, ...], size: ast.expr | None, cuts: Sequence[Sequence[_Block]]
    ) -> Sequence[_Block] | None:
        """The blocks with sizes in this ratio; None if nothing is known to be right."""
        known = [cut for cut in cuts if len(cut) == len(ratio)]
        if size is not None:
            # Names are replaced by their definitions only if there are too few summands otherwise.
            ways = [self._summands(size, names) for names in (False, True)]
            fitting = next((way for way in ways if len(way) == len(ratio)), [])
            summands = self._blocks(fitting) or []
            values = self._values(summands, ratio)
            # Without a cut, blocks of equal size might be in another order.
            if values and (known or _in_one_order(summands, values)):
                known.insert(0, summands)
        for blocks in known:
            if self._values(blocks, ratio) and all(_agree(blocks, cut) for cut in cuts):
                return blocks
        return None

    def _values(self, blocks: Sequence[_Block] | None, ratio: tuple[int, ...]) -> list[int] | None:
        """The sizes in this model, if they have the requested ratio."""
        found = [self._value(_product(block.factors)) for block in blocks or ()]
        values = [value for value in found if value]
        return values if values and len(values) == len(found) and reduced(values) == ratio else None

    def _value(self, expr: ast.expr) -> int | None:
        return size_at(_placed(expr, self.site.value), self.site, self.node)

    # Where the tensor is made ---------------------------------------------------------------

    def _summands(self, expr: ast.expr, names: bool) -> list[tuple[ast.expr, ...]]:
        """The products that sum to an expression; `names` are replaced by definitions if asked."""
        match expr:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._summands(left, names) + self._summands(right, names)
            case (
                ast.BinOp(left=ast.Constant(value=int(times)) as number, op=ast.Mult(), right=one)
                | ast.BinOp(left=one, op=ast.Mult(), right=ast.Constant(value=int(times)) as number)
            ):
                inside = self._summands(one, names)
                if 0 < len(inside) * times <= self.count:
                    return inside * times
                return [(*factors, number) for factors in inside]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                pairs = itertools.product(self._summands(left, names), self._summands(right, names))
                return [first + second for first, second in pairs]
            case ast.Name() | ast.Attribute() if names:
                meant = self.late.definition(expr)
                inside = self._summands(meant, names) if meant is not None else []
                if len(inside) > 1:
                    return inside
        return [(expr,)]

    def _blocks(self, products: Iterable[tuple[ast.expr, ...]]) -> list[_Block] | None:
        """The products in names that exist at the site; None if one cannot be written so."""
        found = []
        for product in products:
            factors = [self.late.expression(factor) for factor in product]
            if not all(factor is not None and self._is_stable(factor) for factor in factors):
                return None
            meaning = _sum_of(self.late.meaning(_product(product)))
            found.append(_Block(tuple(factor for factor in factors if factor), meaning))
        return found

    def _is_stable(self, expr: ast.expr) -> bool:
        """Whether all attributes of `self` in an expression are set by the constructor itself.

        What a base's constructor sets, or a layer has, may be this rank's share already.
        """
        read = [name for name in names_read(expr) if name.startswith("self.")]
        bare = uses_of(expr, "self")
        return len(bare) == len(read) and all(
            name in self.late.bound and name.removeprefix("self.") not in self.owner.children
            for name in read
        )

    def _products(self, blocks: Sequence[_Block]) -> list[ast.expr]:
        """The sizes without their common factors."""
        left = [list(block.factors) for block in blocks]
        for factor in blocks[0].factors:
            text = ast.unparse(factor)
            places = [[ast.unparse(f) for f in factors] for factors in left]
            if all(text in names for names in places):
                for factors, names in zip(left, places, strict=True):
                    del factors[names.index(text)]
        return [_product(factors) for factors in left]

    # Where it is taken apart ----------------------------------------------------------------

    def _taken_apart(
        self, places: Iterable[tuple[Place, int]]
    ) -> tuple[list[list[ast.expr]], list[ast.expr]]:
        """The lists of sizes that take the blocks apart, and the bounds of slices.

        The methods' names are replaced by their definitions. An unreadable list is an empty one.
        """
        pieces: list[list[ast.expr]] = []
        ends: list[ast.expr] = []
        for place, number in places:
            nodes = list(self.classes.nodes_at(self.owner.cls.__name__, place.at))
            for method, node in nodes:
                statement = self.site.file.statement_of(node)
                local = Late(self.site.file, method, statement)
                self.own |= {*local.arguments(), *local.bound}
                bounds = _bounds(node, number) if isinstance(node, ast.Subscript) else []
                sizes = self._listed(node, local) if isinstance(node, ast.Call) else []
                ends += [local.meaning(bound) for bound in bounds]
                if not bounds:
                    pieces.append([local.meaning(each) for each in sizes])
            if not nodes:
                pieces.append([])
        for method in self.classes.methods(self.owner.cls.__name__) if pieces or ends else ():
            if method is not self.site.function:
                bound = Late(self.site.file, method, method.body[0]).bound
                self.own |= {name for name in bound if name.startswith("self.")}
        return pieces, ends

    def _listed(self, call: ast.Call, local: Late) -> list[ast.expr]:
        """The list of sizes that a call of `split` gets."""
        of_torch = (self.site.file.qualified(call.func) or "").startswith("torch.")
        named = [k.value for k in call.keywords if k.arg in _SIZES]
        for sizes in [*call.args[1 if of_torch else 0 :], *named][:1]:
            return _elements(sizes, local) or _elements(sizes, self.late) or []
        return []

    def _told(self, sizes: Sequence[ast.expr]) -> list[_Block] | None:
        """Blocks from expressions of a method; None if the constructor cannot evaluate them."""
        if not all(self.own.isdisjoint(names_read(each)) for each in sizes):
            return None
        return self._blocks(map(_factors, sizes)) or None

    def _between(
        self, ends: Sequence[ast.expr], size: ast.expr | None, full: int
    ) -> list[_Block] | None:
        """The blocks between these bounds of an axis; None if they are not known."""
        found = self._told(ends)
        if size is None or found is None:
            return None
        by_value: dict[int | None, _Sum] = {0: Counter()}
        for block in found:
            value = self._value(_product(block.factors))
            if by_value.setdefault(value, block.meaning) != block.meaning:
                return None
        by_value[full] = _sum_of(self.late.meaning(size))
        values = [value for value in by_value if value is not None and 0 <= value <= full]
        if len(values) < len(by_value):
            return None
        pairs = itertools.pairwise(by_value[value] for value in sorted(values))
        return self._blocks(_factors(_written(_plus(end, start, -1))) for start, end in pairs)


def place_blocks(
    to: Placement, node: Node, shard: Shard, site: Site | None, size: ast.expr | None
) -> Packed | PackedSizes | None:
    """The `parts` of a tensor at its construction site or in its own class; None for one block.

    The site is None if a class of its own creates the tensor; `size` is the site's expression for
    the size of the axis.
    """
    full = getattr(node.live, shard.name).shape[shard.axis]
    cuts = [(place, number) for path, place, number in to.followed.cuts if path == node.path]
    if site is None:
        found, is_told = _fixed(shard, full), not cuts
    else:
        writer = _BlockWriter(to.files.of_file(site.file).classes, node, site)
        found = writer.parts(shard, full, size, sorted(cuts, key=lambda cut: cut[0].line))
        is_told = isinstance(found, Packed)
    if found is not None and to.followed.is_of_small and not is_told:
        blocks = described(_sizes(shard, full))
        raise errors.UnfollowableSize(
            f"`{node.path}` fits {blocks} in the small model that verification runs, and the code "
            "that splits it does not show that the model has the same blocks",
            at=next((to.files.span(place) for place, _ in cuts), None),
            cause=shard.cause,
            hint="build a small model in `verify_model` with the same ratios of sizes, and give "
            "`parts` the sizes of the blocks",
        )
    return found


def _fixed(shard: Shard, full: int) -> Packed | PackedSizes | None:
    """The `parts` without expressions: a number of blocks, or their sizes."""
    if len(shard.parts) == 1:
        return None
    return Packed(len(shard.parts)) if _is_number(shard) else PackedSizes(_sizes(shard, full))


def _is_number(shard: Shard) -> bool:
    return not shard.as_sizes and len(set(shard.parts)) == 1


def _sizes(shard: Shard, full: int) -> tuple[int, ...]:
    return tuple(full * part // sum(shard.parts) for part in shard.parts)


def length_of(site: Site, axis: int) -> ast.expr | None:
    """The expression of a tensor's size along an axis, if `torch.empty` or the like creates it."""
    for call in ast.walk(site.call):
        if not isinstance(call, ast.Call):
            continue
        if site.file.qualified(call.func) in _MAKES_TENSORS:
            shape = _elements(call.args[0], None) if len(call.args) == 1 else call.args
            known = shape and not any(isinstance(size, ast.Starred) for size in shape)
            return shape[axis] if shape and known and axis < len(shape) else None
    return None


def _elements(expr: ast.expr, names: Late | None) -> list[ast.expr] | None:
    """The elements of a list display, or of one that a name is bound to."""
    match expr:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return None if any(isinstance(e, ast.Starred) for e in elements) else elements
        case ast.BinOp(left=listed, op=ast.Mult(), right=ast.Constant(value=int(times))):
            return (_elements(listed, names) or []) * times or None
        case ast.Name() | ast.Attribute() if names is not None:
            meant = names.definition(expr)
            return _elements(meant, names) if meant is not None else None
    return None


def _bounds(node: ast.Subscript, number: int) -> list[ast.expr]:
    """The bounds of the slice at an index of a subscript; empty if it is not a slice."""
    keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    key = keys[number] if number < len(keys) else None
    ends = [key.lower, key.upper] if isinstance(key, ast.Slice) else []
    return [end for end in ends if end is not None]


def _are_alike(pieces: list[list[ast.expr]], ends: list[ast.expr], count: int) -> bool:
    """Whether an axis is taken apart in `count` pieces of equal size."""
    if not all(len(p) == count and all(_sum_of(e) == _sum_of(p[0]) for e in p) for p in pieces):
        return False
    products = [_sum_of(end) for end in ends]
    products = [product for product in products if product]
    times = {next(iter(product.values())) for product in products}
    once = min(times, default=1)
    return (
        len({frozenset(product) for product in products}) <= 1
        and all(len(product) == 1 for product in products)
        and all(n % once == 0 and 0 < n // once <= count for n in times)
    )


def _in_one_order(blocks: Sequence[_Block], values: Sequence[int]) -> bool:
    """Whether blocks of one size have one meaning, so that none could change places."""
    pairs = itertools.combinations(zip(blocks, values, strict=True), 2)
    return all(a.meaning == b.meaning for (a, one), (b, other) in pairs if one == other)


def _agree(blocks: Sequence[_Block], cut: Sequence[_Block]) -> bool:
    """Whether blocks begin and end wherever an axis is cut.

    The whole is the same for both wherever the original runs, so that of as many blocks one may be
    written in other words.
    """
    if len(blocks) == len(cut):
        other = [a for a, b in zip(blocks, cut, strict=True) if a.meaning != b.meaning]
        return len(other) <= 1
    sums = ([b.meaning for b in each] for each in (blocks, cut))
    ends, cuts = ([*itertools.accumulate(each, _plus)][:-1] for each in sums)
    return all(end in ends for end in cuts)


def _factors(expr: ast.expr) -> tuple[ast.expr, ...]:
    match expr:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _factors(left) + _factors(right)
    return (expr,)


def _product(factors: Sequence[ast.expr]) -> ast.expr:
    found: ast.expr = factors[0] if factors else ast.Constant(1)
    for factor in factors[1:]:
        found = ast.BinOp(found, ast.Mult(), factor)
    return found


def _placed(expr: ast.expr, where: ast.expr) -> ast.expr:
    """A copy of an expression at another one's position."""
    moved = copy.deepcopy(expr)
    for node in ast.walk(moved):
        ast.copy_location(node, where)
    return moved


def _sum_of(expr: ast.expr) -> _Sum:
    """An expression as a sum of products."""
    match expr:
        case ast.Constant(value=int(number)):
            return Counter({(): number} if number else {})
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return _plus(_sum_of(left), _sum_of(right), 1 if isinstance(op, ast.Add) else -1)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            found: _Sum = Counter()
            for (a, m), (b, n) in itertools.product(_sum_of(left).items(), _sum_of(right).items()):
                found[tuple(sorted(a + b))] += m * n
            return _plus(found, Counter())
    return Counter({(ast.unparse(expr),): 1})


def _plus(one: _Sum, other: _Sum, times: int = 1) -> _Sum:
    """One sum plus `times` another."""
    found = Counter(one)
    for names, number in other.items():
        found[names] += times * number
    return Counter({names: number for names, number in found.items() if number})


def _written(meaning: _Sum) -> ast.expr:
    """A sum as an expression, positive terms first."""
    found: ast.expr | None = None
    for names, times in sorted(meaning.items(), key=lambda item: item[1] < 0):
        factors: list[ast.expr] = [ast.parse(name, mode="eval").body for name in names]
        if abs(times) != 1 or not factors:
            factors.insert(0, ast.Constant(abs(times)))
        product = _product(factors)
        sign = ast.Add() if times > 0 else ast.Sub()
        found = product if found is None else ast.BinOp(found, sign, product)
    return found or ast.Constant(0)
