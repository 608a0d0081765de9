"""Which names are worth dropping: what would be held with some of them, worked out of two runs."""

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

# The least that is worth a line, as a share of what a call adds at its peak, and the model.
LEAST_OF_CALL, LEAST_OF_MODEL = 0.02, 0.005


class Gain(NamedTuple):
    """A storage that is let go sooner where names are dropped."""

    size: int  # its bytes
    first: int  # how many storages had been made when it is let go then
    last: int  # how many when it is let go otherwise
    names: frozenset[Death]  # all that have to be dropped for that


@dataclass
class Way:
    """A way through the model: what each storage's end is, and what it depends on."""

    plain: Record  # the run as it is
    dropped: Record  # the run with all names dropped
    # Whether what each call holds counts, and not only what the model does. With gradients that is
    # what autograd keeps, and a layer's peak comes in the backward pass.
    of_calls: bool

    def gains(self) -> Iterator[Gain]:
        """What is let go sooner."""
        for number, size in enumerate(self.dropped.sizes):
            first, last = self.dropped.end_of(number), self.plain.end_of(number)
            if first >= last or not size:
                continue
            _, event = self.dropped.let_go[number]
            # What a call that is over by then would have kept, it would not keep any more.
            keepers = self.dropped.keepers.get(number, ())
            names = frozenset(d for d, frame in keepers if not frame.end or event <= frame.end)
            if names:
                yield Gain(size, first, last, names)

    def held(self, dropped: Collection[Death] | None = None) -> list[int]:
        """How many bytes are held as each storage is made, with some names dropped, or all."""
        steps = self.plain.steps()
        for gain in self.gains():
            if dropped is None or gain.names <= set(dropped):
                steps[gain.first] -= gain.size
                steps[gain.last] += gain.size
        return list(itertools.accumulate(steps[:-1]))


def paying(ways: Sequence[Way], deaths: Mapping[Death, ast.FunctionDef]) -> list[Death]:
    """As few names as lower the most that calls of functions hold as much as all of them do."""
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
    """The most that may be held between two storages, by calls of a function, or by the model."""

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
    """Whether no more is held than may be, as far as that is a function's own affair."""
    own = (bound for bound in bounds if bound.function in (None, function))
    return all(max(held[bound.first : bound.last]) <= bound.most for bound in own)


@contextlib.contextmanager
def two_of_each(tree: Tree) -> Iterator[None]:
    """The live model with two modules of each kind in its lists, for as long as it lasts."""
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
    """The ways through a model that runs twice alike: in training, and in eval mode."""

    def ways(few: Callable[[Tree], Any]) -> list[Way]:
        with few(tree):
            found = []
            for training in (True, False):
                runs = [
                    recorded(tree, inputs, file, lives, names, training=training)
                    for names in ([], deaths)
                ]
                if runs[0].sizes != runs[1].sizes:
                    raise CannotMeasure("two runs of it are not alike")
                found.append(Way(runs[0], runs[1], of_calls=not training))
            return found

    try:
        return ways(two_of_each)
    except CannotMeasure:  # its depth is written elsewhere too
        return ways(lambda _: contextlib.nullcontext())
