"""The collectives that a schedule leaves to be inferred.

The usual ones come first: those that Megatron-LM puts around a layer split over its outputs, its
inputs or its vocabulary, and a gather of what the last one gives. What is still missing then, the
static check names. Where a usual one is wrong, for a collective that is stated elsewhere or since
the last layer is not what it seemed, the check is asked for each of them instead.
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
    """Adds collectives to what was asked of the modules that a schedule leaves them open for."""

    def __init__(self, tree: Tree, states: Mapping[str, ModuleRequests]) -> None:
        self.tree = tree
        self.causes = {p: s.infer_sync.cause for p, s in states.items() if s.infer_sync}

    def refuse(self, why: str, also: Sequence[errors.Span] = ()) -> None:
        """Refuses to infer anything, if something is to be inferred."""
        for cause in self.causes.values():
            raise errors.Unsupported(
                f"the syncs cannot be inferred: {why}",
                at=cause.at,
                also=also,
                hint="see that the model runs with what `inputs(model)` in the schedule gives; "
                "where it cannot, write the syncs: `slapo-rewrite primitives sync` shows how",
            )

    def starts(self, states: States, layers: Mapping[str, Layer]) -> Iterator[States]:
        """What may be asked, to be checked and repaired one after the other."""
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
        """The collectives that are usual for a layer, if they may be inferred."""
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
        """Whether the layer, or a module around it, has a collective that does the same."""
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
        """What is asked, with a collective that may be what was missing; None if none may be.

        `at_value` is a collective at a value that would mend it, where such may be added.
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
        """The gather of a layer's parts, where a sum over them is missing, made of them later."""
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
        """What is asked, with a collective at the module around one whose `forward` is not run."""
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
        """What is asked, with the missing collective there and at the module's like.

        None where it may not be inferred, where the module has one already, or where it does not
        fit the way that the layer is split.
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
        """What is asked, with gradients added up for a module as a whole.

        A module may compute of its input, beside sharded layers, what meets their parts: the keys
        of all heads, or a product with a layer's weight. None where they are added up already.
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
            states: What is asked.
            readers: The layers that each add up the gradient of a value, for each value.
        """
        found = dict[str, tuple[str, frozenset[str]]]()  # one module of each kind
        for paths in readers:
            inside: dict[str, set[str]] = {}
            for path in _summing(states, paths):
                for owner in self.tree.nodes[path].owners():
                    inside.setdefault(owner.path, set()).add(path)
            # Of those around the same layers the innermost.
            around = {frozenset(inside[p]): p for p in sorted(inside, key=len)}
            several = ((p, layers) for layers, p in around.items() if len(layers) > 1)
            found |= {with_wildcards(path): (path, layers) for path, layers in several}
        return sorted(found.values(), key=lambda each: len(each[0]))

    def summed_apart(self, states: States, layers: Iterable[str]) -> set[str]:
        """The layers that each add up a gradient, and those like them; none if it is but one."""
        apart = _summing(states, layers)
        like = {p for path in apart for p in self._like(path)} if len(apart) > 1 else set()
        return _summing(states, like)

    def summed_once(
        self, states: States, layers: Iterable[str], remedy: MissingCollective | None
    ) -> States:
        """What is asked, with one collective in the place of the layers' own sums of gradients.

        As it was where that may not be, or they are not summed apart.
        """
        left = dict(states)
        for path in self.summed_apart(states, layers):
            syncs = tuple(s for s in states[path].syncs if not _is_inferred_sum(s))
            left[path] = replace(states[path], syncs=syncs)
        if left == states:
            return states
        return left if remedy is None else self._repaired(left, {}, remedy) or states

    def _like(self, path: str) -> list[str]:
        """The modules of a module's class that stand where it does, of this layer or another."""
        like, cls = with_wildcards(path), self.tree.nodes[path].cls
        return [
            p
            for p, node in self.tree.nodes.items()
            if node.cls is cls and with_wildcards(p) == like and self._cause(p)
        ]

    def is_one_place(self, path: str) -> bool:
        """Whether all modules of a module's class stand where it does, and can go alike."""
        cls, like = self.tree.nodes[path].cls, {*self._like(path)}
        return all(p in like for p, node in self.tree.nodes.items() if node.cls is cls)

    def passes_on(self, path: str, state: ModuleRequests) -> bool:
        """Whether what a layer gives may go into a loss as the parts that it is.

        Whoever states that its gradient is added up, and no gather, wants the parts passed on; of a
        layer whose collectives are all inferred, the model's outputs stay what they were.
        """
        return self._cause(path) is None or any(not s.cause.inferred for s in state.syncs)

    def may_tie(self, path: str, layer: Layer) -> bool:
        """Whether a layer's table may be a head as well, whose collectives are inferred."""
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
        """The call that leaves the collectives of a module open: the nearest one's."""
        around = self.tree.nodes[path].outwards()
        return next((c for n in around if (c := self.causes.get(n.path))), None)


def _summing(states: States, paths: Iterable[str]) -> set[str]:
    """Those of some modules that add up a gradient, and no one stated it."""
    return {p for p in paths if any(map(_is_inferred_sum, states.get(p, EMPTY).syncs))}


def _is_inferred_sum(sync: Sync) -> bool:
    """Whether a sync adds up gradients, and no one stated it."""
    return sync.mode == "bwd_post" and sync.cause.inferred is not None


def _does(sync: Sync, remedy: MissingCollective) -> bool:
    """Whether a collective may do what a usual one would."""
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
