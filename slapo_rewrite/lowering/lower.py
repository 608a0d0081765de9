"""Turns the requests for each module into edits of the source.

There are three steps. Requests become sharded layers and parameters, and the sharding analysis runs
the model to find what else must change. Each change is placed in the class that constructs or calls
the module. Then the changes of a class become edits (`specialize`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.add_bias import place_decomposed
from slapo_rewrite.changes.around_forward import ForkRandom
from slapo_rewrite.changes.border_syncs import place_syncs
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.parallel_layers import place_layer, place_replacement
from slapo_rewrite.changes.parameters import place_biases, place_shard
from slapo_rewrite.changes.placement import Placement, Requested
from slapo_rewrite.changes.pretrained import keep_all_treatments
from slapo_rewrite.changes.reduced_gradients import ReducedGradients
from slapo_rewrite.changes.refuse_branch import place_refusals
from slapo_rewrite.changes.sizes import place_full_sizes, place_sizes, place_statistic
from slapo_rewrite.changes.state import EMPTY, ModuleRequests, Sync
from slapo_rewrite.changes.value_syncs import at_statement, value_of
from slapo_rewrite.changes.vocab_parallel_loss import place_losses, place_tied_head
from slapo_rewrite.code.splice import Edit
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Causes, Directive, merged_causes
from slapo_rewrite.lowering.forked_random import Forks
from slapo_rewrite.lowering.inferred_syncs import Inference, named
from slapo_rewrite.lowering.inner_layers import join_inner_layers
from slapo_rewrite.lowering.layer_choice import choose_layer, done_inside
from slapo_rewrite.lowering.precisions import MakeInputs, MakeSmall, Mixed, Mixing, mark_kept
from slapo_rewrite.lowering.specialize import specialize
from slapo_rewrite.lowering.tied_parameters import annotate_ties, follow_ties
from slapo_rewrite.model.join import Sources
from slapo_rewrite.model.layers import Layer, base_of, is_grouped
from slapo_rewrite.model.representatives import Representatives
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.placements import COVER
from slapo_rewrite.sharding.propagate import Records, propagate
from slapo_rewrite.sharding.stand_in import CannotStandIn, StandIn
from slapo_rewrite.sharding.types import (
    CannotFollow,
    CannotRun,
    LocalValue,
    MissingCollective,
    ModuleBoundary,
    ShardedParameter,
    ShardingRequest,
    ShardingResult,
)

Follow = Callable[[ShardingRequest], ShardingResult]

# Modes in data-flow order: a value is gathered first, and its gradient is summed inside of that.
ORDER = ("fwd_pre", "bwd_post", "fwd_post")


@dataclass
class Lowered:
    """The result of lowering: edits of files, inferred directives and warnings."""

    files: OutputFiles  # the files, with the names that each imports from the helper modules
    edits: dict[str, list[Edit]]  # the edits of each file, by its module's name
    # Further directives, one for each inferred collective.
    inferred: list[Directive] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what could not be checked, in words


def lower(
    tree: Tree,
    states: Mapping[str, ModuleRequests],
    directives: Sequence[Directive],
    before: Causes,
    sources: Sources,
    step_inputs: MakeInputs,
    small: MakeSmall,
    thorough: bool = True,
    records: Records | None = None,
) -> Lowered:
    """The edits that carry out the requests for each module path.

    `directives` are all of the schedule's, with or without effect; those in `before` have changed
    the source already.
    `step_inputs` makes the arguments of one training step, `small` a small model with weights and
    those of its step. `thorough` also analyses eval mode and more ranks. `records` is a cache.
    """
    known = records or Records()
    begin = functools.partial(_Lowering, tree, states, directives, before, sources, thorough, known)
    # If only feasibility is asked, gradients need not be summed in one place for several layers.
    lowering = begin(sums_once=known.has_ways)
    try:
        return lowering.run(step_inputs, small)
    except errors.RewriteError:  # for example, a border where no collective can be written
        if not lowering.has_summed_once:
            raise
    return begin(sums_once=False).run(step_inputs, small)


class _Lowering:
    def __init__(
        self,
        tree: Tree,
        states: Mapping[str, ModuleRequests],
        directives: Sequence[Directive],
        before: Causes,
        sources: Sources,
        thorough: bool,
        records: Records,
        sums_once: bool,
    ) -> None:
        self.tree, self.states = tree, dict(states)
        self.thorough, self.records = thorough, records
        self.sums_once, self.has_summed_once = sums_once, False
        self.directives, self.before = directives, before
        self.files = OutputFiles(tree, sources)
        self.warnings: list[str] = []

    def run(self, step_inputs: MakeInputs, small: MakeSmall) -> Lowered:
        """All steps, in order."""
        join_inner_layers(self.tree, self.states)
        follow_ties(self.tree, self.states)
        mark_kept(self.tree, self.states)
        annotate_ties(self.tree, self.states)
        alike, every = Representatives(self.tree, self.states), self.states
        self.inference = Inference(self.tree, every)
        self.files.siblings(alike.siblings)
        precision = Mixing(self.tree, every, self.files)
        self.files.asked_alike(every)

        def followed_itself(asked: ShardingRequest) -> ShardingResult:
            inputs, text_of = step_inputs(), self.files.text_of
            return propagate(self.tree, asked, inputs, text_of, self.records, self.thorough)

        with alike.reduced():
            self.states = few = {path: every[path] for path in every if path in self.tree.nodes}
            try:
                with alike.shortened():
                    followed: ShardingResult | None = self._follow(followed_itself)
            except CannotRun:
                followed = None
        reduced: Callable[[], AbstractContextManager[None]] = alike.reduced
        if followed is None:
            # Some models take the number of layers from the configuration: analyse all layers, and
            # write the changes of each.
            self.states = every
            try:
                followed = self._follow(followed_itself)
                reduced = nullcontext
                self.files.siblings({})  # no element stands in for others
            except CannotRun as error:
                self.states = few
                with alike.reduced():
                    followed = self._follow_small(small, error)
        self.states, inferred = named(self.states, len(self.directives))
        with reduced():
            asked = self._asked()
            is_reduced = reduced == alike.reduced
            shortened = alike.shortened if is_reduced else nullcontext
            mixed = precision.follow(shortened, step_inputs, small if is_reduced else None)
            forks = Forks(self.tree, self.states, self.files)
            forks.check(followed)
            self._place(asked, followed, mixed)
            self.warnings += forks.missing(asked, followed)
            self.warnings += (
                errors.warning(f"not followed: {way}", self.files.span(place) if place else None)
                for way, place in followed.unfollowed
            )
            edits = specialize(self.tree, self.files)
            notes = (note for output in self.files for note in output.changes.indices.notes)
            self.warnings += dict.fromkeys(notes)
        return Lowered(self.files, edits, inferred, self.warnings)

    def _place(self, asked: ShardingRequest, followed: ShardingResult, mixed: Mixed | None) -> None:
        """Places each change: those that were requested and those that these make necessary."""
        to = Placement(self.tree, self.states, self.files, followed)
        layers, parameters = asked.layers, asked.parameters
        for path, state in self.states.items():
            node = self.tree.nodes[path]
            _check_called(path, state)
            if path in layers:
                in_half = mixed.parallel(path) if mixed is not None else None
                others = mixed.causes if in_half is not None and mixed is not None else ()
                place_layer(to, node, layers[path], in_half, others)
            if state.replacement:
                place_replacement(to, node, layers.get(path))
            for shard in state.shards if path in parameters else ():
                place_shard(to, node, shard)
            if path in parameters:
                place_biases(to, node)
            place_syncs(to, node, asked.borders.get(path, ()), path in layers)
            if state.decompose:
                place_decomposed(to, node, layers.get(path))
            for change, cause in state.asks(Requested):
                change.place(to, node, cause)
        owners = self._owners(asked)
        holders = asked.holders(self.tree)
        place_sizes(to, owners, holders)
        ReducedGradients(to).place(owners, holders)
        place_losses(to, followed.losses.values())
        for statistic in followed.statistics:
            place_statistic(to, statistic)
        if mixed is not None:
            mixed.place(to, layers)
        for head in followed.tied_heads:
            place_tied_head(to, head)
        for path, layer in layers.items():
            place_full_sizes(to, self.tree.nodes[path], layer)
        place_refusals(to, merged_causes(*owners.values()))
        cuts = (state.cut.cause for state in self.states.values() if state.cut)
        keep_all_treatments(self.tree, self.files, (*self.before, *cuts), self.directives)

    def _owners(self, asked: ShardingRequest) -> dict[str, list[Directive]]:
        """The modules that own sharded layers and parameters, with the directives that shard."""
        owners: dict[str, list[Directive]] = {}
        for path in (*asked.layers, *asked.parameters):
            for owner in asked.owners(self.tree.nodes[path]):
                owners.setdefault(owner.path, []).extend(s.cause for s in self.states[path].shards)
        return owners

    def _asked(self) -> ShardingRequest:
        layers, parameters = self._layers_and_parameters()
        heads = {p for p in layers if self.inference.passes_on(p, self.states[p])}
        return ShardingRequest(
            layers,
            parameters,
            (borders := self._borders(layers)),
            frozenset(heads),
            self._attributes(layers),
            frozenset(path for path, state in self.states.items() if state.asks(ForkRandom)),
            frozenset(p for p in layers if self.inference.may_tie(p, layers[p])),
            {
                place.filename: self.files.at(place).file.tree
                for place in (
                    b.value.statement for found in borders.values() for b in found if b.value
                )
            },
        )

    def _layers_and_parameters(self) -> tuple[dict[str, Layer], dict[str, list[ShardedParameter]]]:
        """The sharded replacements of layers, and sharded parameters, by module path."""
        layers: dict[str, Layer] = {}
        parameters: dict[str, list[ShardedParameter]] = {}
        known: dict[Any, Layer] = {}
        for path, state in self.states.items():
            if not state.shards:
                continue
            node = self.tree.nodes[path]
            if self._extends_layer(node.cls):
                key = (node.cls, state, tuple(node.parameters), is_grouped(node.live))
                if key not in known:
                    known[key] = choose_layer(node, state)
                layers[path] = known[key]
            elif self.files.of(node.cls) is not None:
                parameters[path] = [ShardedParameter(s.name, s.axis, s.parts) for s in state.shards]
            else:
                raise errors.Unsupported(
                    f"`{path}` is a {node.cls.__module__}.{node.cls.__qualname__}: it "
                    "cannot be sharded",
                    at=state.shards[0].cause.at,
                    hint="Linear, Embedding, convolutions, their norms and transformers' Conv1D "
                    "can be, and parameters of classes that a Python file outside of torch defines",
                )
        return layers, parameters

    def _attributes(self, layers: Mapping[str, Layer]) -> dict[str, frozenset[str]]:
        """The integer attributes that the schedule makes this rank's share, by module path."""
        found: dict[str, frozenset[str]] = {}
        for path, state in self.states.items():
            if not state.shares:
                continue
            cls = self.tree.nodes[path].cls
            first = state.shares[0]
            if path in layers or self.files.of(cls) is None:
                raise errors.Unsupported(
                    f"`{path or 's'}` is a {cls.__module__}.{cls.__qualname__}: its "
                    f"`{first.name}` cannot be sharded",
                    at=first.cause.at,
                    hint="the attributes of classes that a Python file outside of torch defines "
                    "can be, where no layer takes their place",
                )
            found[path] = frozenset(share.name for share in state.shares)
        return found

    def _extends_layer(self, cls: type) -> bool:
        """Whether a class is a layer that can be split, or a subclass that calls its `forward`."""
        base = base_of(cls)
        if base is None or base is cls:
            return base is cls
        between = cls.__mro__[: cls.__mro__.index(base)]
        files = [(self.files.of(c), c) for c in between]
        return all(d is not None and d.classes.extends_forward(c) for d, c in files)

    def _borders(self, layers: Mapping[str, Layer]) -> dict[str, list[ModuleBoundary]]:
        """The collectives that no layer carries out itself, in data-flow order."""
        found: dict[str, list[ModuleBoundary]] = {}
        for path, state in self.states.items():
            node = self.tree.nodes[path]
            inside = done_inside(node, state) if path in layers else []
            for number, sync in enumerate(state.syncs):
                if not any(sync is other for other in inside):
                    value = value_of(self.files, node, sync)
                    found.setdefault(path, []).append(_border(sync, number, value))
        for borders in found.values():
            borders.sort(key=lambda b: ORDER.index(b.mode))
        return found

    def _follow(self, run: Follow) -> ShardingResult:
        """The result of the analysis; adds the collectives that are to be inferred.

        Of several sets of collectives, one that also fits the optional paths of `forward` wins.
        """
        refused: tuple[CannotFollow, CannotFollow | None] | None = None
        fitting: tuple[dict[str, ModuleRequests], ShardingResult] | None = None
        # States that failed: repairs that start alike coincide at first, and need no second run.
        tried: list[tuple[dict[str, ModuleRequests], CannotFollow]] = []
        starts = list(self.inference.starts(self.states, self._asked().layers))
        at_borders, at_gradients, at_values, by_gathers = range(4)
        first = itertools.product(starts, (at_borders, at_gradients, at_values))
        for states, way in (*first, *((states, by_gathers) for states in starts)):
            if way == at_gradients and fitting is None:
                continue  # helps only where a set that fits the main path fails on another
            repaired: dict[str, ModuleRequests] | None = states
            failed: CannotFollow | None = None
            before: CannotFollow | None = None
            while repaired is not None:
                self.states = repaired
                asked = self._asked()
                failed = next((error for those, error in tried if those == repaired), None)
                if failed is None:
                    try:
                        followed = self._checked(run, asked)
                        if not followed.misfits or not self.inference.causes:
                            return followed
                        fitting = fitting or (self.states, followed)
                        failed = _without_frames(followed.misfits[0])
                        tried.append((repaired, failed))
                    except CannotFollow as error:
                        failed = _without_frames(error)
                        tried.append((repaired, failed))
                modes = {at_gradients: ("bwd_post",), at_values: ("bwd_post", "fwd_post")}
                values = (m for m in failed.at_values if m.mode in modes.get(way, ()))
                missing = next(filter(None, (at_statement(self.files, m) for m in values)), None)
                if way == by_gathers:
                    gather = self.inference.gather_instead(asked.layers, failed)
                    missing = failed.to_gather or gather
                repaired = self.inference.mended(self.states, asked.layers, failed, missing)
                before = failed if repaired is not None else before
            assert failed is not None
            refused = refused or (failed, before)
        if fitting is not None:
            self.states, followed = fitting
            return followed
        assert refused is not None
        raise self._unfollowable(*refused) from None

    def _checked(self, run: Follow, asked: ShardingRequest) -> ShardingResult:
        """The analysis; sums the gradient of a value that several layers read once if that fits.

        Megatron-LM does so in front of queries, keys and values. The sum goes to the module around
        the layers, or to the value inside it. All groups are tried together, then each by itself.
        """
        if not _needs_following(asked):
            return ShardingResult()
        followed = run(asked)
        if not self.sums_once:
            return followed
        groups = self.inference.reading_alike(self.states, followed.readers.values())
        for some in (groups, *([group] for group in groups)):
            if not any(self.inference.summed_apart(self.states, layers) for _, layers in some):
                continue
            once = self.states
            for path, layers in some:
                if path:  # the model itself has no module around it
                    remedy = MissingCollective.gradient_of(path)
                    once = self.inference.summed_once(once, layers, remedy)
            fits = self._fits(run, once, followed) if once is not self.states else None
            if fits is None and len(some) == 1 and self.inference.is_one_place(some[0][0]):
                at_value = self._summed_at_value(run, *some[0])
                fits = self._fits(run, at_value, followed) if at_value is not None else None
            followed = fits or followed
        return followed

    def _fits(
        self, run: Follow, states: dict[str, ModuleRequests], known: ShardingResult
    ) -> ShardingResult | None:
        """The analysis of other states, which then replace the current ones; None if they misfit.

        They do not fit either if more parameters would need summed gradients than in `known`.
        """
        before, self.states = self.states, states
        try:
            followed = run(self._asked())
            if followed.shared.keys() <= known.shared.keys():
                self.has_summed_once = True
                return followed
        except CannotFollow:
            pass
        self.states = before
        return None

    def _summed_at_value(
        self, run: Follow, path: str, layers: Set[str]
    ) -> dict[str, ModuleRequests] | None:
        """The states with one gradient sum, at a value inside a module, in place of the layers'."""
        before = self.states
        self.states = self.inference.summed_once(before, layers, None)
        try:
            run(self._asked())
        except CannotFollow as error:
            own = (at_statement(self.files, m) for m in error.at_values if m.path == path)
            value = next(filter(None, own), None)
        else:
            value = None
        self.states = before
        return self.inference.summed_once(before, layers, value) if value is not None else None

    def _unfollowable(
        self, error: CannotFollow, before: CannotFollow | None
    ) -> errors.UnfollowableSize:
        """The error for the user; `before` is the last error that a collective fixed."""
        at = self.files.span(error.place) if error.place is not None else None
        shares = [share.cause.at for state in self.states.values() for share in state.shares]
        syncs = (sync for path in error.twice for sync in self.states.get(path, EMPTY).syncs)
        twice = [sync.cause.at for sync in syncs if sync.mode == "bwd_post"]
        causes = (self._sync_line(error.sync), *twice, self._a_cause(error.path), *shares)
        places = list(dict.fromkeys(p for p in (at, *causes) if p is not None))
        hint = error.hint
        if gather := self.inference.gather_instead(self._asked().layers, error):
            line = f'.sync("fwd_post", "all_gather", axis={gather.axis})'
            hint = f"gather the value that it is computed from: {line} on `{gather.path}`"
        elif sum_line := self._sum_of_argument(error):
            hint = f"add it up: {sum_line}"
        if hint and error.remedy is not None and error.sync is None and not self.inference.causes:
            hint = f"`s.infer_sync()` after the shards adds missing collectives. By hand: {hint}"
        # The error may only follow from a gather that was inferred to fix an earlier one.
        if before is not None and (gather := before.remedy) and gather.operation == "all_gather":
            since = f"the output of `{gather.path}` was gathered because {before}"
            hint = f"{hint}; {since}" if hint else since
            if before.place is not None:
                places.insert(1, replace(self.files.span(before.place), note="gathered for this"))
        return errors.UnfollowableSize(
            str(error).replace("``", "`s`"),
            at=places[0] if places else None,
            also=places[1:],
            hint=hint,
        )

    def _sum_of_argument(self, error: CannotFollow) -> str | None:
        """The schedule line that sums an argument's gradient, if a sync at the border cannot."""
        remedy, given = error.remedy, next(iter(error.at_values), None)
        if remedy is None or given is None or given.value is None or given.mode != "bwd_post":
            return None
        stated = any(s.mode == remedy.mode for s in self.states.get(remedy.path, EMPTY).syncs)
        node = self.tree.nodes[given.path]
        names = list(inspect.signature(type(node.live).forward).parameters)
        if not (stated or error.hint == COVER) or given.value.name not in names[1:]:
            return None
        of = f', of="{given.value.name}"' if given.value.name != names[1] else ""
        return f's["{with_wildcards(given.path)}"].sync("bwd_post", "all_reduce"{of})'

    def _follow_small(self, small: MakeSmall, error: CannotRun) -> ShardingResult:
        """The analysis of a small model instead; adds a warning if there is none."""
        before, lead = self.states, "the model does not run on the meta device"
        records = self.records.for_small()

        def followed(asked: ShardingRequest) -> ShardingResult:
            return stand_in.propagate(asked, self.files.text_of, records, self.thorough)

        try:
            stand_in = StandIn(self.tree, self.states, small)
            return self._follow(followed)
        except CannotStandIn as why:
            instead = (
                f"a small model cannot be used instead: {why}; define `verify_model(m)` in the "
                "schedule, with an element of each kind"
            )
        except CannotRun as why:
            lead = "the model does not run"
            same = str(why) == str(error)
            instead = "nor does a small one" + ("" if same else f": {str(why).splitlines()[0]}")
        self.states = before
        reason = f"{str(error).splitlines()[0]}; {instead}"
        self.inference.refuse(f"{lead}: {reason}", self._raised_at(error))
        self.warnings.append(
            f"{lead}, so sizes inside `forward` were not followed ({reason}); `--verify` checks "
            "the result"
        )
        return ShardingResult()

    def _raised_at(self, error: CannotRun) -> list[errors.Span]:
        """The line of the model file at which it failed; empty if the call itself was wrong."""
        file = self.files.main.file
        home = os.path.realpath(file.path)
        frames = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
        lines = [f.lineno for f in frames if f.lineno and os.path.realpath(f.filename) == home]
        if not lines:
            return []
        line = lines[-1]
        return [errors.Span.of_line(file.display, line, file.line(line), "it stops here")]

    def _sync_line(self, sync: tuple[str, int] | None) -> errors.Span | None:
        """The schedule line of a collective; None for one that was only tried."""
        state = self.states.get(sync[0]) if sync else None
        if state is None or sync is None or sync[1] >= len(state.syncs):
            return None
        return state.syncs[sync[1]].cause.at

    def _a_cause(self, path: str | None) -> errors.Span | None:
        for candidate in [path] if path is not None else self.states:
            state = self.states.get(candidate)
            causes = state.causes() if state else ()
            if causes:
                return causes[0].at
        return None


def _check_called(path: str, state: ModuleRequests) -> None:
    """Raises if an inlined module has requests that take effect when the module is called."""
    asked = [s.cause for s in (*state.syncs, state.decompose) if s]
    asked += [cause for change, cause in state.asks(Requested) if change.is_called]
    if state.inlined and asked:
        raise errors.ConflictingEdits(
            f"`{path}` is inlined, so it is no longer called",
            at=asked[0].at,
            cause=state.inlined.cause,
            hint="schedule its submodules, or the module that calls it",
        )


def _without_frames(error: CannotFollow) -> CannotFollow:
    """The error without its frames and causes, which keep the run's tensors alive."""
    error.__traceback__ = error.__cause__ = error.__context__ = error.to_scatter = None
    return error


def _needs_following(asked: ShardingRequest) -> bool:
    """Whether any request needs the sharding analysis."""
    known = any(b.operation != "function" for found in asked.borders.values() for b in found)
    return bool(asked.layers or asked.parameters or asked.attributes or known)


def _border(sync: Sync, number: int, value: LocalValue | None) -> ModuleBoundary:
    operation = sync.op if isinstance(sync.op, str) else "function"
    partial = sync.partial_gradient
    return ModuleBoundary(
        sync.mode, operation, sync.axis, sync.scatter_axis, partial, number, sync.of, value
    )
