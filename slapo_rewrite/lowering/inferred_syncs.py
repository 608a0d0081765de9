"""Inference of the collectives that a schedule leaves out (`infer_sync`).

The usual ones come first: those that Megatron-LM puts around a layer split over its outputs, its
inputs or its vocabulary, and a gather of the last layer's output. The static check names what is
still missing. If a usual one is wrong, because a collective is stated elsewhere or the last layer
is not the head, the inference starts again without the usual ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import Function
from slapo_rewrite.changes.state import EMPTY, ModuleRequests, Sync
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Directive
from slapo_rewrite.model.layers import Layer, split_of
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.types import CannotFollow, MissingCollective, NeverRuns

States = dict[str, ModuleRequests]


class Inference:
    """Adds collectives to the requests for modules below a call of `infer_sync`."""

    def __init__(self, tree: Tree, states: Mapping[str, ModuleRequests]) -> None:
        self.tree = tree
        self.causes = {p: s.infer_sync.cause for p, s in states.items() if s.infer_sync}

    def refuse(self, why: str, also: Sequence[errors.Span] = ()) -> None:
        """Raises `Unsupported` if collectives are to be inferred."""
        for cause in self.causes.values():
            raise errors.Unsupported(
                f"the syncs cannot be inferred: {why}",
                at=cause.at,
                also=also,
                hint="let `inputs(model)` in the schedule return inputs that the model runs with, "
                "or write the syncs yourself: `slapo-rewrite primitives sync` shows how",
            )

    def starts(self, states: States, layers: Mapping[str, Layer]) -> Iterator[States]:
        """The initial states, to be checked and repaired one after the other."""
        usual = dict(states)
        last = max(layers, key=list(self.tree.nodes).index, default=None)
        for path, layer in layers.items():
            is_head = path == last and not self.passes_on(path, states[path])
            for remedy in self._usual(path, layer, is_head):
                if not self._stated(states, remedy):
                    usual[path] = self._with(usual[path], remedy)
        if usual != states:
            yield usual
        yield states

    def _usual(self, path: str, layer: Layer, is_head: bool) -> Iterator[MissingCollective]:
        """The usual collectives of a layer, if they may be inferred."""
        if self._cause(path) is None:
            return
        split = split_of(self.tree.nodes[path].live, layer)
        if split.has_input_gradient:
            yield MissingCollective(path, "bwd_post", "all_reduce")
        if split.output == "partial sum":
            yield MissingCollective(path, "fwd_post", "all_reduce")
        elif split.output == "partition" and is_head and with_wildcards(path) == path:
            yield MissingCollective(path, "fwd_post", "all_gather", split.axes[0])

    def _stated(self, states: States, remedy: MissingCollective) -> bool:
        """Whether the layer, or a module around it, has a collective with the same effect."""
        return any(
            _does(sync, remedy)
            for node in self.tree.nodes[remedy.path].outwards()
            for sync in states.get(node.path, EMPTY).syncs
        )

    def mended(
        self,
        states: States,
        layers: Mapping[str, Layer],
        error: CannotFollow,
        at_value: MissingCollective | None,
    ) -> States | None:
        """The states with a collective that may fix an error; None if none may be added.

        `at_value` is a collective at a local value that would fix it, if such may be added.
        """
        if isinstance(error, NeverRuns):
            return self._moved_out(states, layers, error)
        remedy, within = error.remedy, error.within
        is_layer = remedy is not None and remedy.path in layers
        for missing in (remedy, at_value) if is_layer or at_value is None else (at_value, remedy):
            if (mended := self._repaired(states, layers, missing)) is not None:
                return mended
        is_sum = remedy is not None and remedy.mode == "bwd_post"
        return self._around(states, within) if is_sum and within else None

    def gather_instead(
        self, layers: Mapping[str, Layer], error: CannotFollow
    ) -> MissingCollective | None:
        """The gather of a layer's output in place of a missing all-reduce later on."""
        remedy = error.remedy
        if remedy is None or remedy.path not in layers or remedy.mode == "bwd_post":
            return None
        split = split_of(self.tree.nodes[remedy.path].live, layers[remedy.path])
        if remedy.operation != "all_reduce" or split.output != "partition":
            return None
        return MissingCollective.whole_of(remedy.path, split.axes[0])

    def _moved_out(
        self, states: States, layers: Mapping[str, Layer], error: NeverRuns
    ) -> States | None:
        """The states with a collective moved out of a module whose `forward` does not run."""
        assert error.sync is not None
        path, number = error.sync
        idle, around = states[path].syncs[number], self.tree.nodes[path].owner
        if idle.cause.inferred is None or around is None:
            return None
        left = dict(states)
        for each in self._like(path):
            syncs = tuple(s for s in states.get(each, EMPTY).syncs if s != idle)
            left[each] = replace(states.get(each, EMPTY), syncs=syncs)
        if idle.mode == "bwd_post":
            return self._around(left, around.path)
        assert isinstance(idle.op, str)
        outer = MissingCollective(around.path, idle.mode, idle.op, idle.axis)
        return self._repaired(left, layers, outer)

    def _repaired(
        self, states: States, layers: Mapping[str, Layer], missing: MissingCollective | None
    ) -> States | None:
        """The states with the missing collective added there and at modules of the same pattern.

        None if it may not be inferred, if the module has one already, or if it does not fit how
        the layer is split.
        """
        if missing is None or not self._cause(missing.path) or not self._fits(layers, missing):
            return None
        wanted = states.get(missing.path, EMPTY)
        if any(s.mode == missing.mode and s.value == missing.value for s in wanted.syncs):
            return None
        found = {
            path: self._with(wanted, replace(missing, path=path))
            for path in self._like(missing.path)
            if states.get(path, EMPTY) == wanted
        }
        return {**states, **found}

    def _around(self, states: States, path: str) -> States | None:
        """The states with the input gradient of a whole module summed.

        Besides its sharded layers, a module may compute values from its input that meet their
        parts: the keys of all heads, or a product with a layer's weight. None if there is a sum.
        """
        remedy = MissingCollective.gradient_of(path)
        assert remedy is not None
        known = states.get(path, EMPTY).syncs
        if not self._cause(path) or any(s.mode == "bwd_post" and s.value is None for s in known):
            return None
        found = dict(states)
        for above in self._like(path):
            for below, state in states.items():
                if below.startswith(f"{above}."):
                    syncs = tuple(s for s in state.syncs if not _is_inferred_sum(s))
                    found[below] = replace(state, syncs=syncs)
            found[above] = self._with(states.get(above, EMPTY), replace(remedy, path=above))
        return found

    def reading_alike(
        self, states: States, readers: Iterable[Iterable[str]]
    ) -> list[tuple[str, frozenset[str]]]:
        """The modules around layers that read one value, with these layers, the outer ones first.

        Args:
            states: The requests.
            readers: The layers that each sum the gradient of a value, for each value.
        """
        found = dict[str, tuple[str, frozenset[str]]]()  # one module for each path pattern
        for paths in readers:
            inside: dict[str, set[str]] = {}
            for path in _summing(states, paths):
                for owner in self.tree.nodes[path].owners():
                    inside.setdefault(owner.path, set()).add(path)
            # The innermost of the modules around the same layers.
            around = {frozenset(inside[p]): p for p in sorted(inside, key=len)}
            several = ((p, layers) for layers, p in around.items() if len(layers) > 1)
            found |= {with_wildcards(path): (path, layers) for path, layers in several}
        return sorted(found.values(), key=lambda each: len(each[0]))

    def summed_apart(self, states: States, layers: Iterable[str]) -> set[str]:
        """Layers that each sum a gradient, and those of their path patterns; empty for just one."""
        apart = _summing(states, layers)
        like = {p for path in apart for p in self._like(path)} if len(apart) > 1 else set()
        return _summing(states, like)

    def summed_once(
        self, states: States, layers: Iterable[str], remedy: MissingCollective | None
    ) -> States:
        """The states with one collective in place of the layers' own gradient sums.

        Unchanged if it may not be added, or if there are no separate sums.
        """
        left = dict(states)
        for path in self.summed_apart(states, layers):
            syncs = tuple(s for s in states[path].syncs if not _is_inferred_sum(s))
            left[path] = replace(states[path], syncs=syncs)
        if left == states:
            return states
        return left if remedy is None else self._repaired(left, {}, remedy) or states

    def _like(self, path: str) -> list[str]:
        """The modules of the same class and path pattern, whose collectives may be inferred."""
        like, cls = with_wildcards(path), self.tree.nodes[path].cls
        return [
            p
            for p, node in self.tree.nodes.items()
            if node.cls is cls and with_wildcards(p) == like and self._cause(p)
        ]

    def is_one_place(self, path: str) -> bool:
        """Whether all modules of a module's class have its path pattern."""
        cls, like = self.tree.nodes[path].cls, {*self._like(path)}
        return all(p in like for p, node in self.tree.nodes.items() if node.cls is cls)

    def passes_on(self, path: str, state: ModuleRequests) -> bool:
        """Whether what a layer gives may go into a loss as the parts that it is.

        Whoever states that its gradient is added up, and no gather, wants the parts passed on; of a
        layer whose collectives are all inferred, the model's outputs stay what they were.
        """
        return self._cause(path) is None or any(not s.cause.inferred for s in state.syncs)

    def may_tie(self, path: str, layer: Layer) -> bool:
        """Whether an embedding's table may also be the output head, with inferred collectives."""
        return layer.name == "VocabParallelEmbedding" and self._cause(path) is not None

    def _fits(self, layers: Mapping[str, Layer], remedy: MissingCollective) -> bool:
        layer = layers.get(remedy.path)
        if layer is None:
            return True
        split = split_of(self.tree.nodes[remedy.path].live, layer)
        if remedy.mode == "bwd_post":
            return split.has_input_gradient
        return (remedy.operation == "all_gather") == (split.output == "partition")

    def _with(self, state: ModuleRequests, remedy: MissingCollective) -> ModuleRequests:
        cause, value = self._cause(remedy.path), remedy.value
        assert cause is not None
        of = f" of {value.name}" if value is not None else ""
        inferred = f"{remedy.mode} {remedy.operation}{of}"
        directive = replace(cause, paths=(remedy.path,), inferred=inferred)
        summed = False if value is None else None
        sync = Sync(remedy.mode, remedy.operation, remedy.axis, summed, directive, value=value)
        return replace(state, syncs=(*state.syncs, sync))

    def _cause(self, path: str) -> Directive | None:
        """The nearest call of `infer_sync` on a module or one around it."""
        around = self.tree.nodes[path].outwards()
        return next((c for n in around if (c := self.causes.get(n.path))), None)


def _summing(states: States, paths: Iterable[str]) -> set[str]:
    """Those of the modules that have an inferred gradient sum."""
    return {p for p in paths if any(map(_is_inferred_sum, states.get(p, EMPTY).syncs))}


def _is_inferred_sum(sync: Sync) -> bool:
    """Whether a sync is an inferred gradient sum."""
    return sync.mode == "bwd_post" and sync.cause.inferred is not None


def _does(sync: Sync, remedy: MissingCollective) -> bool:
    """Whether a collective may have the effect of a usual one."""
    if sync.value is not None:
        return False
    if remedy.operation == "all_gather":
        return sync.mode == "fwd_post"
    if remedy.mode == "bwd_post" and sync.mode == "fwd_pre":
        return sync.op == "all_gather" or isinstance(sync.op, Function)
    return sync.mode == remedy.mode and sync.op not in ("all_gather", "scatter", "all_to_all")


def named(states: States, number: int) -> tuple[States, list[Directive]]:
    """The states with a directive of its own for each inferred collective, and these directives."""
    found: dict[tuple[int, str | None, str], Directive] = {}

    def name(sync: Sync) -> Sync:
        cause = sync.cause
        if cause.inferred is None:
            return sync
        key = (cause.number, cause.inferred, with_wildcards(cause.paths[0]))
        found.setdefault(key, replace(cause, number=number + len(found)))
        return replace(sync, cause=found[key])

    states = {
        path: replace(state, syncs=tuple(map(name, state.syncs))) for path, state in states.items()
    }
    return states, list(found.values())
