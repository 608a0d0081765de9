"""Checks that ranks draw different random numbers for shards only, and the same elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.changes.around_forward import ForkRandom
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.placement import find_subgraph
from slapo_rewrite.changes.regions import ForkRegion
from slapo_rewrite.changes.running_methods import running_inside
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.subgraphs import draw_beside_torch
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Directive
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.random_ops import out_of_step
from slapo_rewrite.sharding.types import Draw, ShardingRequest, ShardingResult


@dataclass(frozen=True)
class Forks:
    """Checks of the schedule's `fork_rng` calls."""

    tree: Tree  # the model
    states: Mapping[str, ModuleRequests]  # the requests, by module path
    files: OutputFiles  # the files that may be rewritten

    def check(self, followed: ShardingResult) -> None:
        """Raises `Unsupported` if forked random numbers are drawn for a whole value."""
        for draw in sorted(followed.draws, key=lambda d: (d.callers, d.source)):
            causes = [cause for path, line in draw.callers for cause in self._at(path, line)]
            if causes and not draw.blocks:
                raise errors.Unsupported(
                    "random numbers are drawn here for a value that is whole on every rank, but "
                    "each rank would draw different ones, and the ranks' values would differ",
                    at=self.files.span(draw.place) if draw.place else None,
                    cause=causes[:1],
                    hint="fork only code that works on parts: a module inside, or calls of it with "
                    "`fork_rng([...])`",
                )

    def missing(self, asked: ShardingRequest, followed: ShardingResult) -> list[str]:
        """Warnings of draws that bring ranks out of step, and of forks in an unsharded model."""
        found = out_of_step(self.tree, asked, followed)
        uneven = ((d, n) for d, n in found if not any(self._at(*caller) for caller in d.callers))
        warnings = list(dict.fromkeys(self._warning(draw, world) for draw, world in uneven))
        if not (asked.layers or asked.parameters or asked.attributes or asked.borders):
            forks = (*self._all(ForkRandom), *self._all(ForkRegion))
            return [*warnings, *dict.fromkeys(map(_useless, forks))]
        for file, function in running_inside(self.files, self.tree.root):
            if (draw := draw_beside_torch(file, function)) is not None:
                words = (
                    f"`{ast.unparse(draw)}` draws random numbers, not from torch, that have to be "
                    "equal on ranks that share layers: also seed Python's `random` and NumPy "
                    "alike on these ranks, or draw with torch"
                )
                warnings.append(errors.warning(words, file.at(draw)))
        return warnings

    def _warning(self, draw: Draw, world: int) -> str:
        path, place = draw.callers[0][0], draw.place
        selected = f's["{with_wildcards(path)}"]' if path else "s"
        whole = self.tree.nodes[path].cls.__module__.startswith("torch.nn.")
        fork = ".fork_rng()" if whole else ".fork_rng(subgraph=...) of this line"
        words = (
            f"random numbers are drawn for a rank's part of `{with_wildcards(draw.source)}` here, "
            f"and on {world} ranks these parts differ in size: later numbers for whole values "
            f"would differ between the ranks; use {selected}{fork}"
        )
        return errors.warning(words, self.files.span(place) if place else None)

    def _all(self, kind: type[Change]) -> Iterator[Directive]:
        return (cause for state in self.states.values() for _, cause in state.asks(kind))

    def _at(self, path: str, line: int) -> list[Directive]:
        """The directives that fork the random numbers a module draws at a line."""
        state, cls = self.states.get(path), self.tree.nodes[path].cls
        if state is None:
            return []
        found = [cause for _, cause in state.asks(ForkRandom)]
        home = self.files.of(cls)
        for fork, cause in state.asks(ForkRegion) if home else ():
            assert home is not None
            run = find_subgraph(home.classes, cls.__name__, fork.part, cause).run
            if run[0].lineno <= line <= (run[-1].end_lineno or line):
                found.append(cause)
        return found


def _useless(fork: Directive) -> str:
    return errors.warning(
        "no layer is split, but each rank draws different numbers here for values that all ranks "
        "have, so these values differ: shard the layers that draw, or remove `fork_rng`",
        fork.at,
    )
