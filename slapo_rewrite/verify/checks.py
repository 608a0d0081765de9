"""The comparisons of original and rewritten model, in the order in which they run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from slapo_rewrite.errors import first_line

from .figures import (
    LIMITS,
    Named,
    StoppedError,
    compare,
    compare_all,
    compare_gradients,
    compare_loss,
    compare_start,
    compare_state,
    difference,
    find,
    gradients_of,
    may_be_rounding,
    parameters_of,
    rounding_of,
    settle,
    some,
)
from .half_precision import casts_left_out, compare_with_autocast
from .one_check import Check
from .pair import Pair
from .probes import tie_groups, watching

STEPS = 3
LABELS = ("labels", "targets", "target", "label")  # inputs of which a model computes its loss
DROPOUT = 0.1  # the rate for dropout layers whose own rate is 0 in the small model


class Checks:
    """Runs the checks on one pair of models."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.done: list[Check] = []
        # The first module in call order whose output differs, and its error.
        self.module: tuple[str, float] | None = None
        # Paths of modules whose outputs on this rank have the original's shapes.
        self.whole: set[str] = set()
        self.joined: list[str] = []  # names of outputs that are sharded over the ranks in training

    def run(self) -> None:
        """Runs all checks; a failure that makes the rest meaningless raises `StoppedError`."""
        self.built()
        with casts_left_out(self.pair):
            self.start()
            self.state()
            self.first_step()
            self.eval_mode()
            self.dropout()
            self.training()
        if self.pair.job["half"]:
            self.done += compare_with_autocast(self.pair)
        with casts_left_out(self.pair):
            self.decide()
        tried = self.pair.blocker.tried
        if tried:
            self.done.append(Check("runs without the tool", False, detail="; ".join(tried)))

    def built(self) -> None:
        """Checks that the rewritten model has an instance of every rewritten class.

        A part that such an instance created counts too, if the instance itself was not kept.
        """
        pair, words = self.pair, []
        pair.stage("looking for the rewritten classes")
        named = dict(pair.rewritten.named_modules())
        kinds = {path or "the model": type(m).__mro__ for path, m in named.items()}
        parts = {id(module) for module in named.values()}
        makers = {kind for maker, part in pair.put if id(part) in parts for kind in maker.__mro__}
        for each in pair.classes:
            if not isinstance(each.now, type) or not issubclass(each.now, nn.Module):
                continue
            name = each.now.__name__
            stale = [path for path, kind in kinds.items() if each.original in kind]
            if stale:
                found = some("", stale) + f": the original's {name}, not the rewritten one"
            elif each.now in makers or any(each.now in kind for kind in kinds.values()):
                continue
            else:
                found = f"no {name} is built, so nothing of it was compared"
            words.append("\n  ".join([found, *each.lines]))
        self.done.append(Check("builds what was rewritten", not words, detail="\n".join(words)))

    def decide(self) -> None:
        """Repeats the comparisons in float64 if a difference may be rounding, to decide it."""
        pair = self.pair
        rounding = rounding_of(self.done)
        doubtful = {check.name for check in self.done if may_be_rounding(check, rounding)}
        if not pair.any_of(doubtful):
            return
        if pair.nudged or pair.exact is None:
            for check in self.done:
                settle(check, rounding, None)
            return
        again = Checks(pair)
        try:
            pair.double()
            again.first_step()
            again.eval_mode()
            again.dropout()
            again.training()
        except Exception as error:
            pair.note(f"the rewritten model does not run in float64: {first_line(error)}")
        exact = {check.name: check for check in again.done}
        for check in self.done:
            settle(check, rounding, exact.get(check.name))

    def start(self) -> None:
        """Checks that both models start with the same weights when built from the same seed.

        Modules that the schedule substitutes are left out: they initialize in their own way.
        """
        pair = self.pair
        if pair.start is None:
            return
        own = [path for path in self._brought() if path]
        left = {n for n in pair.drawn if n.startswith(tuple(f"{path}." for path in own))}
        want = {n: t for n, t in pair.drawn.items() if n not in left | pair.redrawn}
        self.done.append(compare_start(want, pair.start))

    def _brought(self) -> Iterator[str]:
        """Paths at which the schedule put a module of another class."""
        others = dict(self.pair.rewritten.named_modules())
        for path, module in self.pair.original.named_modules():
            asked = any(re.fullmatch(pattern, path) for pattern in self.pair.job["replaced"])
            if asked and type(others.get(path)).__name__ != type(module).__name__:
                yield path

    def state(self) -> None:
        """Checks that the original's weights load, come back bit for bit, and stay tied."""
        pair, name = self.pair, "loads the original's weights"
        pair.stage("loading the original's state dict")
        try:
            answer = pair.rewritten.load_state_dict(pair.full, strict=True)
        except Exception as error:
            self.done.append(Check(name, False, detail=f"{type(error).__name__}: {error}"))
            raise StoppedError from error
        left = [*getattr(answer, "missing_keys", []), *getattr(answer, "unexpected_keys", [])]
        self.done.append(Check(name, not left, detail=some("left out:", left)))
        pair.stage("gathering the full state dict")
        self.done.append(compare_state(pair.full, pair.full_state()))
        if pair.groups or tie_groups(pair.rewritten):
            self.done.append(self._compare_ties())

    def _compare_ties(self) -> Check:
        pair = self.pair
        parameters = dict(pair.rewritten.named_parameters(remove_duplicate=False))
        lost = [
            (name, group[0])
            for group in pair.groups
            for name in group[1:]
            if parameters.get(name) is not parameters.get(group[0])
        ]
        words = [f"{name} is no longer {first}" for name, first in lost]
        words += [
            f"{group[1]} has become {group[0]}"
            for group in tie_groups(pair.rewritten)
            if not set(group) <= set(pair.aliases.get(group[0], []))
        ]
        differs = [(name, math.inf) for name, _ in lost]
        return Check(
            "keeps tied parameters tied", not words, detail=some("", words), differs=differs
        )

    def first_step(self) -> None:
        """Compares outputs, loss, gradients and buffers; finds the first module that differs."""
        pair = self.pair
        pair.make_inputs()
        seen: dict[tuple[str, int], Tensor] = {}
        seen_rewritten: dict[tuple[str, int], Tensor] = {}
        pair.stage("the original's first step")
        with watching(pair.original, seen):
            outputs, loss = pair.step(pair.original)
        if not loss.isfinite():
            words = f"the original's loss is {loss.item()}: nothing can be concluded"
            self.done.append(Check("loss", False, detail=words))
            raise StoppedError
        pair.stage("the original's first step in float64")
        exact_outputs, exact_loss = pair.exactly(pair.step) or ({}, None)
        pair.stage("the rewritten model's first step")
        with watching(pair.rewritten, seen_rewritten):
            got_outputs, got_loss = pair.step(pair.rewritten)
        pair.stage("comparing the first step")
        same = {k: k in seen_rewritten and seen_rewritten[k].shape == seen[k].shape for k in seen}
        self.whole = {path for path, _ in same} - {key[0] for key, ok in same.items() if not ok}
        self.done += [
            self._compare_in_training("outputs", got_outputs, outputs, exact_outputs),
            compare_loss("loss", LIMITS["loss"], got_loss, loss, exact_loss),
        ]
        if not all(check.ok for check in self.done[-2:]):
            self.module = _first_difference(seen_rewritten, seen)
        pair.stage("gathering the gradients")
        self.done += self._compare_gradients("gradients", pair.exact)
        pair.stage("gathering the buffers")
        own, buffers = self._buffers()
        if buffers:
            exact = {} if pair.exact is None else dict(pair.exact.named_buffers())
            self.done.append(compare("buffers", LIMITS["weights"], own, buffers, exact))

    def _compare_in_training(self, name: str, got: Named, want: Named, exact: Named) -> Check:
        """Compares outputs, except those that the schedule asked to leave out in training.

        Logits that are sharded over the ranks, as the loss takes them, are joined first.
        """
        absent = [key for key in want if key in self.pair.job["absent"] and key not in got]
        kept = {key: tensor for key, tensor in want.items() if key not in absent}
        got, self.joined = self.pair.join_outputs(got, kept)
        check = self._compare_outputs(name, got, kept, exact)
        if check.ok:
            joined = f"{', '.join(self.joined)} joined from all ranks" if self.joined else ""
            left_out = some("left out:", absent) if absent else ""
            check.detail = "; ".join(filter(None, [check.detail, joined, left_out]))
        return check

    def _compare_outputs(self, name: str, got: Named, want: Named, exact: Named) -> Check:
        missing = [key for key in want if key not in got]
        if missing:
            return Check(name, False, detail=some("missing:", missing))
        check = compare(name, LIMITS["outputs"], got, want, exact)
        check.differs = []  # only names of parameters belong there
        return check

    def _compare_gradients(self, name: str, exact: nn.Module | None) -> list[Check]:
        pair = self.pair
        full = pair.to_full(gradients_of(pair.rewritten))
        known = {} if exact is None else gradients_of(exact)
        return compare_gradients(name, full, gradients_of(pair.original), known, pair.aliases)

    def eval_mode(self) -> None:
        """Compares the outputs in eval mode."""
        pair = self.pair
        pair.stage("the original in eval mode")
        want, exact = pair.evaluate(pair.original), pair.exactly(pair.evaluate) or {}
        pair.stage("the rewritten model in eval mode")
        got = pair.evaluate(pair.rewritten)
        self.done.append(self._compare_outputs("outputs in eval mode", got, want, exact))
        label = next((name for name in LABELS if name in pair.inputs), None)
        if self.joined and label is not None:
            self._without(label)

    def _without(self, label: str) -> None:
        """Compares the outputs without this input, so without a loss: they are not sharded."""
        pair, name = self.pair, f"outputs without {label}"
        pair.stage(f"the original without {label}")
        try:
            want = pair.evaluate(pair.original, without=label)
        except Exception:
            return  # the original needs the input
        pair.stage(f"the rewritten model without {label}")
        got = pair.evaluate(pair.rewritten, without=label)
        check = compare(name, LIMITS["outputs"], got, want, {})
        check.differs = []
        self.done.append(check)

    def dropout(self) -> None:
        """Compares gradients with dropout, if both draw the same numbers in the forward pass.

        A recomputed forward pass that draws other numbers shows in the gradients only. Layers that
        work on sharded tensors necessarily draw other numbers, and stay switched off.
        """
        pair, name = self.pair, "gradients with dropout"
        if not pair.rates:
            return
        whole = pair.agree(self.whole) if pair.world > 1 else set(pair.rates)
        active = [path for path in pair.rates if path in whole]
        if not active:
            words = "not comparable: no dropout layer works on whole tensors"
            self.done.append(Check(name, True, detail=words))
            return
        rates = {path: pair.rates[path] or DROPOUT for path in active}
        rates[""] = DROPOUT if pair.world == 1 else 0.0  # functional dropout may see shards
        pair.stage("the original with dropout")
        try:
            with _buffers_kept(pair.original):
                outputs, loss = self._with_dropout(rates)
        except Exception:
            # A model built with a rate of 0 may lack what it needs for dropout.
            with _buffers_kept(pair.original):
                outputs, loss = self._with_dropout({**rates, "": 0.0})
        pair.stage("the rewritten model with dropout")
        with _buffers_kept(pair.rewritten):
            got_outputs, got_loss = pair.step(pair.rewritten, seed=11)
        pair.stage("comparing the step with dropout")
        same = (
            self._compare_in_training("", got_outputs, outputs, {}).ok,
            compare_loss("", LIMITS["loss"], got_loss, loss, None).ok,
        )
        check = self._compare_gradients(name, None)[1]
        if not all(same):
            alike = all(c.ok for c in self.done if c.name in ("outputs", "loss"))
            why = "the two draw different random numbers" if alike else "nor are the outputs"
            check = Check(name, True, detail=f"not comparable: {why}")
        elif len(active) < len(pair.rates):
            check.detail = f"{len(active)} of {len(pair.rates)} layers; the rest work on parts"
        self.done.append(check)
        pair.set_dropout(lambda path: 0.0, configs=False)

    def _with_dropout(self, rates: Mapping[str, float]) -> tuple[Named, Tensor]:
        """Sets the rates in both models; returns the original's outputs and loss."""
        self.pair.set_dropout(lambda path: rates.get(path, 0.0), configs=False)
        return self.pair.step(self.pair.original, seed=11)

    def training(self) -> None:
        """Compares losses and weights over several steps of SGD with momentum."""
        pair = self.pair
        optimisers = [_optimiser(model) for model in pair.models()]
        names = ("original", "rewritten model", "original in float64")
        later: list[Check] = []
        for number in range(1, STEPS + 1):
            losses: list[Tensor] = []
            for model, name, optimiser in zip(pair.models(), names, optimisers, strict=False):
                pair.stage(f"step {number} of the {name}")
                losses.append(pair.step(model)[1])
                if optimiser is not None:
                    optimiser.step()
            want, got, *exact = losses
            if number > 1:
                name = f"losses of steps 2 to {STEPS}"
                exactly = exact[0] if exact else None
                later.append(compare_loss(name, LIMITS["later losses"], got, want, exactly))
        self.done.append(max(later, key=lambda check: check.error or 0.0))
        pair.stage("gathering the weights")
        self.done.append(self._compare_weights())

    def _buffers(self) -> tuple[Named, Named]:
        """Full buffers of both models; non-persistent ones only where the shapes are equal."""
        pair = self.pair
        state, full = pair.original.state_dict(), pair.full_state()
        want = dict(pair.original.named_buffers())
        got = {n: b.detach() for n, b in pair.rewritten.named_buffers() if n in want}
        got = {n: b for n, b in got.items() if b.shape == want[n].shape}
        got.update((name, full[name]) for name in full if name in want)
        return got, {name: b for name, b in want.items() if name in state or name in got}

    def _compare_weights(self) -> Check:
        """Compares all full parameters and buffers."""
        pair = self.pair
        want = dict(parameters_of(pair.original))
        got = find(pair.to_full(parameters_of(pair.rewritten)), want, pair.aliases)
        exact = {} if pair.exact is None else parameters_of(pair.exact)
        own, buffers = self._buffers()
        want.update(buffers)
        got.update(own)
        return compare_all(f"weights after {STEPS} steps", LIMITS["weights"], got, want, exact)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restores the buffers at the end: running means depend on the random numbers of a step."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            if name in before and before[name].shape == buffer.shape:
                buffer.detach().copy_(before[name])


def _optimiser(model: nn.Module) -> torch.optim.Optimizer | None:
    """SGD with momentum; None if it runs inside each `backward` of the model."""

    def over(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    in_backward = getattr(model, "step_in_backward", None)
    if in_backward is None:
        return over(model.parameters())
    in_backward(lambda name, parameter: over([parameter]))
    return None


def _first_difference(
    got: dict[tuple[str, int], Tensor], want: dict[tuple[str, int], Tensor]
) -> tuple[str, float] | None:
    """The first module, in the original's call order, whose output differs; and its error.

    Outputs of another shape are shards of the original's, and are not compared.
    """
    for key, tensor in want.items():
        if key in got and got[key].shape == tensor.shape:
            error = difference(got[key], tensor)
            if error > LIMITS["outputs"]:
                return key[0], error
    return None
