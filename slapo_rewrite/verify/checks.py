"""What is compared between original and rewritten, in the order in which it is."""

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
LABELS = ("labels", "targets", "target", "label")  # without them a model computes no loss
DROPOUT = 0.1  # for layers whose own is 0 in the twin


class Checks:
    """Runs the checks on one pair."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.done: list[Check] = []  # what was checked so far
        # The first module, in the order of the calls, whose output differs, and how much.
        self.module: tuple[str, float] | None = None
        # Modules whose outputs on this rank are as large as the original's.
        self.whole: set[str] = set()
        self.joined: list[str] = []  # outputs of which a rank has a part in training

    def run(self) -> None:
        """All of them, up to one after whose failure others mean nothing (`StoppedError`)."""
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
        """The rewritten model is made of the rewritten classes, of each that there is.

        Or of parts that one of them made, and was not kept itself.
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
        """Where a difference may be rounding, the same comparison in float64 tells."""
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
        """From the same seed it starts with the same weights.

        Modules that the schedule brings along draw theirs by themselves.
        """
        pair = self.pair
        if pair.start is None:
            return
        own = [path for path in self._brought() if path]
        left = {n for n in pair.drawn if n.startswith(tuple(f"{path}." for path in own))}
        want = {n: t for n, t in pair.drawn.items() if n not in left | pair.redrawn}
        self.done.append(compare_start(want, pair.start))

    def _brought(self) -> Iterator[str]:
        """Where the schedule put a module of another class."""
        others = dict(self.pair.rewritten.named_modules())
        for path, module in self.pair.original.named_modules():
            asked = any(re.fullmatch(pattern, path) for pattern in self.pair.job["replaced"])
            if asked and type(others.get(path)).__name__ != type(module).__name__:
                yield path

    def state(self) -> None:
        """The original's weights go in, come back bit for bit, and are tied as they were."""
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
        """Outputs, loss and every gradient; and where the first module's output differs."""
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
        """Outputs without those that the schedule asked to leave out in training.

        Logits of which the loss takes a part on each rank are joined.
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
        check.differs = []  # those are no parameters
        return check

    def _compare_gradients(self, name: str, exact: nn.Module | None) -> list[Check]:
        pair = self.pair
        full = pair.to_full(gradients_of(pair.rewritten))
        known = {} if exact is None else gradients_of(exact)
        return compare_gradients(name, full, gradients_of(pair.original), known, pair.aliases)

    def eval_mode(self) -> None:
        """Outputs in eval mode."""
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
        """Outputs that no loss is computed of: they are whole on every rank."""
        pair, name = self.pair, f"outputs without {label}"
        pair.stage(f"the original without {label}")
        try:
            want = pair.evaluate(pair.original, without=label)
        except Exception:
            return  # it cannot do without
        pair.stage(f"the rewritten model without {label}")
        got = pair.evaluate(pair.rewritten, without=label)
        check = compare(name, LIMITS["outputs"], got, want, {})
        check.differs = []
        self.done.append(check)

    def dropout(self) -> None:
        """Gradients with dropout, where both draw the same random numbers in the forward pass.

        A recomputed forward that draws others shows in the gradients only. Layers that work on
        parts of tensors draw others by their nature, and stay switched off.
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
        rates[""] = DROPOUT if pair.world == 1 else 0.0  # what is no layer may work on parts
        pair.stage("the original with dropout")
        try:
            with _buffers_kept(pair.original):
                outputs, loss = self._with_dropout(rates)
        except Exception:
            # What was built without dropout may have no layer for it.
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
        """The original's outputs and loss, at rates for both models."""
        self.pair.set_dropout(lambda path: rates.get(path, 0.0), configs=False)
        return self.pair.step(self.pair.original, seed=11)

    def training(self) -> None:
        """Losses and weights over some steps of SGD with momentum."""
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
        """The buffers of both models, whole; of those in no state dict, the ones of one shape."""
        pair = self.pair
        state, full = pair.original.state_dict(), pair.full_state()
        want = dict(pair.original.named_buffers())
        got = {n: b.detach() for n, b in pair.rewritten.named_buffers() if n in want}
        got = {n: b for n, b in got.items() if b.shape == want[n].shape}
        got.update((name, full[name]) for name in full if name in want)
        return got, {name: b for name, b in want.items() if name in state or name in got}

    def _compare_weights(self) -> Check:
        """Parameters through `to_full`, and the buffers."""
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
    """Inside, a step has no lasting effect on buffers: running means of other random numbers."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            if name in before and before[name].shape == buffer.shape:
                buffer.detach().copy_(before[name])


def _optimiser(model: nn.Module) -> torch.optim.Optimizer | None:
    """SGD with momentum; None where each `backward` of the model is a step of it."""

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
    """The first module, in the order of the original's calls, with another output.

    Outputs of another shape are parts of the original's, and say nothing.
    """
    for key, tensor in want.items():
        if key in got and got[key].shape == tensor.shape:
            error = difference(got[key], tensor)
            if error > LIMITS["outputs"]:
                return key[0], error
    return None
