"""Decides which dead variables are worth deleting, from the measurements of two runs."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from slapo_rewrite.code.dead_values import Death
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model.held_memory import CannotMeasure, Record, recorded
from slapo_rewrite.model.layer_kinds import fold, left_alone
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.model.watched_functions import Live

# The least gain worth a line: shares of what a call adds at its peak, and of the model's peak.
LEAST_OF_CALL, LEAST_OF_MODEL = 0.02, 0.005


class Gain(NamedTuple):
    """A storage that is freed earlier if variables are deleted."""

    size: int  # its bytes
    first: int  # the number of storages allocated before it is freed then
    last: int  # the same without deletions
    names: frozenset[Death]  # the variables that must all be deleted for that


@dataclass
class Way:
    """Two runs of a model, with and without deletions, to compare the ends of storages."""

    plain: Record  # the run without deletions
    dropped: Record  # the run with all dead variables deleted
    # Whether the peaks of single calls count as well as the model's. They do not with gradients:
    # autograd keeps activations, and a layer's peak is in the backward pass.
    of_calls: bool

    def gains(self) -> Iterator[Gain]:
        """The storages that are freed earlier."""
        for number, size in enumerate(self.dropped.sizes):
            first, last = self.dropped.end_of(number), self.plain.end_of(number)
            if first >= last or not size:
                continue
            _, event = self.dropped.let_go[number]
            # Variables of calls that have ended before do not keep the storage any more.
            keepers = self.dropped.keepers.get(number, ())
            names = frozenset(d for d, frame in keepers if not frame.end or event <= frame.end)
            if names:
                yield Gain(size, first, last, names)

    def held(self, dropped: Collection[Death] | None = None) -> list[int]:
        """The held bytes at each allocation, with some variables deleted, or all of them."""
        steps = self.plain.steps()
        for gain in self.gains():
            if dropped is None or gain.names <= set(dropped):
                steps[gain.first] -= gain.size
                steps[gain.last] += gain.size
        return list(itertools.accumulate(steps[:-1]))


def paying(ways: Sequence[Way], deaths: Mapping[Death, ast.FunctionDef]) -> list[Death]:
    """The fewest variables whose deletion lowers the peaks about as much as deleting all."""
    sizes: dict[Death, int] = {}
    for way in ways:
        for gain in way.gains():
            for death in gain.names:
                sizes[death] = max(sizes.get(death, 0), gain.size)
    kept = set(sizes)
    bounds = [(way, list(_bounds(way))) for way in ways]
    order = {death: number for number, death in enumerate(deaths)}
    for death in sorted(kept, key=lambda d: (sizes[d], -order[d])):
        fewer = kept - {death}
        if all(_is_within(way.held(fewer), found, deaths[death]) for way, found in bounds):
            kept = fewer
    return [death for death in deaths if death in kept]


@dataclass(frozen=True)
class _Bound:
    """The allowed peak between two allocations, for calls of a function or for the model."""

    first: int
    last: int
    most: float
    function: ast.FunctionDef | None


def _bounds(way: Way) -> Iterator[_Bound]:
    before, after = way.held(frozenset()), way.held()
    least = LEAST_OF_MODEL * max(before, default=0)
    spans: list[tuple[int, int, ast.FunctionDef | None]] = [(0, len(before), None)]
    if way.of_calls:
        spans += [(frame.first, frame.last, frame.function) for frame in way.plain.frames]
    for first, last, function in dict.fromkeys(spans):
        if first < last:
            at_start = before[first] - way.plain.sizes[first]
            slack = LEAST_OF_CALL * (max(before[first:last]) - at_start)
            yield _Bound(first, last, max(after[first:last]) + max(slack, least), function)


def _is_within(held: Sequence[int], bounds: Sequence[_Bound], function: ast.FunctionDef) -> bool:
    """Whether held bytes stay within the bounds of the model and of a function."""
    own = (bound for bound in bounds if bound.function in (None, function))
    return all(max(held[bound.first : bound.last]) <= bound.most for bound in own)


@contextlib.contextmanager
def two_of_each(tree: Tree) -> Iterator[None]:
    """Reduces the lists of the live model to two modules of each kind, in the context."""
    lists = []
    for node in tree.nodes.values():
        if not isinstance(node.live, nn.ModuleList):
            continue
        children = list(node.children.values())
        kept = {id(children[n].live) for n in fold([child.kind for child in children]).left}
        left = [live for live in node.live if id(live) in kept]
        if len(left) < len(node.live):
            lists.append((node.live, left))
    with left_alone(lists):
        yield


def measured(
    tree: Tree,
    inputs: Mapping[str, Any],
    file: SourceFile,
    lives: Sequence[Live],
    deaths: Sequence[Death],
) -> list[Way]:
    """Runs a model with and without deletions, in training and in eval mode."""

    def ways(few: Callable[[Tree], Any]) -> list[Way]:
        with few(tree):
            found = []
            for training in (True, False):
                runs = [
                    recorded(tree, inputs, file, lives, names, training=training)
                    for names in ([], deaths)
                ]
                if runs[0].sizes != runs[1].sizes:
                    raise CannotMeasure("two runs of it differ")
                found.append(Way(runs[0], runs[1], of_calls=not training))
            return found

    try:
        return ways(two_of_each)
    except CannotMeasure:  # it may depend on its depth elsewhere
        return ways(lambda _: contextlib.nullcontext())
