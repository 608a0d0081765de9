"""Turns `autocast` requests into casts and half-precision layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.mixed_precision import (
    HalfPrecision,
    KeepFloat32,
    half_layer,
    place_casts,
    place_half_layer,
)
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.placement import Placement
from slapo_rewrite.changes.state import EMPTY, ModuleRequests
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Causes
from slapo_rewrite.model.layers import Layer
from slapo_rewrite.model.path_patterns import modules_at
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.precision.casts import CannotCast, Precisions, Wanted
from slapo_rewrite.precision.follow_precision import follow_precision
from slapo_rewrite.sharding.stand_in import CannotStandIn, StandIn
from slapo_rewrite.sharding.types import CannotRun

# Makes the keyword arguments of one training step; makes a small model with weights, and the
# arguments of a step of it.
MakeInputs = Callable[[], dict[str, Any]]
MakeSmall = Callable[[], tuple[Any, dict[str, Any]]]


def mark_kept(tree: Tree, states: dict[str, ModuleRequests]) -> None:
    """Records `keep` patterns at the modules that stay in float32, by the first path of each."""
    names = tree.first_paths()
    for path, state in list(states.items()):
        for asked, cause in state.asks(HalfPrecision):
            for pattern in asked.keep:
                for node in modules_at(tree.nodes[path], pattern):
                    name = names[id(node.live)]
                    states[name] = states.get(name, EMPTY).asking(KeepFloat32(), cause)


@dataclass(frozen=True)
class Mixed:
    """The layers and casts that half precision needs."""

    found: Precisions  # the layers and casts
    dtype: str  # the name of the half-precision dtype
    causes: Causes  # the directives that asked
    is_half: Callable[[str], bool]  # whether the module at a path computes its products so

    def parallel(self, path: str) -> Callable[[Layer], Layer] | None:
        """Returns the function from a tensor-parallel layer to its half-precision variant."""
        if path not in self.found.layers:
            return None

        def in_half(layer: Layer) -> Layer:
            made = half_layer(layer, self.dtype)
            if made is None:
                raise errors.Unsupported(
                    f"`{path}` is split into a `{layer.name}`, which does not compute in half "
                    "precision",
                    at=self.causes[0].at,
                    hint=f'keep it in float32: .autocast(keep=["{with_wildcards(path)}"])',
                )
            return made

        return in_half

    def place(self, to: Placement, layers: Mapping[str, Layer]) -> None:
        """Places the changes for the layers and casts."""
        for path in sorted(self.found.layers):
            state = to.states.get(path, EMPTY)
            if other := [each for each in (state.replacement, state.decompose) if each]:
                raise errors.ConflictingEdits(
                    f"`{path}` should compute in half precision, but is already replaced",
                    at=self.causes[0].at,
                    cause=other[0].cause,
                    hint=f'keep it in float32: .autocast(keep=["{with_wildcards(path)}"])',
                )
            if path not in layers:
                place_half_layer(to, to.tree.nodes[path], self.dtype, self.causes)
        place_casts(to, self.found, self.dtype, self.is_half, self.causes)


class Mixing:
    """Analyses a model in which some modules compute in half precision."""

    def __init__(
        self, tree: Tree, states: Mapping[str, ModuleRequests], files: OutputFiles
    ) -> None:
        self.tree, self.files = tree, files
        self.asked = {
            path: (change, cause)
            for path, state in states.items()
            for change, cause in state.asks(HalfPrecision)
        }
        self.kept = {path for path, state in states.items() if state.asks(KeepFloat32)}
        self.states = states
        self.paths = tree.first_paths()

    def follow(
        self,
        shortened: Callable[[], AbstractContextManager[None]],
        step_inputs: MakeInputs,
        small: MakeSmall | None,
    ) -> Mixed | None:
        """The layers and casts that are needed; None without requests.

        Inside `shortened`, lists have one element of each kind, which stands in for the others; if
        none stands in for others, `small` is None.
        """
        if not self.asked:
            return None
        causes = tuple({cause.number: cause for _, cause in self.asked.values()}.values())
        dtypes = sorted({change.dtype for change, _ in self.asked.values()})
        if len(dtypes) > 1:
            raise errors.ConflictingEdits(
                f"one model cannot compute both in {dtypes[0]} and in {dtypes[1]}",
                at=causes[-1].at,
                cause=causes[:-1],
                hint="give every `autocast` the same `dtype`",
            )
        first = self.files.stand_in()
        paths = {live: first(path) for live, path in self.paths.items()}
        wanted = Wanted(dtypes[0], self.is_half, self.keeps)
        try:
            found = self._run(paths, wanted, shortened, step_inputs, small)
        except CannotCast as error:
            place = error.place
            raise errors.Unsupported(
                str(error),
                at=self.files.span(place) if place is not None else causes[0].at,
                cause=causes,
                hint=error.hint,
            ) from error
        return Mixed(found, dtypes[0], causes, self.is_half)

    def _run(
        self,
        paths: Mapping[int, str],
        wanted: Wanted,
        shortened: Callable[[], AbstractContextManager[None]],
        step_inputs: MakeInputs,
        small: MakeSmall | None,
    ) -> Precisions:
        """Analyses the model, or a small one instead if it does not run without values."""
        model, texts = self.tree.root.live, self.files.text_of
        try:
            with shortened():
                return follow_precision(model, paths, step_inputs(), texts, wanted)
        except CannotRun as error:
            why: Exception = error
        if small is None:
            raise CannotCast(
                f"the model does not run on the meta device ({why}), and a small one does not "
                "have all layers, which all have to be followed next to split ones",
                None,
                "leave out either `autocast` or `shard`: each is followed without the other",
            ) from why
        try:
            like = StandIn(self.tree, self.states, small)
            own = {id(like.small.nodes[path].live): means for path, means in like.paths.items()}
            return follow_precision(like.small.root.live, own, like.inputs, texts, wanted)
        except (CannotRun, CannotStandIn) as error:
            raise CannotCast(
                f"the model does not run on the meta device ({why}), nor does a small one: {error}",
                None,
                "define inputs(model) and verify_model(m) in the schedule",
            ) from error

    def is_half(self, path: str) -> bool:
        """Whether a module computes its products in half precision."""
        return self._asked_of(path) is not None

    def keeps(self, path: str, operation: str) -> bool:
        """Whether an operation of a module stays in float32."""
        asked = self._asked_of(path)
        return asked is not None and operation in asked.keep

    def _asked_of(self, path: str) -> HalfPrecision | None:
        """The nearest `autocast` request around a module; None if a nearer `keep` excludes it."""
        while path not in self.kept:
            if path in self.asked:
                return self.asked[path][0]
            if not path:
                return None
            path = path.rpartition(".")[0]
        return None
