"""Searches for the layers to split, and how: the best legal choice, once for all layers of a kind.

The search runs on the folded graph, in which the elements of a module list are one node (as in
TAP, arXiv 2302.00247), so its cost does not grow with depth. A component of producers and consumers
is split as Megatron-LM splits a block (arXiv 1909.08053): producers over their outputs, consumers
over their inputs. No layer can be both, so the search selects an independent set of components of
the largest total worth. The worth of a split is the time saved by sharing the work, less the time
of its collectives. Sharding propagation decides whether a split is legal.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from slapo_rewrite import errors
from slapo_rewrite.auto.flow import (
    Flow,
    components,
    is_column,
    is_row,
    is_table,
    pattern_of,
    together,
)
from slapo_rewrite.auto.oracle import Oracle
from slapo_rewrite.auto.shard_groups import (
    Cube,
    Found,
    Group,
    Shard,
    common_pattern,
    lines_of,
    rows_of,
    shape_of,
    shards_as_one,
    shards_of_experts,
    with_parts,
)
from slapo_rewrite.changes.change_set import stands_in_its_class
from slapo_rewrite.groups import grouped
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.join import find_site
from slapo_rewrite.model.layers import Split, layer_below, splits_of
from slapo_rewrite.model.tree import Node
from slapo_rewrite.simulate.hardware import hardware

# Assumptions: the number of ranks that share a layer, their GPUs, and tokens per micro-batch. The
# host's time to start operators is ignored: a split is wanted even for small models.
RANKS = 8
_GPU = hardware("h200")
ON = replace(_GPU, device=replace(_GPU.device, operator=0.0))
TOKENS = 8192
# Bytes per parameter that the optimizer reads and writes in a step: Adam in mixed precision.
TOUCHED = 32
# If a smaller share of the model is split, layers for which it does not pay are split too.
LEAST_SHARE = 0.5
# The most trials of legality; the search ends with what it has found by then.
MOST_ASKED = 60
# The most ways to split one component that are tried.
MOST_WAYS = 24
# The most components of which all combinations are considered.
MOST_TOGETHER = 14

# The producers, and the consumers that they reach.
Component = tuple[frozenset[str], frozenset[str]]


class Search:
    """Searches for the groups of one model.

    Args:
        oracle: Decides what is legal.
        flow: Which layers feed which others.
        has_loss: Whether the model computes the loss itself, so that its logits may stay sharded.
    """

    def __init__(self, oracle: Oracle, flow: Flow, has_loss: bool) -> None:
        self.oracle, self.flow, self.has_loss = oracle, flow, has_loss
        self.modules: dict[str, list[nn.Module]] = {}
        tree = oracle.project.tree
        self._first_of: dict[str, Node] = {}
        for path, node in tree.nodes.items():
            pattern = pattern_of(tree.root.live, path, flow.apart)
            self.modules.setdefault(pattern, []).append(node.live)
            self._first_of.setdefault(pattern, node)
        self._keep_alike()
        self.total = sum(p.numel() for p in oracle.project.tree.root.live.parameters())
        most = max((p.rows // max(1, len(p.paths)) for p in flow.layers.values()), default=1)
        self.scale = TOKENS / max(1, most)
        self._refusals: dict[str, tuple[int, str]] = {}
        # Whether a trial of the current component was refused because of other instances.
        self._is_uncounted = False
        self.stages = set[str]()  # lists of stages of other sizes, of which layers were refused
        self._way: dict[tuple[str, ...], int | None] = {}  # by shape: the number of the legal way
        known = [p for p in flow.layers if p in self.modules]
        self.step = sum(map(self._saved, known)) / (1 - 1 / RANKS)

    def _keep_alike(self) -> None:
        """Drops patterns of layers that cannot all be split, or that the full model lacks."""
        for kinds in (self.flow.layers, self.flow.tables):
            for pattern in list(kinds):
                modules = self.modules.get(pattern, ())
                if not modules or not all(is_table(m) or _has_column(m) for m in modules):
                    del kinds[pattern]
                    self.flow.sources.pop(pattern, None)
        for sources in (*self.flow.sources.values(), *self.flow.between.values()):
            sources.intersection_update(self.flow.layers)
        self.flow.ends.intersection_update(self.flow.layers)

    def run(self) -> Found:
        """Runs the whole search."""
        groups = self._with_experts(self._blocks())
        taken = {pattern for group in groups for pattern in group.patterns}
        as_one = self._as_one(taken)
        groups += as_one
        taken = {pattern for group in groups for pattern in group.patterns}
        groups += self._vocabulary(taken)
        taken = {pattern for group in groups for pattern in group.patterns}
        groups += self._alone(taken)
        groups = self._together(groups)
        groups = self._enough(groups, as_one)
        taken = {pattern for group in groups for pattern in group.patterns}
        whole = {
            p: self._refusals.get(p, (0, "splitting it would cost more than it saves"))[1]
            for p in (*self.flow.layers, *self.flow.tables)
            if p not in taken and p in self.modules and self._size([p]) > 0.001 * self.total
        }
        refused = (p for p in whole if p in self._refusals and p.count("*") > 1)
        several = (p for p in refused if len({_weight(m) for m in self.modules[p]}) > 1)
        self.stages = {p.partition(".*.")[0] for p in several}
        return Found(tuple(groups), whole)

    def _size(self, patterns: Iterable[str]) -> int:
        live = (m for pattern in patterns for m in self.modules.get(pattern, ()))
        held = {id(p): p.numel() for m in live for p in m.parameters(recurse=False)}
        return sum(held.values())

    def _legal(self, group: Group) -> bool:
        return self._refusal(group) is None

    def _refusal(self, group: Group) -> str | None:
        """Why a group is not legal; None if it is."""
        if self.oracle.asked >= MOST_ASKED:
            why = f"not tried, after {MOST_ASKED} others"
        elif (refused := self.oracle.refusal(lines_of([group]))) is None:
            return None
        else:
            why = refused.message
            self._is_uncounted |= isinstance(refused, errors.UnfollowableConstruction)
        self._refuse([group], why)
        return why

    def _refuse(self, groups: Sequence[Group], why: str) -> None:
        """Records why the last of these groups is not split; narrower groups' reasons win."""
        near = common_pattern(groups[-1].patterns).count(".") if len(groups) == 1 else 0
        for pattern in groups[-1].patterns:
            if near > self._refusals.get(pattern, (-1, ""))[0]:
                self._refusals[pattern] = near, why

    # -- components of producers and consumers

    def _blocks(self) -> list[Group]:
        """Groups for the best independent set of legal components."""
        wanted = self._components()
        worth = {pair: self._worth(*pair) for pair in wanted}
        legal: dict[Component, Group] = {}
        left = [pair for pair in wanted if worth[pair] > 0]
        while True:
            best = _independent(left, worth)
            unknown = [pair for pair in best if pair not in legal]
            if not unknown:
                return [legal[pair] for pair in best]
            for pair in unknown:
                group = self._first(*pair)
                if group is None:
                    left = self._without(pair, left)
                    worth |= {each: self._worth(*each) for each in left if each not in worth}
                else:
                    legal[pair] = group

    def _components(self) -> list[Component]:
        heads = self._heads()
        own = components(self.flow)
        found = [
            (producers, consumers)
            for producers, consumers in (*own, *self._through_blocks(own))
            if not producers & consumers
            and {*producers, *consumers} <= self.modules.keys()
            and not consumers & heads
        ]
        return together(found, self._function_of)

    def _through_blocks(self, found: Sequence[Component]) -> Iterator[Component]:
        """Components joined by a layer that has a matrix for each block of its input."""
        for (before, given), (after, taken) in itertools.permutations(found, 2):
            for layer in given & after:
                if makers := {p for p in before if self._has_blocks_of(layer, p)}:
                    yield frozenset(makers | after - {layer}), taken

    def _has_blocks_of(self, layer: str, producer: str) -> bool:
        """Whether a layer may multiply each block of a producer's features by its own matrix.

        That needs a class of its own below torch's: a layer of torch has a single matrix.
        """
        if not {layer, producer} <= self.modules.keys():
            return False
        (size, made), width = self._sizes(layer), self._sizes(producer)[1]
        has_own = layer_below(type(self.modules[layer][0])) is not None
        return has_own and width > size and width % size == 0 and made % (width // size) == 0

    def _between(self, producers: Collection[str], consumers: Collection[str]) -> list[str]:
        """The layers with a matrix per block through which producers reach consumers."""
        fed = set[str]().union(*(self.flow.sources[c] for c in consumers)).difference(producers)
        return [
            layer
            for layer in self.flow.layers
            if layer in fed
            and any(self._has_blocks_of(layer, p) for p in self.flow.sources[layer] & {*producers})
        ]

    def _function_of(self, pattern: str) -> ast.expr | None:
        """The call that builds a pattern's layers if it is in a function, so shared by all."""
        site = self._site(pattern)
        return None if site is None or stands_in_its_class(site) else site.value

    def _maker_of(self, pattern: str) -> ast.expr | None:
        site = self._site(pattern)
        return None if site is None else site.value

    def _site(self, pattern: str) -> Site | None:
        try:
            return find_site(self.oracle.project.sources, self._first_of[pattern])
        except errors.UnfollowableConstruction:
            return None

    def _without(self, refused: Component, left: list[Component]) -> list[Component]:
        """The remaining components without a refused one.

        If it was refused because other instances of a class share the code, one component of all
        of them takes their place, even if some alone do not pay: the first stages of a ResNet.
        """
        rest = [pair for pair in left if pair != refused]
        made = self._made_by(refused)
        if not self._is_uncounted or any(None in each for each in made):
            return rest
        others = (pair for pair in self._components() if not pair[0] <= refused[0])
        alike = [pair for pair in others if self._made_by(pair) == made]
        if not alike:
            return rest
        producers, consumers = (
            frozenset(pattern for pair in (refused, *alike) for pattern in pair[number])
            for number in (0, 1)
        )
        return [*(pair for pair in rest if pair not in alike), (producers, consumers)]

    def _made_by(self, pair: Component) -> list[set[ast.expr | None]]:
        """The calls that build a component's producers, and those that build its consumers."""
        return [{self._maker_of(pattern) for pattern in patterns} for patterns in pair]

    def _enough(self, groups: list[Group], unasked: Sequence[Group]) -> list[Group]:
        """Adds groups that do not pay, the largest first, if too little of the model is split.

        If nothing pays, as in a small model that stands for a larger one, everything is split; if
        only tables of words pay, all layers in lists are.

        Args:
            groups: The groups so far.
            unasked: Those groups for which it was not computed whether they pay.
        """
        least = LEAST_SHARE if any(group not in unasked for group in groups) else 1.0
        has_tables_alone = bool(groups) and all(group.rows for group in groups)
        known = {pattern for group in groups for pattern in group.patterns}
        left = [pair for pair in self._components() if self._worth(*pair) <= 0]
        if has_tables_alone:
            left = [pair for pair in left if any("*" in p for p in pair[0] | pair[1])]
        left.sort(key=lambda pair: self._size(pair[0] | pair[1]))
        while left and (has_tables_alone or sum(g.parameters for g in groups) < least * self.total):
            # Components whose shape was refused elsewhere in the model come last.
            hopeful = [pair for pair in left if self._way.get(shape_of(*pair), 0) is not None]
            producers, consumers = pair = (hopeful or left)[-1]
            left.remove(pair)
            if known & (producers | consumers):
                continue
            group = self._first(*pair)
            if group is None:
                left = self._without(pair, [*left, pair])
            elif self._fits([*groups, group]):
                groups = [*groups, replace(group, pays=False)]
                known.update(group.patterns)
        if least * self.total > sum(g.parameters for g in groups):
            for group in self._vocabulary(known, paying=False):
                if self._fits([*groups, group]):
                    groups = [*groups, replace(group, pays=False)]
        return groups

    def _first(self, producers: frozenset[str], consumers: frozenset[str]) -> Group | None:
        """The first legal way to split a component, starting with the one known for its shape."""
        ways = [*self._ways_of(producers, consumers)]
        self._is_uncounted = False
        shape = shape_of(producers, consumers)
        likely = self._way.get(shape)
        order = sorted(range(len(ways)), key=lambda number: number != likely)
        blamed = set[str]()  # producers that were named when all of them together were refused
        left = MOST_WAYS
        for number in order:
            one, group = ways[number]
            if not left:
                break
            if one is not None and blamed and one not in blamed:
                continue
            why = self._refusal(group)
            if why is None:
                self._way[shape] = number
                return replace(group, parameters=self._size(group.patterns))
            left -= 1
            if one is None:
                blamed |= producers & self._named_in(why) or producers
        self._way.setdefault(shape, None)
        return None

    def _named_in(self, why: str) -> set[str]:
        """The patterns of the modules that a refusal names."""
        tree = self.oracle.project.tree
        paths = tree.nodes.keys() & re.findall(r"`([\w.]+)`", why)
        return {pattern_of(tree.root.live, path, self.flow.apart) for path in paths}

    def _heads(self) -> set[str]:
        """The layers with one output for each row of an embedding."""
        words = {_weight(self.modules[p][0])[0] for p in self.flow.tables if p in self.modules}
        known = (p for p in self.flow.ends if p in self.modules and "*" not in p)
        return {p for p in known if self._sizes(p)[1] in words}

    def _worth(self, producers: Collection[str], consumers: Collection[str]) -> float:
        """Seconds that splitting a component saves, collectives deducted."""
        inputs: dict[tuple[frozenset[str], int], float] = {}
        patterns = (*producers, *self._between(producers, consumers), *consumers)
        saved = math.fsum(map(self._saved, patterns)) + self._freed(patterns)
        for pattern in producers:
            key = frozenset(self.flow.sources.get(pattern, ())), self.flow.layers[pattern].width
            inputs[key] = self._reduced(pattern, self._sizes(pattern)[0])
        outputs = (self._reduced(pattern, self._sizes(pattern)[1]) for pattern in consumers)
        return saved - math.fsum((*inputs.values(), *outputs))

    def _reduced(self, pattern: str, width: int) -> float:
        """Seconds of the all-reduces of rows of a width, one for each module of a pattern."""
        count = len(self.modules[pattern])
        return count * ON.inside.all_reduce(2 * self._rows(pattern) / count * width, RANKS)

    def _rows(self, pattern: str) -> float:
        """Input rows of all modules of a pattern in a step."""
        passage = self.flow.layers.get(pattern) or self.flow.tables[pattern]
        each = passage.rows / max(1, len(passage.paths))
        return each * self.scale * len(self.modules[pattern])

    def _sizes(self, pattern: str) -> tuple[int, int]:
        """The numbers of a layer's input and output features."""
        module = self.modules[pattern][0]
        weight = _weight(module)
        known = (splits_of(module) or {}).items()
        column = next(a for (n, a), s in known if n == "weight" and is_column(s))
        return weight[1 - column], weight[column]

    def _saved(self, pattern: str) -> float:
        weights = self._size([pattern])
        each = weights / len(self.modules[pattern])
        flops = 6 * each * self._rows(pattern) if pattern in self.flow.layers else 0.0
        seconds = flops / ON.device.flops + weights * TOUCHED / ON.device.bandwidth
        return seconds * (1 - 1 / RANKS)

    def _freed(self, patterns: Iterable[str]) -> float:
        """The worth of the saved memory: its share of the parameters, times a step's time."""
        return self.step * self._size(patterns) / max(1, self.total) * (1 - 1 / RANKS)

    def _ways_of(
        self, producers: frozenset[str], consumers: frozenset[str]
    ) -> Iterator[tuple[str | None, Group]]:
        """Ways to split a component, legal or not, those with all producers first.

        Each comes with the producer that it leaves out, or None.
        """
        between = [
            pattern
            for pattern, sources in self.flow.between.items()
            if sources and sources <= producers and pattern in self.modules
        ]
        yield from ((None, way) for way in self._ways(producers, consumers, between))
        if len(producers) > 1:  # a single producer may be the cause of a refusal
            for one in sorted(producers, key=lambda p: (self._size([p]), p)):
                yield from ((one, way) for way in self._ways(producers - {one}, consumers, between))

    def _ways(
        self, producers: frozenset[str], consumers: frozenset[str], between: Sequence[str]
    ) -> Iterator[Group]:
        order = list(self.flow.layers).index
        columns = [self._shards(p, is_column) for p in sorted(producers, key=order)]
        rows = [self._shards(p, is_row) for p in sorted(consumers, key=order)]
        if not all((*columns, *rows)):
            return
        blocks = self._between(producers, consumers)
        ends = tuple(shard for p in blocks for shard in self._shards(p, is_column))
        ends += tuple(shard for row in rows for shard in row)
        carried = tuple(shard for p in between for shard in self._carried(p))
        # Layers that one line builds are split together, but may be in several modules.
        sources = {c: self.flow.sources[c] for c in sorted(consumers)}
        fed = [
            (by.union(*(self.flow.sources[p] for p in by & {*blocks})) & producers, c)
            for c, by in sources.items()
        ]
        inside = tuple(f"{common_pattern(by)}." for by, _ in fed if by)
        tables = [p for p in self.flow.tables if p.startswith(inside) and p in self.modules]
        joined = tuple(shard for p in tables for shard in self._shards(p, is_column))
        around = grouped((common_pattern((*by, c)), p) for by, c in fed for p in by)
        first, last, beside, second = (
            tuple(s for path, by in around.items() for s in self._for_each_head(homes(path), by, n))
            for homes, n in (
                *((self._inside, 0), (self._inside, -1)),
                *((self._beside_it, -1), (self._inside, 1)),
            )
        )
        more = (*carried, *joined)
        ways = [(), carried, more]
        several = (*first, *last), beside, (*first, *beside), second
        for own in dict.fromkeys([first, last, *several]):
            ways += [own, (*more, *own)]
        for among in dict.fromkeys(ways):
            for packed in self._packings(columns):
                yield Group((*packed, *among, *ends))

    def _inside(self, path: str) -> list[str]:
        """A module, and those in it that get no layer's results."""
        inside = (p for p in self.modules if path and p.startswith(f"{path}."))
        return [path, *filter(self._is_given_none, inside)]

    def _beside_it(self, path: str) -> list[str]:
        """The siblings of a module that get no layer's results."""
        parent = path.rpartition(".")[0]
        beside = (p for p in self.modules if p != path and p.rpartition(".")[0] == parent)
        return [*filter(self._is_given_none, beside)] if parent else []

    def _is_given_none(self, pattern: str) -> bool:
        flow = self.flow
        if pattern in flow.read - flow.layers.keys() - flow.tables.keys():
            return True  # its weight is used without calling it
        is_known = pattern in flow.tables or flow.between.get(pattern)
        return not is_known and splits_of(self.modules[pattern][0]) is None

    def _for_each_head(
        self, homes: Iterable[str], producers: Iterable[str], axis: int
    ) -> tuple[Shard, ...]:
        """Shards for nearby parameters with an entry per head or feature: sinks, scales, tables.

        Args:
            homes: The modules that may hold such parameters.
            producers: The producers of the component.
            axis: The axis of the heads: 0, 1 (if there are more axes), or -1.
        """
        widths = {self._sizes(pattern)[1] for pattern in producers}
        widths |= {size for p in producers for parts in self._parts(p) for size in parts}
        found: dict[tuple[str, int], list[str]] = {}
        for at in homes:
            for name, own in self._first_of[at].live.named_parameters(recurse=False):
                if own.dim() < axis + 2 and axis > 0:
                    continue
                size, rows = own.shape[axis] if own.dim() else 1, own.shape[:1].numel()
                is_alone = own.numel() == size
                if size < 2 or (axis < 0 and (is_alone or size == rows)):
                    continue  # left to the first axis
                may_share = is_alone or axis != 0
                if any(w % size == 0 if may_share else w == size for w in widths):
                    found.setdefault((at, axis % own.dim()), []).append(name)
        return tuple(Shard(at, tuple(names), axis) for (at, axis), names in found.items())

    def _packings(self, columns: list[tuple[Shard, ...]]) -> Iterator[tuple[Shard, ...]]:
        """The producers' shards, each with the packings that were seen, unpacked, or guessed."""
        # With several producers, each is taken as unpacked unless a packing was seen.
        guesses = (3, 2) if len(columns) == 1 else ()
        options = []
        for column in columns:
            pattern = column[0].pattern
            # Seen packings come first; their refusals are also the most useful ones.
            seen = dict.fromkeys(self._parts(pattern))
            guessed = (parts for parts in self._equal(pattern, guesses) if parts not in seen)
            ways = (*seen, (), *guessed)
            options.append([with_parts(column, parts) for parts in ways])
        for way in itertools.islice(itertools.product(*options), 8):
            yield tuple(shard for column in way for shard in column)

    def _parts(self, pattern: str) -> Iterator[tuple[int, ...]]:
        """The packings of a layer's result that were seen in the step."""
        pieces = self.flow.layers[pattern].pieces
        size = self._sizes(pattern)[1]
        yield from self._equal(pattern, [len(s) for s in pieces if len(set(s)) == 1])
        # Unequal parts: queries beside fewer keys and values.
        for sizes in pieces:
            if len(set(sizes)) > 1 and size % (sum(sizes) // math.gcd(*sizes)) == 0:
                yield tuple(piece * size // sum(sizes) for piece in sizes)

    def _equal(self, pattern: str, counts: Iterable[int]) -> Iterator[tuple[int, ...]]:
        size = self._sizes(pattern)[1]
        for count in dict.fromkeys(counts):
            if 1 < count < 8 and size % count == 0:
                yield (size // count,) * count

    def _shards(self, pattern: str, wanted: Callable[[Split], bool]) -> tuple[Shard, ...]:
        """Shards of a layer for a wanted kind of split; empty if it has none.

        What a class adds to a layer of torch in the shape of a parameter goes with it: a mask, say.
        """
        module = self.modules[pattern][0]
        splits = (splits_of(module) or {}).items()
        known = {name for (name, _), _ in splits}
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        by_axis = grouped(
            (axis, each)
            for (name, axis), split in splits
            if wanted(split) and name in held
            for each, value in held.items()
            if each == name or (each not in known and value.shape == held[name].shape)
        )
        return tuple(Shard(pattern, tuple(names), axis) for axis, names in by_axis.items())

    def _carried(self, pattern: str) -> tuple[Shard, ...]:
        """Shards of a module between producers and consumers, which gets sharded values.

        Of a class without known splits each parameter is split along its first axis of several
        entries: that of a response norm may have features last, after axes of one entry.
        """
        module = self.modules[pattern][0]
        known = (splits_of(module) or {}).items()
        splits = [n for (n, _), s in known if s.takes_part and not is_row(s)]
        if splits:
            by_axis = {0: [n for n in splits if getattr(module, n, None) is not None]}
        else:
            by_axis = grouped(
                (axis, name)
                for name, own in module.named_parameters(recurse=False)
                for axis in [n for n, size in enumerate(own.shape) if size > 1][:1]
            )
        return tuple(Shard(pattern, tuple(names), axis) for axis, names in by_axis.items() if names)

    # -- what stands alone

    def _with_experts(self, groups: list[Group]) -> list[Group]:
        """Adds experts whose weights are stacked in one parameter; each expert is split inside.

        If it is legal only with the layers beside them, these are added; one sum is taken of both.
        """
        for cubes in self._experts():
            parent = common_pattern(cube.pattern for cube in cubes)
            for group in self._ways_of_experts(cubes, parent, groups):
                if self._legal(group):
                    split = {*group.patterns}
                    groups = [g for g in groups if not split & {*g.patterns}]
                    size = self._size(split)
                    groups.append(replace(group, parameters=size, is_experts=True))
                    break
        return groups

    def _experts(self) -> Iterator[list[Cube]]:
        """The parameters of experts, grouped by module or by parent of several modules."""
        alone: dict[str, list[Cube]] = {}
        for pattern in self.flow.between:
            own = dict(
                m[0].named_parameters(recurse=False) if (m := self.modules.get(pattern)) else ()
            )
            cubes = [Cube(pattern, name, own) for name, p in own.items() if p.dim() == 3]
            if any(min(cube.shape) < 2 for cube in cubes):
                continue
            if len(cubes) > 1:
                yield cubes
            else:
                alone.setdefault(pattern.rpartition(".")[0], []).extend(cubes)
        yield from (cubes for cubes in alone.values() if len(cubes) > 1)

    def _ways_of_experts(
        self, cubes: Sequence[Cube], parent: str, groups: Sequence[Group]
    ) -> Iterator[Group]:
        *ups, down = dict.fromkeys(cube.pattern for cube in cubes)
        beside: list[Group] | None = None
        for shards in shards_of_experts(cubes):
            if ups:
                yield Group(shards, summed=tuple(ups), results=(down,))
                continue
            yield Group(shards)
            if parent in self.modules:
                yield Group(shards, summed=(parent,), results=(parent,))
                if beside is None:
                    beside = self._beside(f"{parent}.", groups)
                more = tuple(shard for group in beside for shard in group.shards)
                if more:
                    yield Group((*more, *shards), summed=(parent,), results=(parent,))

    def _beside(self, inside: str, groups: Sequence[Group]) -> list[Group]:
        """Groups for all components in a block of experts, even if they do not pay alone."""
        taken = {pattern for group in groups for pattern in group.patterns}
        further = (
            self._first(producers, consumers)
            for producers, consumers in self._components()
            if all(p.startswith(inside) and p not in taken for p in producers | consumers)
        )
        own = [g for g in groups if all(p.startswith(inside) for p in g.patterns)]
        return [*own, *(group for group in further if group is not None)]

    def _vocabulary(self, taken: set[str], paying: bool = True) -> list[Group]:
        """Groups of embeddings, split over the vocabulary, and of heads, split over their outputs.

        Args:
            taken: The patterns that are split already.
            paying: Whether to take only embeddings for which it pays.
        """
        tables = [
            Shard(p, ("weight",), 0)
            for p in self.flow.tables
            if p not in taken
            and p in self.modules
            and (self._pays(p) or not paying)
            # An embedding of fewer rows would limit the number of ranks.
            and _weight(self.modules[p][0])[0] >= RANKS
        ]
        sizes = {_weight(self.modules[t.pattern][0])[0] for t in tables}
        ends = [
            shard
            for p in self.flow.ends
            if p not in taken
            and p in self.modules
            and (self._sizes(p)[1] in sizes or self._pays(p))
            for shard in self._shards(p, is_column)
        ]
        heads = [shard for shard in ends if self._sizes(shard.pattern)[1] in sizes]
        # Layers at the end that are no heads of words are tried separately.
        others = [shard for shard in ends if shard not in heads]
        made = {self._sizes(head.pattern)[1] for head in heads}
        words = [t for t in tables if _weight(self.modules[t.pattern][0])[0] in made]
        ways = []
        for some, own in ((tables, heads), (words, heads), ((), others)):
            if self.has_loss and len({head.pattern for head in own}) == 1:
                ways.append(Group((*some, *own), head=own[0].pattern))
            ways.append(Group((*some, *own)))
        ways += [Group(tuple(heads)), *(Group((t,)) for t in tables)]
        found: list[Group] = []
        known: set[str] = set()
        for group in dict.fromkeys(ways):
            if group.shards and not known & set(group.patterns) and self._legal(group):
                known |= set(group.patterns)
                size = self._size(group.patterns)
                rows = rows_of(group.patterns, *([t.pattern for t in ts] for ts in (tables, words)))
                found.append(replace(group, parameters=size, rows=rows))
        return found

    def _alone(self, taken: set[str]) -> list[Group]:
        """Groups of single large layers in no component, with outputs split and then gathered."""
        found = []
        for pattern in self.flow.layers:
            if pattern in taken or pattern not in self.modules:
                continue
            if not self._pays(pattern):
                continue
            group = Group(self._shards(pattern, is_column), parameters=self._size([pattern]))
            # If later code splits the result, it is refused as a shard, but legal once gathered.
            ways = [group, replace(group, gathered=True)]
            if isinstance(self.modules[pattern][0], nn.Linear) and group.shards:
                found += next(([way] for way in ways if self._legal(way)), [])
            elif group.shards and self._legal(group):
                found.append(group)
        return found

    def _as_one(self, taken: set[str]) -> list[Group]:
        """Groups of torch layers split with the layers in them: attention, whole blocks."""
        found, known = list[Group](), set(taken)
        for pattern, modules in self.modules.items():
            shards = shards_as_one(pattern, modules[0])
            patterns = {shard.pattern for shard in shards}
            if shards and not known & patterns:
                group = Group(shards, parameters=self._size(patterns))
                known |= patterns
                if self._legal(group):
                    found.append(group)
        return found

    def _pays(self, pattern: str) -> bool:
        """Whether splitting a single layer saves more time than gathering its result takes."""
        if pattern in self.flow.tables:
            taken = self._reduced(pattern, _weight(self.modules[pattern][0])[1])
        else:
            given, made = self._sizes(pattern)
            taken = self._reduced(pattern, given) + self._reduced(pattern, made) / 2
        return self._saved(pattern) + self._freed([pattern]) > taken

    def _together(self, groups: list[Group]) -> list[Group]:
        """All groups if legal together; else, the largest first, those legal with earlier ones.

        The next illegal one is found by bisection: any subset of legal groups is legal.
        """

        def is_legal(some: Sequence[Group]) -> bool:
            return self.oracle.refusal(lines_of(some)) is None

        kept, left = list[Group](), sorted(groups, key=lambda g: -g.parameters)
        if not groups or is_legal(groups):
            return groups
        while left and not is_legal([*kept, *left]):
            few, many = 0, len(left)
            while many - few > 1:
                half = (few + many) // 2
                few, many = (half, many) if is_legal([*kept, *left[:half]]) else (few, half)
            self._fits([*kept, *left[:many]])  # records why the last one is not legal
            kept, left = [*kept, *left[:few]], left[many:]
        return [group for group in groups if group in kept or group in left]

    def _fits(self, groups: Sequence[Group]) -> bool:
        refused = self.oracle.refusal(lines_of(groups))
        if refused is not None:
            self._refuse(groups, refused.message)
        return refused is None


def _weight(module: nn.Module) -> torch.Size:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape


def _has_column(module: nn.Module) -> bool:
    """Whether a layer can be split over its outputs."""
    known = (splits_of(module) or {}).items()
    return any(name == "weight" and is_column(split) for (name, _), split in known)


def _independent(
    pairs: Sequence[Component],
    worth: dict[Component, float],
) -> list[Component]:
    """The components of the largest total worth of which no two share a layer."""
    known = sorted(pairs, key=lambda pair: -worth[pair])[:MOST_TOGETHER]

    def best(number: int, used: frozenset[str]) -> tuple[float, list[int]]:
        if number == len(known):
            return 0.0, []
        without = best(number + 1, used)
        layers = known[number][0] | known[number][1]
        if layers & used:
            return without
        value, chosen = best(number + 1, used | layers)
        value += worth[known[number]]
        return (value, [number, *chosen]) if value > without[0] else without

    return [known[number] for number in best(0, frozenset())[1]]
