"""How the sizes of blocks that lie packed along an axis are written where the tensor is made.

A schedule gives the sizes of one configuration. The output is built for others as well, so it says
what they follow from: the summands of the axis's own size, `(n_head + 2 * n_kv) * head_dim` say, or
the sizes by which `forward` takes the result apart. Where neither is known to be right, the output
has the sizes, and is refused when it is built with another.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slapo_rewrite.edit.forward import nodes_at
from slapo_rewrite.edit.late import Late, names_read
from slapo_rewrite.edit.lineages import Lineages
from slapo_rewrite.edit.state import Shard
from slapo_rewrite.model.follow import Place
from slapo_rewrite.model.follow.packing import reduced
from slapo_rewrite.model.join import Sources, size_at
from slapo_rewrite.model.layers import Written
from slapo_rewrite.model.tree import Node
from slapo_rewrite.runtime.tensor_parallel import Blocks
from slapo_rewrite.source.sites import Site

# A sum of products of names: how often each is in it.
_Sum = Counter[tuple[str, ...]]
_MAKES_TENSORS = {f"torch.{name}" for name in ("empty", "zeros", "ones", "rand", "randn")}
_SIZES = ("split_size_or_sections", "split_size", "split_sizes")


@dataclass(frozen=True)
class _Block:
    """The size of a block as a product, in names that are known where the tensor is made.

    Attributes:
        factors: What is multiplied.
        meaning: What that comes to by what the names were bound to.
    """

    factors: tuple[ast.expr, ...]
    meaning: _Sum


class BlockWriter:
    """Writes the sizes of the blocks of one tensor.

    Args:
        sources: The source files.
        lineages: The classes of the file in which it is made.
        node: The layer, or the module whose own parameter it is.
        site: Where it is made.
    """

    def __init__(self, sources: Sources, lineages: Lineages, node: Node, site: Site) -> None:
        self.sources, self.lineages, self.node, self.site = sources, lineages, node, site
        self.owner = node if site.kind in ("parameter", "buffer") else node.owner or node
        self.late = Late(site.file, site.function, site.statement)

    def parts(
        self, shard: Shard, full: int, size: ast.expr | None, places: Iterable[Place]
    ) -> int | Written | Blocks:
        """What is given for `parts`: a number of equal blocks, or sizes, relative or whole.

        Args:
            shard: What was asked.
            full: The size of the axis.
            size: The expression for it where the tensor is made.
            places: The calls that take the blocks apart.
        """
        count = len(shard.parts)
        cuts = [self._cut(place) for place in places]
        equal = len(set(shard.parts)) == 1
        if count == 1 or (equal and not shard.as_sizes and not cuts):
            return count
        found = self._found(shard.parts, full, size, [c for c in cuts if c])
        if found is None or None in cuts:
            return Blocks(_sizes(shard, full))
        if all(block.meaning == found[0].meaning for block in found):
            return count
        return Written(f"({', '.join(map(ast.unparse, self._products(found)))})")

    def _found(
        self,
        ratio: tuple[int, ...],
        full: int,
        size: ast.expr | None,
        cuts: Sequence[Sequence[_Block]],
    ) -> Sequence[_Block] | None:
        """The blocks, as relative sizes; None where nothing is known to be right."""
        known = [cut for cut in cuts if len(cut) == len(ratio)]
        if size is not None and self._value(size) == full:
            summands = self._blocks(self._summands(size))
            values = self._values(summands, ratio)
            # Without a cut, what has one size here might stand in another order.
            if values and (known or _in_one_order(summands or (), values)):
                known.insert(0, summands or ())
        for blocks in known:
            if self._values(blocks, ratio) and all(_agree(blocks, cut) for cut in cuts):
                return blocks
        return None

    def _values(self, blocks: Sequence[_Block] | None, ratio: tuple[int, ...]) -> list[int] | None:
        """What the sizes are in this model, if they are in the ratio that is asked for."""
        found = [self._value(_product(block.factors)) for block in blocks or ()]
        values = [value for value in found if value]
        return values if values and len(values) == len(found) and reduced(values) == ratio else None

    def _value(self, expr: ast.expr) -> int | None:
        return size_at(self.sources, _placed(expr, self.site.value), self.site, self.node)

    # Where the tensor is made ---------------------------------------------------------------

    def _summands(self, expr: ast.expr) -> list[tuple[ast.expr, ...]]:
        """The products that an expression is the sum of, one by one."""
        match expr:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._summands(left) + self._summands(right)
            case ast.BinOp(left=ast.Constant(value=int(times)), op=ast.Mult(), right=one):
                return self._summands(one) * times
            case ast.BinOp(left=one, op=ast.Mult(), right=ast.Constant(value=int(times))):
                return self._summands(one) * times
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                pairs = itertools.product(self._summands(left), self._summands(right))
                return [first + second for first, second in pairs]
            case ast.Name() | ast.Attribute():
                meant = self.late.definition(expr)
                inside = self._summands(meant) if meant is not None else []
                if len(inside) > 1:
                    return inside
        return [(expr,)]

    def _blocks(self, products: Iterable[tuple[ast.expr, ...]]) -> list[_Block] | None:
        """The products in names that are known there; None where one cannot be written so."""
        found = []
        for product in products:
            factors = [self.late.expression(factor) for factor in product]
            if not all(factor is not None and self._is_stable(factor) for factor in factors):
                return None
            meaning = _sum_of(self.late.meaning(_product(product)))
            found.append(_Block(tuple(factor for factor in factors if factor), meaning))
        return found

    def _is_stable(self, expr: ast.expr) -> bool:
        """Whether what an expression reads of `self` is what the constructor says, and no layer's.

        What a base's constructor sets may be this rank's share by then.
        """
        read = [name for name in names_read(expr) if name.startswith("self.")]
        bare = [n for n in ast.walk(expr) if isinstance(n, ast.Name) and n.id == "self"]
        return len(bare) == len(read) and all(
            name in self.late.bound and name.removeprefix("self.") not in self.owner.children
            for name in read
        )

    def _products(self, blocks: Sequence[_Block]) -> list[ast.expr]:
        """The sizes without the factors that all of them have."""
        left = [list(block.factors) for block in blocks]
        for factor in blocks[0].factors:
            text = ast.unparse(factor)
            places = [[ast.unparse(f) for f in factors] for factors in left]
            if all(text in names for names in places):
                for factors, names in zip(left, places, strict=True):
                    del factors[names.index(text)]
        return [_product(factors) for factors in left]

    # Where it is taken apart ----------------------------------------------------------------

    def _cut(self, place: Place) -> list[_Block] | None:
        """The sizes that a call takes the blocks apart by; None where they cannot be told."""
        key = ("cut", place.line, place.column, place.end_line, place.end_column)
        for method, statement, call in nodes_at(self.lineages, self.owner.cls.__name__, key):
            if not isinstance(call, ast.Call):
                continue
            of_torch = (self.site.file.qualified(call.func) or "").startswith("torch.")
            named = [k.value for k in call.keywords if k.arg in _SIZES]
            sizes = [*call.args[1 if of_torch else 0 :][:1], *named]
            local = Late(self.site.file, method, statement)
            listed = _elements(sizes[0], local) if sizes else None
            if listed is None and sizes:
                listed = _elements(sizes[0], self.late)
            meant = [self._in_constructor(each, local) for each in listed or ()]
            blocks = self._blocks([_factors(each) for each in meant if each is not None])
            if blocks and len(blocks) == len(listed or ()):
                return blocks
        return None

    def _in_constructor(self, expr: ast.expr, local: Late) -> ast.expr | None:
        """An expression of a method without the method's own names."""
        meant = local.meaning(expr)
        own = {*local.arguments(), *local.bound}
        methods = self.lineages.methods(self.owner.cls.__name__)
        others = [m for m in methods if m is not self.site.function and m is not local.function]
        for method in others:
            own |= {n for n in Late(self.site.file, method, method.body[0]).bound if "." in n}
        return meant if own.isdisjoint(names_read(meant)) else None


def fixed(shard: Shard, full: int) -> int | Blocks:
    """What is given for `parts` where no names are known: a number of blocks, or their sizes."""
    equal = not shard.as_sizes and len(set(shard.parts)) == 1
    return len(shard.parts) if equal else Blocks(_sizes(shard, full))


def _sizes(shard: Shard, full: int) -> tuple[int, ...]:
    return tuple(full * part // sum(shard.parts) for part in shard.parts)


def length_of(site: Site, axis: int) -> ast.expr | None:
    """The size of a tensor along an axis, where it is made by a call that says so."""
    for call in ast.walk(site.value):
        if not isinstance(call, ast.Call):
            continue
        if site.file.qualified(call.func) in _MAKES_TENSORS:
            shape = _elements(call.args[0], None) if len(call.args) == 1 else call.args
            known = shape and not any(isinstance(size, ast.Starred) for size in shape)
            return shape[axis] if shape and known and axis < len(shape) else None
    return None


def _elements(expr: ast.expr, names: Late | None) -> list[ast.expr] | None:
    """The elements of a list that is written out, where it stands or where its name is bound."""
    match expr:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return None if any(isinstance(e, ast.Starred) for e in elements) else elements
        case ast.BinOp(left=listed, op=ast.Mult(), right=ast.Constant(value=int(times))):
            return (_elements(listed, names) or []) * times or None
        case ast.Name() | ast.Attribute() if names is not None:
            meant = names.definition(expr)
            return _elements(meant, names) if meant is not None else None
    return None


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
    ends, cuts = ([*itertools.accumulate(b.meaning for b in each)][:-1] for each in (blocks, cut))
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
    """A copy of an expression that stands where another one does."""
    moved = copy.deepcopy(expr)
    for node in ast.walk(moved):
        ast.copy_location(node, where)
    return moved


def _sum_of(expr: ast.expr) -> _Sum:
    """An expression multiplied out."""
    match expr:
        case ast.Constant(value=int(number)):
            return Counter({(): number} if number else {})
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            first, second = Counter(_sum_of(left)), _sum_of(right)
            first.update(second) if isinstance(op, ast.Add) else first.subtract(second)
            return Counter({names: times for names, times in first.items() if times})
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            found: _Sum = Counter()
            for (a, m), (b, n) in itertools.product(_sum_of(left).items(), _sum_of(right).items()):
                found[tuple(sorted(a + b))] += m * n
            return Counter({names: times for names, times in found.items() if times})
    return Counter({(ast.unparse(expr),): 1})
