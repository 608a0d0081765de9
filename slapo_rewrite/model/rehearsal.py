"""The last check before an output is written: it is run, small, against the original.

The static check (`sharding`) judges what the schedule asks for; this judges what came of it. A
small model is built of the original and, once for each rank, of the output. The ranks are threads
of this process, with torch's own group for that. Outputs, loss, the gradient of every parameter and
the buffers after a training step have to be the original's, in float64, in eval mode and in
training, without dropout. It takes the milliseconds that a small model takes, and no process.
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
# What a model may hold, and an input, for a run of it to take no longer than the rewriting.
MOST_PARAMETERS = 3_000_000
# So much is run of what is said to be small already.
MOST_OF_SMALL = 2 * MOST_PARAMETERS
MOST_ELEMENTS = 200_000
# Beyond rounding, that of models that compute parts in float32 included, and below any mistake.
LIMIT = {torch.float64: 1e-3, torch.float32: 2e-2}
NOISE = 0.02  # added to every weight, so that no two parts of a constant one are equal
ROUNDED = torch.finfo(torch.float32).eps  # by which weights are off, to see what rounding does


Changed = Collection[tuple[str, str]]  # of what modules hold: where, and its name


class TooLargeError(Exception):
    """A run of the small model would take longer than the rewriting."""


class NotComparedError(Exception):
    """Nothing is compared with the original's small model, of which it says what it does."""


class DoesNotRunError(NotComparedError):
    """The original's small model does not run on a CPU, in words."""


@dataclass(frozen=True)
class Rehearsed:
    """What a run against the original says of an output that computes the same."""

    # Why no ranks shared the model, in the words of the output, which fits none of the sizes; ""
    # where some did, or nothing is split.
    unfit: str = ""
    # What it was to call, and does not, though it does modules inside.
    uncalled: frozenset[str] = frozenset()
    # Buffers that no state dict holds, and of which the output's constructor makes others.
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

    A model that draws random numbers besides dropout is run in one process: ranks that are threads
    would share them.

    Args:
        schedule: The schedule's module, which builds the models.
        original: The module of the original source.
        output: The output, imported.
        sizes: The world sizes, as `worlds` gives them.
        depth: How many layers a small model has that nobody else defines, at least.
        draws_alike: Whether the constructors draw the same numbers: not so where the schedule
            brings modules along, which draw more or fewer, so that those after them differ.
        is_mixed: Whether the output computes in half precision. It is compared with its casts left
            out, and has to run with them.
        updates: Whether the output's backward pass can update parameters. It is tried so as well.
        called: The paths of modules that are asked for something around their calls.
        check_changed: Is told of each what it holds that is another once the model has run.
        is_compared: Whether the output means the same, or only that is told.

    Raises:
        OtherNumbersError: They differ.
        TooLargeError: The small model is too large to be run.
        NotComparedError: It does not run, or not alike; the weights that it starts with are
            compared all the same.
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
    """A step of the output on every rank is the original's.

    Returns:
        Why it fits none of several ranks, which says so; "" where it was compared.

    Raises:
        OtherNumbersError: It is not.
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
                continue  # few sizes divide by it, and those that do not fail when they are run
            raise
        for step in filter(is_other, steps):
            if is_other(reference.again()):
                raise NotComparedError(
                    "computes something else each time that it is built, of what lies outside of it"
                )
            rounded = reference.again(ROUNDED)
            error, name, what = worst(reference.want, step, rounded)
            if error > limit:
                raise OtherNumbersError(world, name, error, what)
    return str(unfit[0].__cause__) if len(unfit) == len(tried) else ""


def _check_mixed(reference: _Reference, output: Emitted) -> None:
    """With its casts the output runs, and what is a number without them is one."""
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
    """The world sizes that are tried; none for a model that is too large to be run.

    A model with a configuration of Hugging Face is tried on two ranks alone, for time. Of another
    one a small model is looked for, which the schedule's module has from then on.
    """
    if hasattr(getattr(model, "config", None), "to_dict"):
        return WORLD_SIZES[:1]
    return WORLD_SIZES if supply(schedule, module, MOST_PARAMETERS, model) else ()


def not_run(
    schedule: Any, original: types.ModuleType, full: nn.Module, shares: Iterable[Share]
) -> list[str]:
    """The shares that the schedule's own small model has too few modules for, in words."""
    found: list[str] = []
    shares = list(shares)
    if not shares or not hasattr(schedule, "verify_model"):
        return found
    with on_meta(), contextlib.suppress(Exception):  # verification says what is wrong
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
    """What small models are built of."""

    schedule: Any
    original: types.ModuleType
    depth: int = 2

    def build(self, module: types.ModuleType) -> nn.Module:
        """A small model of the original, or of what was made of it."""
        return small_model.build_small(self.schedule, module, self.depth)

    def drawn(
        self, module: types.ModuleType | None = None, seed: int = 0
    ) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """A small model, and the weights that its constructor draws from a seed."""
        small_model.seed_torch(seed)
        model = self.build(module or self.original)
        return model, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@dataclass
class _Reference:
    """What the original's small model computes, with which weights and inputs."""

    small: _Small
    drawn: dict[str, torch.Tensor]  # the weights that its constructor drew
    weights: dict[str, torch.Tensor]  # those that it computes with
    inputs: dict[str, Any]
    dtype: torch.dtype
    want: Step
    # Those that its constructor drew and no state dict holds; empty until they are looked for.
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def _built(self) -> nn.Module:
        """The original's model, built anew, with the weights."""
        model = self.small.drawn()[0].to(self.dtype)
        model.load_state_dict(self.weights)
        return model

    def again(self, rounding: float = 0.0) -> Step:
        """What the original computes when it is built anew, with weights off by such a share."""
        model = self._built()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.randn_like(parameter) * rounding)
        return _step(self.small.schedule, model, self.inputs, None)

    def finds_buffers(self) -> bool:
        """Whether its constructor drew buffers that no state dict holds, which it notes."""
        one, other = (self.small.drawn(seed=seed)[0] for seed in (0, 1))
        others = dict(other.named_buffers())
        self.buffers = {
            name: buffer
            for name, buffer in one.named_buffers()
            if name not in self.weights and error(others[name], buffer)
        }
        return bool(self.buffers)

    def watched(self, paths: Collection[str]) -> tuple[frozenset[str], dict[str, Changed]]:
        """Those not called in training, though modules inside are; what others hold that varies."""
        if not paths:
            return frozenset(), {}
        model, file = self._built().train(), self.small.original
        named = dict(model.named_modules())
        before: dict[str, list[dict[tuple[str, str], bytes]]] = {}

        def note(path: str, module: nn.Module, *_: object) -> None:
            before.setdefault(path, []).append(held(module, file))

        notes = [(named[p], functools.partial(note, p), None) for p in {*paths} & named.keys()]
        with contextlib.suppress(Exception):  # it may mind being watched, or other weights
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
    """What each rank does: it builds a small model of the output, and takes a step with it.

    Helpers of the output keep what they suppose while a model is built in their modules, which
    threads share: one rank builds after the other, and none runs before all are built.
    """

    def __init__(self, reference: _Reference, output: Emitted, world: int, updates: bool) -> None:
        self.reference, self.output, self.world, self.updates = reference, output, world, updates
        self.building, self.built = threading.Lock(), threading.Barrier(world)
        self.build: Callable[[], nn.Module] | None = None

    def __call__(self, turn: threading.Lock) -> Step:
        """The step, with the original's weights; `turn` is held by the rank that computes."""
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
        """Raises UnfitError where a helper says that the size does not fit."""
        if isinstance(error, ValueError) and self.output.is_of_helper(error):
            raise UnfitError from error


def _references(small: _Small) -> list[_Reference]:
    """Steps of the original's small model.

    One with a mask and a cache in double precision is enough: what these need single precision for
    is compared without them as well, as no other comparison is as sharp.
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
    """A step of the original's small model; None where one with a mask says nothing."""
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
        # Equal NaNs are equal, so a step with a mask says nothing where that makes some.
        if not whole or all(bool(g.isfinite().all()) for g in want.gradients.values()):
            return _Reference(small, drawn, weights, inputs, dtype, want)
    if len(fails) == len(LIMIT):
        raise DoesNotRunError(first_line(fails[0])) from fails[0]
    return None


def _check_start(small: _Small, drawn: Mapping[str, torch.Tensor] | None, output: Emitted) -> None:
    """In one process the output draws the weights that the original draws."""
    try:
        wanted = drawn if drawn is not None else small.drawn()[1]
        model, found = small.drawn(output.module)
    except Exception:  # it may be made for several ranks alone; what fails there is told there
        return
    maps = _helper(output, "weight_maps")
    own = tuple(maps(model)) if maps else ()
    for name, want in wanted.items():
        have = found.get(name)
        if have is None or have.shape != want.shape or name.startswith(own):
            continue
        if want.is_meta:  # of a layer that a cached function made once, without memory
            continue
        if not torch.equal(have, want) and error(want, have):
            again = small.drawn()[1]
            if torch.equal(again[name], want):
                raise OtherStartError(1, name, error(want, have), "it starts otherwise:")


def _helper(output: Emitted, name: str) -> Callable[..., Any] | None:
    """A function of the output's `loading`, or of its one file."""
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
        # Last, as what a backward pass does a second time shows in what comes next.
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
    """The backward pass inside updates the parameters, which have their values again behind it.

    `grads` gets the gradients, which the updates drop.
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
    """The loss, if there is one, and what the backward pass starts from."""
    try:
        loss = small_model.loss_of(schedule, outputs, inputs)
    except Exception:  # there need not be one, and the schedule's may want other outputs
        # Than the original's, that is, or targets that it alone is given.
        takes = small_model.loss_parameters(schedule).keys()
        if want is None and hasattr(schedule, "loss") and takes <= inputs.keys():
            raise
        loss = None
    return loss, loss if loss is not None else _goal(outputs, want.outputs if want else outputs)


def _goal(outputs: Any, like: Any) -> torch.Tensor | None:
    """A number that every element of the outputs takes part in; None where some are parts."""
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
    """Nothing is dropped at random: ranks need not draw the numbers that the original draws.

    The functions themselves are exchanged, for all threads: modes do not reach what is computed
    again in a backward pass.
    """
    functions: Any = torch.nn.functional
    attend = functions.scaled_dot_product_attention

    def keep(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        share = 1 - p / 2 if training else 1  # so that another rate gives other numbers
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
