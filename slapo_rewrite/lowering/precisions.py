"""From modules that are to compute in half precision to the casts and layers that do so."""

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

# Makes the keyword arguments of one training step; a small model with weights, and those of a step
# of it.
MakeInputs = Callable[[], dict[str, Any]]
MakeSmall = Callable[[], tuple[Any, dict[str, Any]]]


def mark_kept(tree: Tree, states: dict[str, ModuleRequests]) -> None:
    """Notes what stays in float32 at the modules themselves, by the first name of each."""
    names = tree.first_paths()
    for path, state in list(states.items()):
        for asked, cause in state.asks(HalfPrecision):
            for pattern in asked.keep:
                for node in modules_at(tree.nodes[path], pattern):
                    name = names[id(node.live)]
                    states[name] = states.get(name, EMPTY).asking(KeepFloat32(), cause)


@dataclass(frozen=True)
class Mixed:
    """What follows of computing products in half precision."""

    found: Precisions  # the layers and casts
    dtype: str  # the dtype of what is in half precision, by its name
    causes: Causes  # who asked
    is_half: Callable[[str], bool]  # whether a module computes its products so, by its path

    def parallel(self, path: str) -> Callable[[Layer], Layer] | None:
        """What gives the layer that computes so in the place of a tensor-parallel one."""
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
        """Has the layers and casts written."""
        for path in sorted(self.found.layers):
            state = to.states.get(path, EMPTY)
            if other := [each for each in (state.replacement, state.decompose) if each]:
                raise errors.ConflictingEdits(
                    f"`{path}` is to compute in half precision, and is made otherwise already",
                    at=self.causes[0].at,
                    cause=other[0].cause,
                    hint=f'keep it in float32: .autocast(keep=["{with_wildcards(path)}"])',
                )
            if path not in layers:
                place_half_layer(to, to.tree.nodes[path], self.dtype, self.causes)
        place_casts(to, self.found, self.dtype, self.is_half, self.causes)


class Mixing:
    """Follows a model in which some modules compute in half precision."""

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
        """What follows; None where nothing is asked.

        `shortened` is the model with one element of each kind, which stands for the others; where
        none does, `small` is None.
        """
        if not self.asked:
            return None
        causes = tuple({cause.number: cause for _, cause in self.asked.values()}.values())
        dtypes = sorted({change.dtype for change, _ in self.asked.values()})
        if len(dtypes) > 1:
            raise errors.ConflictingEdits(
                f"one model is to compute in {dtypes[0]} and in {dtypes[1]}",
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
        """Follows the model, or a small one in its place where it does not run without values."""
        model, texts = self.tree.root.live, self.files.text_of
        try:
            with shortened():
                return follow_precision(model, paths, step_inputs(), texts, wanted)
        except CannotRun as error:
            why: Exception = error
        if small is None:
            raise CannotCast(
                f"the model does not run on the meta device ({why}), and a small one has not all "
                "layers, each of which has to be followed beside split ones",
                None,
                "leave out the `autocast` or what is split: either is followed alone",
            ) from why
        try:
            like = StandIn(self.tree, self.states, small)
            own = {id(like.small.nodes[path].live): means for path, means in like.paths.items()}
            return follow_precision(like.small.root.live, own, like.inputs, texts, wanted)
        except (CannotRun, CannotStandIn) as error:
            raise CannotCast(
                f"the model does not run on the meta device ({why}), nor does a small one: {error}",
                None,
                "give inputs(model) and verify_model(m) in the schedule",
            ) from error

    def is_half(self, path: str) -> bool:
        """Whether a module computes its products in half precision."""
        return self._asked_of(path) is not None

    def keeps(self, path: str, operation: str) -> bool:
        """Whether an operation of a module stays in float32."""
        asked = self._asked_of(path)
        return asked is not None and operation in asked.keep

    def _asked_of(self, path: str) -> HalfPrecision | None:
        """What is asked of a module by the nearest line around it; None where it is kept."""
        while path not in self.kept:
            if path in self.asked:
                return self.asked[path][0]
            if not path:
                return None
            path = path.rpartition(".")[0]
        return None
