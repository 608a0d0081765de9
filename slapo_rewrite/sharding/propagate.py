"""The search for the changes that make a rank's run consistent with the whole model's run.

The model runs whole once, and then as rank 0 of a simulated group. Where an operation does not fit,
the error names attributes that may have to be this rank's share, or parameters whose gradients need
an all-reduce. These are tried in turn until a run fits; else the furthest error is raised.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from slapo_rewrite.code.blocks import first_line
from slapo_rewrite.code.dataflow import read_in
from slapo_rewrite.code.syntax import (
    changing_in_tests,
    machine_in_tests,
    names_in_tests,
    sizes_in_tests,
)
from slapo_rewrite.model.meta_device import KnownResults, NeedsGraph, pretend_world
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.small_model import drawing
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.sharding.decorated_forward import (
    never_run,
    noting,
    wrapped_code,
    wrapped_forwards,
)
from slapo_rewrite.sharding.install import installed
from slapo_rewrite.sharding.kv_replication import fewer_heads
from slapo_rewrite.sharding.local_values import missing_at
from slapo_rewrite.sharding.module_state import state_kept
from slapo_rewrite.sharding.operation_places import place_in_traceback, raised_by
from slapo_rewrite.sharding.output_check import compare_buffers, compare_outputs, kept_buffers
from slapo_rewrite.sharding.parameter_reads import noted_readings
from slapo_rewrite.sharding.placements import PlacementError, State
from slapo_rewrite.sharding.rank_arguments import INFERRED, SHARE
from slapo_rewrite.sharding.rank_run import RankRun
from slapo_rewrite.sharding.rank_state import Hypothesis, Run
from slapo_rewrite.sharding.trace import Trace, Whole, device_of
from slapo_rewrite.sharding.types import (
    CannotFollow,
    CannotRun,
    Diverged,
    Indivisible,
    ShardingRequest,
    ShardingResult,
    Way,
    layer_key,
)

# Finders of branches in a `forward` that were followed one way only, and what these depend on.
_TESTS = {
    sizes_in_tests: "sizes, and only the sizes of inputs(model) were followed",
    machine_in_tests: "device or dtype, and only float32 on the CPU was followed",
    changing_in_tests: "the state that earlier calls left, and only a first call was followed",
}


_parsed = functools.lru_cache(maxsize=4)(ast.parse)


@dataclass
class Records:
    """Caches and settings for one model and its inputs."""

    # Runs of the whole model, by the path through it and the identities of its modules in order:
    # some modules are left out at times.
    runs: dict[tuple[Way, tuple[int, ...]], Trace] = field(default_factory=dict)
    # The same for paths on which the model does not run.
    blocked: dict[tuple[Way, tuple[int, ...]], CannotRun] = field(default_factory=dict)
    results: KnownResults = field(default_factory=KnownResults)  # cached results of operations
    # The world sizes to try until one divides every number of heads.
    worlds: tuple[int, ...] = (2, 3, 4, 5, 7, 8)
    # Whether to follow further paths through `forward`, which only add changes and warnings.
    has_ways: bool = True
    # Whether to record calls of all layers that can be sharded, if many requests follow. Kernels
    # notice that a layer is watched, and may then call it instead of using its weight.
    of_all: bool = False
    # A model with more operations counts as one that does not run. None: no limit.
    most: int | None = None
    of_small: Records | None = None  # those of the small model that stands in for this one

    def for_small(self) -> Records:
        """The records of the small model, created once."""
        self.of_small = self.of_small or Records(has_ways=self.has_ways, of_all=self.of_all)
        return self.of_small


def propagate(
    tree: Tree,
    request: ShardingRequest,
    inputs: Mapping[str, Any],
    editable: Callable[[str], str | None],
    records: Records,
    thorough: bool = True,
) -> ShardingResult:
    """Finds what has to change in the model for the sharded sizes.

    Args:
        tree: The model, on the meta device or a small one with weights; it is restored afterwards.
        request: What is sharded and synchronised.
        inputs: Keyword arguments of one training step.
        editable: Returns the current text of a file that may be changed; None for other files.
        records: Caches for the tree and the inputs; this call adds to them.
        thorough: Whether to follow eval mode and a group of another size as well.

    Raises:
        CannotRun: The whole model does not run.
        CannotFollow: Something does not fit the sharded sizes.
    """
    model = tree.root.live
    device = device_of(model)
    given = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), dict(inputs))
    training = model.training
    try:
        return _Propagation(tree, request, given, editable, records, thorough).run()
    except NeedsGraph:
        records.runs.clear()
        records.results.is_used = False
        return _Propagation(tree, request, given, editable, records, thorough).run()
    finally:
        model.train(training)


class _Incomplete(Exception):
    """A run found more than it assumed: gradients to sum, biases that one rank must add.

    Attributes:
        guess: The assumptions with these added.
        position: The number of operations that fitted.
    """

    def __init__(self, guess: Hypothesis, position: int) -> None:
        super().__init__()
        self.guess, self.position = guess, position


class _Propagation:
    """Runs the model whole once, then as a rank until everything fits."""

    def __init__(
        self,
        tree: Tree,
        request: ShardingRequest,
        inputs: Mapping[str, Any],
        editable: Callable[[str], str | None],
        records: Records,
        thorough: bool,
    ) -> None:
        self.thorough = thorough
        self.tree, self.request, self.inputs, self.editable = tree, request, inputs, editable
        self.model, self.device = tree.root.live, device_of(tree.root.live)
        self.sources: dict[tuple[str, str], str | None] = {}
        self.wrapped = wrapped_forwards(tree, request)
        self.records = records
        self.way, self.has_coins = Way(), False
        self.whole = self._whole(self.way)
        self.guess = Hypothesis()

    def run(self) -> ShardingResult:
        indivisible: Indivisible | None = None
        for world in self.records.worlds:
            try:
                with pretend_world(world):
                    followed = self._search(Hypothesis())
                    if self.records.has_ways:
                        followed = self._other_ways(followed, self.guess)
                if self.thorough:
                    self._check_on_more_ranks(self.guess, world)
                if not self.records.has_ways:
                    return followed
                self._note_choices(followed)
                return self._with_replicas(followed)
            except Indivisible as error:
                indivisible = indivisible or error
            except Diverged:
                if indivisible is None:
                    raise
                break
        assert indivisible is not None
        raise CannotFollow(str(indivisible), place=indivisible.place, hint=indivisible.hint)

    def _whole(self, way: Way) -> Whole:
        """The whole model's run on one path through it, recorded once."""
        # A module may be at several places: some elements of lists stand in for others.
        places = self.model.named_modules(remove_duplicate=False)
        key = way, tuple(id(module) for _, module in places)
        if key in self.records.blocked:
            raise self.records.blocked[key]
        wanted = {forward.code for forward in self.wrapped.values()}
        watched = set(self.request.layers)
        trace = self.records.runs.get(key)
        if trace is None or not trace.tells(wanted, watched):
            if trace is not None:  # record again, with everything that later requests may need
                classes = {node.cls for node in self.tree.nodes.values()}
                wanted |= {code for cls in classes if (code := wrapped_code(cls)) is not None}
                watched |= trace.watched or set()
            try:
                known = None if self.records.of_all else watched
                trace = self.records.runs[key] = self._recorded(wanted, known, way)
            except CannotRun as error:
                self.records.blocked[key] = error
                raise
        for path, forward in self.wrapped.items():
            if forward.code not in trace.ran:
                raise never_run(self.tree.nodes[path], forward)
        return trace.around(self.request.layers)

    def _other_ways(self, followed: ShardingResult, guess: Hypothesis) -> ShardingResult:
        """Adds what has to change on other paths through `forward`."""
        ways = [Way(training=False)] if self.thorough else []
        ways += [Way(flag=flag) for flag in self._flags()]
        if followed.questions and self.device.type == "meta":
            ways.append(Way(says=True))
        main = self.way, self.whole
        for way in ways:
            try:
                self.way, self.whole = way, self._whole(way)
                if way.training is False and self.whole.same_calls(main[1]):
                    continue
                further = self._search(guess)
                if further.sizes != followed.sizes or not followed.take_in(further):
                    raise CannotFollow("other sizes have to become a rank's share")
            except CannotRun as error:
                if not error.raised:
                    followed.unfollowed.append((f"{way} the model does not run: {error}", None))
            except CannotFollow as error:
                if not way.training:
                    error.args = (f"{error} ({way})",)
                    raise
                followed.unfollowed.append(
                    (f"{way} the output would be wrong: {error}", error.place)
                )
                followed.misfits.append(error)
            finally:
                self.way, self.whole = main
                self.guess = guess
        return followed

    def _flags(self) -> Iterator[tuple[str, bool]]:
        """The boolean arguments that `inputs` leaves out, each with the opposite of its default.

        A default of None stands for the configuration's value, as with `output_router_logits`; its
        opposite is taken if the model's own `forward` branches on the argument.
        """
        asked = functools.cache(lambda: self._names_in(type(self.model), names_in_tests))
        for name, default, kind in self._not_given():
            if isinstance(default, bool):
                yield name, not default
            elif default is None and "bool" in str(kind) and name in asked():
                yield name, not getattr(getattr(self.model, "config", None), name, False)

    def _not_given(self) -> Iterator[tuple[str, Any, Any]]:
        """The arguments that keep their defaults: names, defaults and annotations."""
        forward = inspect.unwrap(type(self.model).forward)
        if not self.editable(getattr(getattr(forward, "__code__", None), "co_filename", "")):
            return
        for name, parameter in inspect.signature(forward).parameters.items():
            if parameter.default is not parameter.empty and name not in self.inputs:
                yield name, parameter.default, parameter.annotation

    def _note_choices(self, followed: ShardingResult) -> None:
        """Records what else `forward` branches on: other arguments, sizes, random numbers."""
        known = hasattr(getattr(self.model, "config", None), "to_dict")
        # A library model's optional arguments are documented there: no warning for these.
        not_given = [
            (name, default)
            for name, default, _ in self._not_given()
            if not isinstance(default, bool) and not (known and default is None)
        ]
        read = self._names_in(type(self.model), read_in) if not_given else ()
        classes = {node.cls: None for node in self.tree.nodes.values()}
        request = set[str]()
        for cls in classes if any(name in read for name, _ in not_given) else ():
            request |= self._names_in(cls, names_in_tests)
        for name, default in not_given:
            # A callee may branch on it, under this name or another.
            if name in read and (name in request or default is None or isinstance(default, str)):
                words = f"`{name}` decides which branch `forward` takes, and only {default!r} was"
                followed.unfollowed.append((f"{words} followed: give it in inputs(model)", None))
        for names, words in _TESTS.items() if not known else ():
            tests = {test for cls in classes for test in self._names_in(cls, names)}
            for test in sorted(tests):
                decides = f"`{test}` decides which branch `forward` takes, by {words}"
                followed.unfollowed.append((decides, None))
        if self.has_coins:
            words = "random numbers decide which branch `forward` takes, and only one was"
            followed.unfollowed.append((f"{words} followed", None))

    def _names_in(self, cls: type, names: Callable[[ast.AST], Set[str]]) -> Set[str]:
        """Names that `names` finds in a class's `forward`; none if its file is not editable."""
        code: Any = getattr(inspect.unwrap(getattr(cls, "forward", object)), "__code__", None)
        text = self.editable(getattr(code, "co_filename", ""))
        for node in ast.walk(_parsed(text or "")):
            if isinstance(node, ast.FunctionDef) and first_line(node) == code.co_firstlineno:
                return names(node)
        return set()

    def _check_on_more_ranks(self, guess: Hypothesis, world: int) -> None:
        """Repeats the run in a group of another size; raises if that does not fit."""
        other = 4 if world == 2 else 2
        try:
            with pretend_world(other):
                self._attempt(guess)
        except (Indivisible, _Incomplete):
            pass  # the output refuses such a size when the model is built
        except CannotFollow as error:
            if error.__cause__ is None or isinstance(error.__cause__, PlacementError):
                error.args = (f"{error} (on {other} ranks)",)
                raise

    def _call(
        self, way: Way, end: Callable[[], None] = lambda: None
    ) -> tuple[Any, dict[tuple[str, str], torch.Tensor]]:
        """The model's result and its buffers afterwards, on one path through it."""
        self.model.train(way.training)
        with state_kept(self.model), drawing(0):
            before = random.getstate()
            result = self.model(**self.inputs, **dict([way.flag] if way.flag else []))
            self.has_coins |= random.getstate() != before
            end()
            return result, kept_buffers(self.model)

    def _recorded(
        self, wrapped: Collection[CodeType], watched: Collection[str] | None, way: Way
    ) -> Trace:
        known = self.records
        whole = Trace(
            self.tree, known.results, self.editable, wrapped, watched, way.says, known.most
        )
        try:
            with (
                torch.enable_grad(),
                self.device,
                noting(wrapped, whole.ran),
                whole.watching(),
                whole,
            ):
                whole.result, whole.buffers = self._call(way, whole.end)
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {error}", raised_by(error)) from error
        return whole

    def _with_replicas(self, followed: ShardingResult) -> ShardingResult:
        """Adds what has to change on more ranks than key/value heads, which then replicate them.

        If that cannot be followed, world sizes above the number of heads remain unsupported.
        """
        few, world = fewer_heads(self.tree, self.request, followed)
        if followed.replicated or not few:
            return followed
        guess = Hypothesis(
            followed.sizes,
            shared=frozenset(followed.shared),
            summed=followed.summed,
            replicated=frozenset(few.items()),
            repeats=frozenset(followed.may_repeat),
        )
        try:
            with pretend_world(world):
                further = self._search(guess)
        except (CannotFollow, Indivisible):
            return followed
        added = further.arguments - followed.arguments
        makers = {cls for cls, _ in few}
        if (
            further.sizes != followed.sizes
            or any(change.template != INFERRED for change in added)
            or any(attribute.cls not in makers for attribute in further.repeats | further.few)
        ):
            return followed
        few_here = further.few, further.may_repeat
        if not further.take_in(followed):  # adds what the other paths need
            return followed
        further.few, further.may_repeat = few_here
        return further

    def _search(self, wanted: Hypothesis) -> ShardingResult:
        """The first set of assumptions with which everything fits, guided by the errors."""
        try:
            return self._attempt(wanted)
        except _Incomplete as found:
            try:
                return self._search(found.guess)
            except CannotFollow as error:
                error.position = max(error.position, found.position)
                raise
        except CannotFollow as error:
            if error.repeats - wanted.repeats:
                return self._search(replace(wanted, repeats=wanted.repeats | error.repeats))
            if error.single and error.single not in wanted.replicated:
                single = wanted.replicated | {error.single}
                return self._search(replace(wanted, replicated=single))
            furthest, indivisible = error, None
            further = [replace(wanted, sizes=wanted.sizes | {a}) for a in error.attributes]
            if error.attributes and error.changeable:
                further.append(replace(wanted, fixed=wanted.fixed | set(error.attributes)))
            for guess in further:
                try:
                    return self._search(guess)
                except CannotFollow as other:
                    furthest = max(furthest, other, key=_likeliness)
                except Indivisible as other:
                    indivisible = indivisible or other
            raise indivisible or furthest from None

    def _attempt(self, wanted: Hypothesis) -> ShardingResult:
        followed = ShardingResult(
            sizes=wanted.sizes,
            shared={key: self.sources.get(key) for key in sorted(wanted.shared)},
            summed=wanted.summed,
            once={(layer_key(self.tree.nodes[path]), name) for path, name in wanted.once},
            replicated=dict(wanted.replicated),
            repeats=wanted.repeats,
        )
        run = Run(
            self.tree,
            self.request,
            self.whole.entries,
            followed,
            wanted,
            self.editable,
            self.records.results,
            self.way.says,
        )
        try:
            self._run_as_rank(run)
        except CannotFollow:
            self._check_complete(run, wanted)
            raise
        self._check_complete(run, wanted)
        run.note_changed_calls()
        run.note_inner_modules()
        _check_told_apart(followed)
        self.guess = wanted
        return followed

    def _check_complete(self, run: Run, wanted: Hypothesis) -> None:
        """Raises `_Incomplete` if the run found more than it assumed from its beginning."""
        shared = wanted.shared | run.flow.shared.keys()
        summed, once = wanted.summed | run.flow.summed, wanted.once | run.once
        if (shared, summed, once) != (wanted.shared, wanted.summed, wanted.once):
            self.sources.update(run.flow.shared)
            guess = replace(wanted, shared=shared, summed=summed, once=once)
            raise _Incomplete(guess, run.position) from None

    def _run_as_rank(self, run: Run) -> None:
        noting_reads = noted_readings(run) if run.wanted.shared else contextlib.nullcontext()
        try:
            with (
                installed(run, self.device),
                torch.enable_grad(),
                self.device,
                noting_reads,
                RankRun(run),
            ):
                for tensor in tensors(self.inputs):
                    run.flow.set(tensor, State(is_input=True))
                got, buffers = self._call(self.way)
        except CannotFollow as error:
            error.position, error.repeats = run.position, frozenset(run.repeats)
            error.at_values = list(missing_at(run, error))
            raise
        except Indivisible:
            raise
        except PlacementError as error:
            refused = run.refused(error)
            refused.at_values = list(missing_at(run, error))
            refused.repeats = frozenset(run.repeats)
            raise refused from error
        except Exception as error:
            words = f"`forward` does not fit the sharded sizes: {error}".rstrip(": ")
            hint = (
                "if an integer attribute of a module has to be this rank's share, shard the "
                'attribute: .shard("its_name", axis=0)'
            )
            if "TorchScript interpreter" in words:  # which turns our error into its own text
                words = "a TorchScript function gets a part and cannot be followed"
                hint = "leave out `@torch.jit.script`"
            place = place_in_traceback(error, self.editable)
            unfit = CannotFollow(words, place=place, hint=hint)
            unfit.repeats = frozenset(run.repeats)
            raise unfit from error
        compare_outputs(self.whole.result, got, run)
        compare_buffers(self.whole.buffers, buffers, run)


def _likeliness(error: CannotFollow) -> tuple[bool, int]:
    """Sort key of errors to report: those that a collective would fix, then the furthest."""
    return bool(error.remedy or error.at_values), error.position


def _check_told_apart(followed: ShardingResult) -> None:
    """Raises `CannotFollow` if one call needs a rank's share and, at another time, a whole size."""
    both = followed.sharded_calls & followed.replicated_calls
    for change in sorted(followed.arguments, key=lambda c: c.place.at):
        if change.template == SHARE and any(place == change.place for place, _ in both):
            raise CannotFollow(
                "this call gets a part at one time and a whole value at another, and only for the "
                "part its size would have to be a rank's share",
                change.source,
                "write -1 for the size, or write two calls",
                place=change.place,
            )
