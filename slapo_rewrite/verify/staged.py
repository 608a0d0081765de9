"""The original and one pipeline stage, on one rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .engines import ENGINES, RATES, Batch, micro_batches, optimizer_of
from .figures import LARGEST_ROUNDING, Named, difference, gradients_of, parameters_of
from .original import Original, from_all_ranks
from .probes import drawn_alike, dropouts, nudge
from .rank_layout import Layout, Training

STEPS = 5
SEED = 1  # differs from the original's


@dataclass
class Trained:
    """The results of training."""

    losses: list[Tensor]  # the loss of each step
    gradients: Named  # those of the first step, as the optimizer got them
    weights: Named  # the state dict after the last step

    def is_finite(self) -> bool:
        """Whether all losses are finite."""
        return bool(torch.stack(self.losses).isfinite().all())

    def is_like(self, other: Trained) -> bool:
        """Whether the difference to training in float64 is small enough to be rounding alone."""
        pairs = [*zip(self.losses, other.losses, strict=True)]
        pairs += [(self.weights[name], other.weights[name]) for name in self.weights]
        return all(difference(mine, theirs) <= LARGEST_ROUNDING for mine, theirs in pairs)


@dataclass
class Built:
    """How a model was built, and its initial tensors."""

    args: tuple[Any, ...]  # positional arguments of its class
    kwargs: dict[str, Any]  # keyword arguments
    random_state: tuple[Tensor, Any]  # of torch's generator before, and of Python's
    weights: Named  # its state dict after
    unsaved: Named  # its tensors that are in no state dict


class Staged(Original):
    """The original, which rank 0 runs, and the stages, which an engine runs.

    Attributes:
        drawn: The initial weights of the whole rewritten model.
        redrawn: The names of those that its class leaves as memory has them.
        steps: The inputs of each step: the micro-batches of all replicas.
        draws: Whether the original draws random numbers.
    """

    draws = False

    def load(self) -> None:
        """Imports the modules, builds the original, joins the process group, builds the stages."""
        job = self.job
        self.layout, self.training = Layout(**job["layout"]), Training(**job["training"])
        self.engine = ENGINES[job["engine"]](self.layout, self.training, self.rank)
        self.import_all()
        pipeline = importlib.import_module(f"{self.rewritten_module.__package__}.pipeline")
        self.build_original(exactly=self.rank == 0)
        for model in (self.original, self.exact):
            if model is not None:
                self.switch_dropout_off(model)
        self.stage("looking for the model's arguments")
        own = self.rewritten_module.__name__
        kind = next(base for base in pipeline.STAGES[0].__mro__ if base.__module__ == own)
        built = self.built_from(kind)
        is_set = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
        self.drawn, again = built.weights, self.built_from(kind).weights
        torch.use_deterministic_algorithms(is_set)
        self.redrawn = {n for n in again if not torch.equal(again[n], self.drawn[n])}
        for model in (self.original, self.exact):
            if model is not None:  # built from another seed, and loading weights leaves these
                fill_unsaved(model, built.unsaved)
        self.join_group()
        self.stage("building the stages")
        torch.set_rng_state(built.random_state[0])
        random.setstate(built.random_state[1])
        self.engine.build(pipeline, built.args, built.kwargs)
        held = self.engine.stage.float()
        self.switch_dropout_off(held)
        self.draw_alike(self.engine.stage)
        self.hold(held)

    def small(self, module: Any) -> nn.Module:
        """A small model with as many layers as the full one, unless the schedule makes its own."""
        with self.twin.on_meta():
            full = self.schedule.model(module)
        model: nn.Module = self.twin.build_deep(self.schedule, module, full)
        if module is self.original_module and _names(model) != _names(full):
            self.note(
                "the small model has other layers than the model that is cut: build the same "
                "number in verify_model(m) of the schedule"
            )
        return model

    def built_from(self, kind: type) -> Built:
        """Builds the small model, of class `kind`, from the rewritten module; tells how."""
        torch.manual_seed(SEED)
        with _watched(kind) as built, self.twin.drawing_beside_torch(SEED):
            model = self.small(self.rewritten_module)
        return built[id(model)]

    def switch_dropout_off(self, model: nn.Module) -> None:
        """Sets every dropout probability of a model to 0."""
        for holder, name, rate in list(dropouts(model, configs=True, masks=True)):
            if rate > 0:
                self.note("dropout is set to 0 in both models")
            setattr(holder, name, 0.0)

    def make_inputs(self) -> None:
        """Makes the inputs, different ones for each micro-batch of each replica."""
        self.stage("making the inputs")
        count = micro_batches(self.layout) * self.layout.data
        self.steps = [
            [
                self.twin.step_inputs(self.schedule, self.original, seed=count * step + number)
                for number in range(count)
            ]
            for step in range(STEPS)
        ]
        self.draws = self.rank == 0 and self._draws()

    def mine(self, step: list[Batch]) -> list[Batch]:
        """This replica's micro-batches of a step."""
        count = micro_batches(self.layout)
        return step[count * self.engine.replica :][:count]

    def evaluate(self, model: nn.Module) -> Tensor:
        """A model's loss in eval mode, on the first step's micro-batches of all replicas."""
        model.eval()
        try:
            with torch.no_grad(), self.drawn_alike():
                losses = [self._loss(model, inputs) for inputs in self.steps[0]]
            return torch.stack(losses).mean()
        finally:
            model.train()

    def train_original(self) -> tuple[Tensor, Trained]:
        """The original's loss in eval mode and the results of its training.

        If its losses overflow, nothing can be compared, so a lower rate is tried.
        """
        for rate in RATES[RATES.index(self.engine.rate) :]:
            self.engine.rate = rate
            self.original.load_state_dict(self.full)
            loss = self.evaluate(self.original)  # repeated, since a model may count its calls
            want = self.train(self.original)
            if want.is_finite():
                break
        return loss, want

    def train_exactly(self) -> tuple[Tensor | None, Trained | None]:
        """The same as `train_original`, for the model `exact`; None if there is none."""
        if self.exact is not None:
            self.exact.load_state_dict(self.full)
            if self.nudged:
                nudge(self.exact)
        return self.exactly(self.evaluate), self.exactly(self.train)

    def may_train_more_slowly(self, want: Trained, exact: Trained | None) -> bool:
        """Whether rounding errors grew too large and a lower rate is left; sets that then."""
        slower = RATES[RATES.index(self.engine.rate) + 1 :]
        if not slower or exact is None or self.training.bf16 or want.is_like(exact):
            return False
        self.engine.rate = slower[0]
        return True

    def agree(self, is_told: bool = False) -> bool:
        """Sends rank 0's values to all ranks: the rate, and whether the original draws numbers.

        Also `is_told`: whether rank 0 could compare the training. Returns that of rank 0.
        """
        found: list[Any] = [is_told, self.engine.rate, self.draws]
        dist.broadcast_object_list(found)
        is_told, self.engine.rate, self.draws = found
        return is_told

    def tell_rate(self) -> None:
        """Adds a note on the rate of training, if it was lowered."""
        if (rate := self.engine.rate) != RATES[0]:
            self.note(
                f"both were trained at a rate of {rate:g}: at {RATES[0]:g} the original's losses "
                "overflow, or rounding errors become as large as the losses"
            )

    def train(self, model: nn.Module) -> Trained:
        """Trains the original in the same way as the engine trains the stages."""
        rounds = self.training.bf16 and model is self.original
        runs = copy.deepcopy(model).bfloat16() if rounds else model
        optimizer = optimizer_of(model.parameters(), self.engine.rate)
        losses, gradients = [], Named()
        for step in self.steps:
            parts = []
            for inputs in step:
                with self.drawn_alike():
                    loss = self._loss(runs, inputs) / len(step)
                    loss.backward()  # type: ignore[no-untyped-call]
                parts.append(loss.detach())
                if runs is not model:
                    _add_gradients(runs, model)
            if self.training.clipping:
                nn.utils.clip_grad_norm_(model.parameters(), self.training.clipping)
            gradients = gradients or {n: g.clone() for n, g in gradients_of(model).items()}
            optimizer.step()
            optimizer.zero_grad()
            if runs is not model:
                runs.load_state_dict(model.state_dict())
            losses.append(torch.stack(parts).sum())
        return Trained(losses, gradients, runs.state_dict())

    def _loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        with self.twin.drawing(SEED):
            outputs, given = self.outputs(model, inputs)
            loss: Tensor = self.twin.loss_of(self.schedule, outputs, given)
        return loss

    def _draws(self) -> bool:
        """Whether the original draws random numbers in training."""
        model = copy.deepcopy(self.original)  # since a call may change buffers
        with self.twin.drawing(SEED):
            before = self.twin.random_states()
            self.outputs(model, self.steps[0][0])
            return bool(self.twin.random_states() != before)

    def drawn_alike(self) -> contextlib.AbstractContextManager[Any]:
        """Reseeds before each random operation, in the backward pass too, if the model draws."""
        return drawn_alike(SEED) if self.draws else contextlib.nullcontext()

    def draw_alike(self, stage: nn.Module) -> None:
        """Seeds a stage's random numbers anew for each micro-batch, like the original's."""
        calls: list[contextlib.ExitStack] = []

        def before(*_: object) -> None:
            calls.append(contextlib.ExitStack())
            calls[-1].enter_context(self.twin.drawing(SEED))

        stage.register_forward_pre_hook(before)
        stage.register_forward_hook(lambda *_: calls.pop().close())

    def train_stages(self) -> Trained:
        """Trains the stages; gradients are recorded only without ZeRO and bfloat16."""
        gradients: list[Named] = []
        known = not self.training.zero and not self.training.bf16

        def note() -> None:
            if not gradients and known:
                own = gradients_of(self.engine.stage)
                gradients.append({name: gradient.clone() for name, gradient in own.items()})

        self.engine.start(note)
        self.stage("the stages in eval mode")
        with self.drawn_alike():
            self.eval_loss = torch.tensor(self.engine.evaluate(self.mine(self.steps[0])))
        losses = []
        for number, step in enumerate(self.steps, 1):
            self.stage(f"step {number} of the stages")
            with self.drawn_alike():
                losses.append(torch.tensor(self.engine.step(self.mine(step))))
        self.stage("gathering gradients and weights")
        found = self.gathered(gradients[0]) if gradients else Named()
        return Trained(losses, found, self.engine.full())

    def gathered(self, named: Named) -> Named:
        """On rank 0: full tensors of all stages, given those of this stage's parameters."""
        named = self.whole(self.engine.stage, named)
        first = self.rank % self.layout.tensor == 0 and self.engine.replica == 0
        everywhere: list[Any] = [None] * self.world
        into = everywhere if self.rank == 0 else None
        dist.gather_object(named if first else {}, into)
        return {n: t for part in everywhere if part for n, t in part.items()}

    def copies(self) -> dict[str, dict[str, list[int]]]:
        """For each parameter: the ranks that hold it, by a digest of its values.

        Tied parameters have one name here; sharded tensors are gathered first.
        """
        state = self.whole(self.engine.stage, parameters_of(self.engine.stage))
        mine = {self.aliases.get(n, [n])[0]: _digest(t) for n, t in state.items()}
        found: dict[str, dict[str, list[int]]] = {}
        for rank, theirs in enumerate(from_all_ranks(mine)):
            for name, digest in theirs.items():
                found.setdefault(name, {}).setdefault(digest, []).append(rank)
        return found


def _names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def _add_gradients(source: nn.Module, target: nn.Module) -> None:
    """Adds one model's gradients to another's, in the other's dtype, and clears them."""
    for own, other in zip(source.parameters(), target.parameters(), strict=True):
        if own.grad is not None:
            gradient = own.grad.to(other.dtype)
            other.grad = gradient if other.grad is None else other.grad + gradient
            own.grad = None


def unsaved_tensors(model: nn.Module) -> Named:
    """The tensors of a model that are not in its state dict, by name."""
    found: Named = {}
    saved = model.state_dict().keys()
    for path, module in model.named_modules():
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items():
            full = f"{path}.{name}" if path else name
            if isinstance(value, Tensor) and full not in saved:
                found[full] = value.detach()
    return found


def fill_unsaved(model: nn.Module, values: Named) -> None:
    """Overwrites a model's tensors that are not in its state dict with another model's."""
    with torch.no_grad():
        for name, tensor in unsaved_tensors(model).items():
            if name in values and values[name].shape == tensor.shape:
                tensor.copy_(values[name])


@contextlib.contextmanager
def _watched(kind: type) -> Iterator[dict[int, Built]]:
    """Records how each instance of a class is built, by the instance's id."""
    built: dict[int, Built] = {}
    own = vars(kind).get("__init__")
    original: Any = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)  # keeps the signature, from which smaller arguments are found
    def build(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = copy.deepcopy((args, kwargs))
        random_state = torch.get_rng_state(), random.getstate()
        original(self, *args, **kwargs)
        if type(self) is kind:
            weights = {n: t.clone() for n, t in self.state_dict().items()}
            unsaved = {n: t.clone() for n, t in unsaved_tensors(self).items()}
            built[id(self)] = Built(*given, random_state, weights, unsaved)

    kind.__init__ = build  # type: ignore[misc]
    try:
        yield built
    finally:
        if own is None:
            del kind.__init__  # type: ignore[misc]
        else:
            kind.__init__ = own  # type: ignore[misc]
