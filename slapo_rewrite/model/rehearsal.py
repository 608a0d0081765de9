"""The last check before an output is written: runs a small model of it against the original.

The static check (`sharding`) judges what the schedule asks for; this one judges the result. A small
model is built from the original and, once for each rank, from the output. The ranks are threads of
this process, which torch provides a process group for. Outputs, loss, the gradient of every
parameter and the buffers after a training step must equal the original's, in float64, in eval mode
and in training, without dropout. It takes milliseconds, and no further process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from slapo_rewrite.directive import Share, depth_of
from slapo_rewrite.errors import first_line
from slapo_rewrite.model import small_model
from slapo_rewrite.model.calls import calls_noted, calls_watched
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.held_state import held
from slapo_rewrite.model.meta_build import on_meta
from slapo_rewrite.model.results import in_dtype, result_pairs, tensors
from slapo_rewrite.model.simulated_ranks import PATIENCE_S, UnfitError, alone, on_ranks
from slapo_rewrite.model.small_arguments import supply
from slapo_rewrite.model.step_results import (
    HalfPrecisionError,
    OtherNumbersError,
    OtherStartError,
    OtherUpdateError,
    Step,
    error,
    worst,
)

WORLD_SIZES = (2, 3, 4)
# The largest model and input whose run takes no longer than the rewriting.
MOST_PARAMETERS = 3_000_000
# The largest model that the schedule calls small.
MOST_OF_SMALL = 2 * MOST_PARAMETERS
MOST_ELEMENTS = 200_000
# Above rounding errors, also of models that compute parts in float32, and below real errors.
LIMIT = {torch.float64: 1e-3, torch.float32: 2e-2}
NOISE = 0.02  # added to every weight, so that shards of constant ones differ
ROUNDED = torch.finfo(torch.float32).eps  # the weights' relative error, to see effects of rounding


Changed = Collection[tuple[str, str]]  # state of modules, by place and name


class TooLargeError(Exception):
    """The small model is too large to be run."""


class NotComparedError(Exception):
    """The output cannot be compared with the original's small model; holds the reason."""


class DoesNotRunError(NotComparedError):
    """The original's small model does not run on a CPU; holds the reason."""


@dataclass(frozen=True)
class Rehearsed:
    """The result of the check of an output that computes the same as the original."""

    # The output's error message if it fits none of the world sizes; "" if it fits one, or nothing
    # is sharded.
    unfit: str = ""
    # Expected modules that were not called, although modules inside them were.
    uncalled: frozenset[str] = frozenset()
    # Non-persistent buffers that the output's constructor makes differently.
    apart: tuple[str, ...] = ()


def rehearse(
    schedule: Any,
    original: types.ModuleType,
    output: Emitted,
    sizes: tuple[int, ...],
    depth: int = 2,
    draws_alike: bool = True,
    is_mixed: bool = False,
    updates: bool = False,
    called: Collection[str] = (),
    check_changed: Callable[[str, Changed], None] = lambda *_: None,
    is_compared: bool = True,
) -> Rehearsed:
    """Runs the output's small model against the original's.

    A model that draws random numbers besides dropout is run as one rank only, since ranks that are
    threads share the random generator.

    Args:
        schedule: The schedule's module, which builds the models.
        original: The module of the original source.
        output: The imported output.
        sizes: The world sizes, as `worlds` returns them.
        depth: The least number of layers of a small model, unless the schedule defines it.
        draws_alike: Whether the constructors draw the same random numbers. They do not if the
            schedule inserts modules that draw more or fewer.
        is_mixed: Whether the output computes in half precision. It is compared without its casts,
            and has to run with them.
        updates: Whether the output's backward pass can update parameters. It is tested as well.
        called: The paths of modules that the schedule asks something for around their calls.
        check_changed: Called with the path of each, and its state that a run of the model changes.
        is_compared: Whether the output should be compared, beside these calls.

    Raises:
        OtherNumbersError: The results differ.
        TooLargeError: The small model is too large to be run.
        NotComparedError: The original does not run, or not reproducibly; initial weights are
            compared nevertheless.
    """
    small = _Small(schedule, original, depth)
    casts = small_model.casts_left_out() if is_mixed else contextlib.nullcontext()
    with _quiet(), _without_dropout(), small_model.one_thread(), small_model.drawing(0), casts:
        try:
            references = _references(small) if sizes else []
        except DoesNotRunError:
            if draws_alike:
                _check_start(small, None, output)
            raise
        references = [r for r in references if draws_alike or not r.want.draws]
        if draws_alike and references and is_compared:
            _check_start(small, references[0].drawn, output)
        watched = [each.watched(called) for each in references]
        for path, changed in (each for _, found in watched for each in found.items()):
            check_changed(path, changed)
        references = references if is_compared else []
        unfit = [_check_step(each, output, sizes) for each in references]
        for each in references if updates else ():
            try:
                _check_step(each, output, sizes, updates)
            except OtherNumbersError as differs:
                raise OtherUpdateError(*differs.args) from differs
    if is_mixed and references:
        with _quiet(), _without_dropout(), small_model.one_thread():
            _check_mixed(references[0], output)
    idle = frozenset.intersection(*(u for u, _ in watched)) if watched else frozenset()
    apart = dict.fromkeys(name for each in references for name in each.buffers)
    return Rehearsed(unfit[0] if unfit and all(unfit) else "", idle, tuple(apart))


def _check_step(
    reference: _Reference, output: Emitted, sizes: tuple[int, ...], updates: bool = False
) -> str:
    """Compares a step of the output on every rank with the original's.

    Returns:
        The error message if no world size fits; "" if a step was compared.

    Raises:
        OtherNumbersError: They differ.
        NotComparedError: The original does not compute the same a second time.
    """
    parallel = _helper(output, "to_full") is not None
    unfit: list[UnfitError] = []
    tried = sizes if parallel and not reference.want.draws else (1,)
    limit = LIMIT[reference.dtype]

    def is_other(step: Step) -> bool:
        return worst(reference.want, step)[0] > limit

    def run(world: int) -> list[Step]:
        return on_ranks(world, _Rank(reference, output, world, updates))

    for world in tried:
        try:
            steps = run(world)
            if any(map(is_other, steps)) and reference.finds_buffers():
                steps = run(world)
        except UnfitError as misfit:
            unfit.append(misfit)
            continue
        except OtherNumbersError:
            if world == 3:
                continue  # few sizes are divisible by 3, and others fail at run time
            raise
        for step in filter(is_other, steps):
            if is_other(reference.again()):
                raise NotComparedError(
                    "computes something else each time that it is built, from state outside of it"
                )
            rounded = reference.again(ROUNDED)
            error, name, what = worst(reference.want, step, rounded)
            if error > limit:
                raise OtherNumbersError(world, name, error, what)
    return str(unfit[0].__cause__) if len(unfit) == len(tried) else ""


def _check_mixed(reference: _Reference, output: Emitted) -> None:
    """Checks that the output runs with its casts, and that finite values stay finite."""
    try:
        with torch.random.fork_rng(devices=[]):
            model = reference.small.build(output.module).float()
        model.load_state_dict(reference.weights)
        inputs = in_dtype(reference.inputs, torch.float32)
        step = _step(reference.small.schedule, model, inputs, None)
    except Exception as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        raise HalfPrecisionError(1, "", 1.0, f"it fails in half precision: {words}") from error
    want = reference.want
    pairs = [*result_pairs(want.evaluated, step.evaluated, "")]
    pairs += [*result_pairs(want.outputs, step.outputs, "")]
    pairs += [(n, g, step.gradients[n]) for n, g in want.gradients.items() if n in step.gradients]
    for name, one, other in pairs:
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if both and bool(one.isfinite().all()) and not bool(other.isfinite().all()):
            raise HalfPrecisionError(1, name, 1.0, "something overflows in half precision:")


def worlds(schedule: Any, module: types.ModuleType, model: nn.Module) -> tuple[int, ...]:
    """The world sizes to test; none for a model that is too large to be run.

    A model with a Hugging Face configuration is tested on two ranks only, to save time. For other
    models this looks for a small model, and adds it to the schedule's module.
    """
    if hasattr(getattr(model, "config", None), "to_dict"):
        return WORLD_SIZES[:1]
    return WORLD_SIZES if supply(schedule, module, MOST_PARAMETERS, model) else ()


def not_run(
    schedule: Any, original: types.ModuleType, full: nn.Module, shares: Iterable[Share]
) -> list[str]:
    """Messages about shares for which the schedule's own small model has too few modules."""
    found: list[str] = []
    shares = list(shares)
    if not shares or not hasattr(schedule, "verify_model"):
        return found
    with on_meta(), contextlib.suppress(Exception):  # verification reports errors
        small = small_model.build_small(schedule, original, depth_of(shares))
        for share in shares:
            models = (small, full)
            few, many = (len(list(m.get_submodule(share.path).children())) for m in models)
            taken, of_all = len(share.elements(few)), len(share.elements(many))
            if taken in (0, few) and of_all not in (0, many):
                how = "all" if taken else "none"
                found.append(
                    f"`{share}` takes {how} of the {few} modules that `verify_model(m)` builds, so "
                    f"that is all that verification runs: build {depth_of([share])} or more"
                )
    return found


@dataclass(frozen=True)
class _Small:
    """Builds small models."""

    schedule: Any
    original: types.ModuleType
    depth: int = 2

    def build(self, module: types.ModuleType) -> nn.Module:
        """A small model of the original's module, or of the output's."""
        return small_model.build_small(self.schedule, module, self.depth)

    def drawn(
        self, module: types.ModuleType | None = None, seed: int = 0
    ) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """A small model, and the weights that its constructor draws from a seed."""
        small_model.seed_torch(seed)
        with small_model.drawing_beside_torch(seed):
            model = self.build(module or self.original)
        return model, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@dataclass
class _Reference:
    """The results of the original's small model, with its weights and inputs."""

    small: _Small
    drawn: dict[str, torch.Tensor]  # the weights that its constructor drew
    weights: dict[str, torch.Tensor]  # the weights that it computes with
    inputs: dict[str, Any]
    dtype: torch.dtype
    want: Step
    # Non-persistent random buffers of its constructor; empty until `finds_buffers`.
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def _built(self) -> nn.Module:
        """Builds the original's model again, with the weights."""
        model = self.small.drawn()[0].to(self.dtype)
        model.load_state_dict(self.weights)
        return model

    def again(self, rounding: float = 0.0) -> Step:
        """The results of the original, built again, with random relative errors of the weights."""
        model = self._built()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.randn_like(parameter) * rounding)
        return _step(self.small.schedule, model, self.inputs, None)

    def finds_buffers(self) -> bool:
        """Whether the constructor makes random non-persistent buffers; stores them in `buffers`."""
        one, other = (self.small.drawn(seed=seed)[0] for seed in (0, 1))
        others = dict(other.named_buffers())
        self.buffers = {
            name: buffer
            for name, buffer in one.named_buffers()
            if name not in self.weights and error(others[name], buffer)
        }
        return bool(self.buffers)

    def watched(self, paths: Collection[str]) -> tuple[frozenset[str], dict[str, Changed]]:
        """Modules not called in training, though modules inside are; and the state that changes."""
        if not paths:
            return frozenset(), {}
        model, file = self._built().train(), self.small.original
        named = dict(model.named_modules())
        before: dict[str, list[dict[tuple[str, str], bytes]]] = {}

        def note(path: str, module: nn.Module, *_: object) -> None:
            before.setdefault(path, []).append(held(module, file))

        notes = [(named[p], functools.partial(note, p), None) for p in {*paths} & named.keys()]
        with contextlib.suppress(Exception):  # hooks or other weights may break it
            with calls_noted(named) as ran:
                model(**copy.deepcopy(self.inputs))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + NOISE)
            with calls_watched(notes):
                model(**copy.deepcopy(self.inputs))
        changed: dict[str, Changed] = {
            path: {k for each in had for k in each if each[k] != now.get(k)}
            for path, had in before.items()
            if (now := held(named[path], file))
        }
        idle = named.keys() & {*paths} - {*ran}
        inside = (p for p in idle if any(inner.startswith(f"{p}.") for inner in ran))
        return frozenset(inside), changed


class _Rank:
    """The code of each rank: builds a small model of the output, and runs a step.

    While a model is built, helpers of the output keep state in their modules, which threads share.
    So one rank builds after the other, and none runs before all are built.
    """

    def __init__(self, reference: _Reference, output: Emitted, world: int, updates: bool) -> None:
        self.reference, self.output, self.world, self.updates = reference, output, world, updates
        self.building, self.built = threading.Lock(), threading.Barrier(world)
        self.build: Callable[[], nn.Module] | None = None

    def __call__(self, turn: threading.Lock) -> Step:
        """Runs a step with the original's weights; the rank that computes holds `turn`."""
        given, small = self.reference, self.reference.small
        world_of = _helper(self.output, "world_of") if self.world > 1 else None
        made_of = world_of(self.world, dist.get_rank()) if world_of else contextlib.nullcontext()
        try:
            with self.building, turn, alone(), made_of:
                if self.build is None:
                    self.build = small_model.small_builder(
                        small.schedule, self.output.module, small.depth
                    )
                small_model.seed_torch(0)
                model = self.build().to(given.dtype)
                model.load_state_dict(given.weights)
                if take := _helper(self.output, "take_tensors"):
                    take(model, given.buffers)
        except BaseException as error:
            self.built.abort()
            self._tell(error)
            raise
        self.built.wait(PATIENCE_S)
        with turn:
            try:
                return _step(
                    small.schedule, model, given.inputs, self.output, given.want, self.updates
                )
            except ValueError as error:
                self._tell(error)
                raise

    def _tell(self, error: BaseException) -> None:
        """Raises UnfitError if a helper raised the error because a size does not fit."""
        if isinstance(error, ValueError) and self.output.is_of_helper(error):
            raise UnfitError from error


def _references(small: _Small) -> list[_Reference]:
    """Runs steps of the original's small model.

    One step with a mask and a cache in float64 is enough. If those need float32, a step without
    them is added, since a comparison in float64 is the most precise.
    """
    ways = (False,) if hasattr(small.schedule, "inputs") else (True, False)
    found: list[_Reference] = []
    why: DoesNotRunError | None = None
    for whole in ways:
        try:
            reference = _reference(small, whole)
        except TooLargeError:
            if whole:  # without them inputs may be smaller
                continue
            raise
        except DoesNotRunError as error:
            why = error
            continue
        found += [reference] if reference is not None else []
        if reference is not None and reference.dtype == torch.float64:
            break
    if why and not found:
        raise DoesNotRunError(f"does not run: {why}") from why.__cause__
    return found


def _reference(small: _Small, whole: bool) -> _Reference | None:
    """Runs a step of the original's small model; None if a mask makes its gradients NaN."""
    fails: list[Exception] = []
    for dtype in LIMIT:
        try:
            model, drawn = small.drawn()
            model = model.to(dtype)
            inputs = in_dtype(small_model.training_inputs(small.schedule, model, whole), dtype)
            elements = sum(tensor.numel() for tensor in tensors(inputs))
            size = sum(p.numel() for p in model.parameters())
            if size > MOST_OF_SMALL or elements > MOST_ELEMENTS:
                raise TooLargeError
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * NOISE)
            weights = copy.deepcopy(model.state_dict())
            want = _step(small.schedule, model, inputs, None)
        except TooLargeError:
            raise
        except Exception as error:  # whatever the user's model does
            fails.append(error)
            continue
        # NaNs compare equal, so a step whose mask produces NaNs would hide differences.
        if not whole or all(bool(g.isfinite().all()) for g in want.gradients.values()):
            return _Reference(small, drawn, weights, inputs, dtype, want)
    if len(fails) == len(LIMIT):
        raise DoesNotRunError(first_line(fails[0])) from fails[0]
    return None


def _check_start(small: _Small, drawn: Mapping[str, torch.Tensor] | None, output: Emitted) -> None:
    """Checks that the output, as one rank, initialises the same weights as the original."""
    try:
        wanted = drawn if drawn is not None else small.drawn()[1]
        model, found = small.drawn(output.module)
    except Exception:  # it may work on several ranks only; the step reports errors
        return
    maps = _helper(output, "weight_maps")
    own = tuple(maps(model)) if maps else ()
    for name, want in wanted.items():
        have = found.get(name)
        if have is None or have.shape != want.shape or name.startswith(own):
            continue
        if want.is_meta:  # a cached layer that was made on the meta device
            continue
        if not torch.equal(have, want) and error(want, have):
            again = small.drawn()[1]
            if torch.equal(again[name], want):
                raise OtherStartError(1, name, error(want, have), "it starts otherwise:")


def _helper(output: Emitted, name: str) -> Callable[..., Any] | None:
    """A function of the output's `loading`, or of its single file."""
    for module in (output.helper("loading"), output.module):
        found: Callable[..., Any] | None = getattr(module, name, None)
        if found is not None:
            return found
    return None


def _step(
    schedule: Any,
    model: nn.Module,
    inputs: dict[str, Any],
    output: Emitted | None,
    want: Step | None = None,
    updates: bool = False,
) -> Step:
    inputs = copy.deepcopy(inputs)
    full = _helper(output, "to_full") if output is not None else None

    def whole(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return full(model, named) if full is not None else named

    draws = want is None or want.draws
    with small_model.drawing(0) if draws else contextlib.nullcontext():
        before = small_model.random_states() if draws else ()
        model.train()
        outputs = model(**copy.deepcopy(inputs))
        loss, goal = _goals(schedule, outputs, inputs, want)
        grads: dict[str, torch.Tensor] = {}
        if goal is not None and goal.requires_grad:
            with _updated(model, grads) if updates else contextlib.nullcontext():
                torch.autograd.backward(goal)
        # Comes last, so that side effects of recomputation in the backward pass show here.
        model.eval()
        with torch.no_grad():
            evaluated = model(**inputs)
        draws = draws and small_model.random_states() != before
    grads |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    grads = {name: gradient.to_dense() for name, gradient in grads.items()}  # some are sparse
    zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters() if n not in grads}
    with torch.no_grad():
        return Step(
            evaluated,
            outputs,
            loss,
            whole({**zeros, **grads}) if goal is not None else {},
            whole({n: b for n, b in model.state_dict().items() if n not in zeros | grads}),
            draws,
        )


@contextlib.contextmanager
def _updated(model: Any, grads: dict[str, torch.Tensor]) -> Iterator[None]:
    """Updates parameters in the backward pass, and restores their values afterwards.

    `grads` receives the gradients, which the updates free.
    """
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def optimizer(name: str, parameter: nn.Parameter) -> torch.optim.Optimizer:
        def note(*_: object) -> None:
            if parameter.grad is not None:
                grads[name] = parameter.grad.clone()

        made = torch.optim.SGD([parameter], lr=1.0)
        made.register_step_pre_hook(note)
        return made

    model.step_in_backward(optimizer)
    yield
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])


def _goals(
    schedule: Any, outputs: Any, inputs: dict[str, Any], want: Step | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The loss, if there is one, and the scalar that the backward pass starts from."""
    try:
        loss = small_model.loss_of(schedule, outputs, inputs)
    except Exception:  # a loss is optional, and the schedule's may not fit the output's results
        # For the original it must work, unless it needs targets that only the user has.
        takes = small_model.loss_parameters(schedule).keys()
        if want is None and hasattr(schedule, "loss") and takes <= inputs.keys():
            raise
        loss = None
    return loss, loss if loss is not None else _goal(outputs, want.outputs if want else outputs)


def _goal(outputs: Any, like: Any) -> torch.Tensor | None:
    """A scalar that depends on every element of the outputs; None if some are shards."""
    terms = []
    for _, want, have in result_pairs(like, outputs, ""):
        if not isinstance(have, torch.Tensor) or not have.is_floating_point():
            continue
        if want.shape != have.shape:
            return None
        weights = torch.arange(have.numel(), dtype=torch.float64).cos().to(have)
        terms.append((have.flatten() * weights).sum())
    return sum(terms[1:], terms[0]) if terms else None


@contextlib.contextmanager
def _without_dropout() -> Iterator[None]:
    """Replaces dropout by scaling: ranks need not draw the same numbers as the original.

    The functions themselves are patched, for all threads, since function modes do not apply to
    recomputation in a backward pass.
    """
    functions: Any = torch.nn.functional
    attend = functions.scaled_dot_product_attention

    def keep(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        share = 1 - p / 2 if training else 1  # another rate gives other numbers
        return input if share == 1 else input.mul_(share) if inplace else input * share

    def attention(*args: Any, **kwargs: Any) -> Any:
        rate = args[4] if args[4:] else kwargs.pop("dropout_p", 0.0)
        result = attend(*args[:4], *([0.0] if args[4:] else []), *args[5:], **kwargs)
        return result * (1 - rate / 2)

    instead: dict[str, Any] = {name: keep for name in vars(functions) if "dropout" in name}
    instead["scaled_dot_product_attention"] = attention
    with mock.patch.multiple(functions, **instead):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
