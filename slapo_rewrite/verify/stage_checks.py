"""The comparisons of the original and the stages of its pipeline, in the order they run."""

from __future__ import annotations

import math

from torch import Tensor

from .figures import (
    LIMITS,
    LIMITS_BF16,
    StoppedError,
    compare_all,
    compare_gradients,
    compare_loss,
    compare_state,
    rounding_of,
    settle,
    some,
)
from .half_precision import casts_left_out
from .one_check import Check
from .staged import STEPS, Staged, Trained


class StageChecks:
    """Runs the checks on one rank; only rank 0 compares losses, gradients and weights."""

    def __init__(self, staged: Staged) -> None:
        self.staged = staged
        self.done: list[Check] = []
        self.module = None  # always None: modules' outputs are not compared here

    def run(self) -> None:
        """Runs all checks; a failure that makes the rest meaningless raises `StoppedError`."""
        with casts_left_out(self.staged):
            self.start()
            self.state()
            self.training()
        tried = self.staged.blocker.tried
        if tried:
            self.done.append(Check("runs without the tool", False, detail="; ".join(tried)))

    def start(self) -> None:
        """Checks that the stages' initial weights are those of the whole model."""
        self.staged.stage("gathering the first weights")
        both, left = (self.staged.drawn, self.staged.engine.full()), self.staged.redrawn
        check = compare_state(*({n: t for n, t in own.items() if n not in left} for own in both))
        check.name = "starts as the whole model does"
        self.done.append(check)

    def state(self) -> None:
        """Checks that the original's weights load into the stages and come back bit for bit."""
        staged, name = self.staged, "loads the original's weights"
        staged.stage("loading the original's state dict")
        try:
            staged.engine.load(staged.full)
        except Exception as error:
            self.done.append(Check(name, False, detail=f"{type(error).__name__}: {error}"))
            raise StoppedError from error
        self.done.append(Check(name, True))
        staged.stage("gathering the full state dict")
        self.done.append(compare_state(staged.full, staged.engine.full()))
        self.done.append(self._copies("copies alike"))

    def _copies(self, name: str) -> Check:
        """Checks that each parameter, by any of its names, is equal on all ranks that hold it."""
        found = self.staged.copies()
        wrong = {n: list(held.values()) for n, held in found.items() if len(held) > 1}
        words = [
            f"{n} on rank {a[0]} is not that on rank {b[0]}" for n, (a, b, *_) in wrong.items()
        ]
        several = [n for n, held in found.items() if sum(map(len, held.values())) > 1]
        return Check(
            name,
            not wrong,
            detail=some("", words)
            if wrong
            else f"{len(several)} of {len(found)} are on several ranks",
            differs=[(n, math.inf) for n in self.staged.full if n in wrong],
        )

    def training(self) -> None:
        """Compares losses in eval mode and of each step, first gradients, and final weights."""
        staged = self.staged
        staged.make_inputs()
        eval_loss = want = None
        while True:
            if staged.rank == 0:
                staged.stage("training the original")
                eval_loss, want = staged.train_original()
                if not want.is_finite():
                    words = f"the original's losses are {[float(loss) for loss in want.losses]}"
                    detail = f"{words}: nothing can be concluded"
                    self.done.append(Check("loss", False, detail=detail))
                    raise StoppedError
            staged.agree()
            got = staged.train_stages()
            found = None if want is None else self._compared(got, want, eval_loss)
            if staged.agree(found is not None):
                break
            staged.engine.load(staged.full)
        self.done += found or []
        staged.tell_rate()
        self.done.append(self._copies(f"copies alike after {STEPS} steps"))

    @property
    def limits(self) -> dict[str, float]:
        """The largest relative errors that pass."""
        return LIMITS_BF16 if self.staged.training.bf16 else LIMITS

    def _compared(
        self, got: Trained, want: Trained, eval_loss: Tensor | None
    ) -> list[Check] | None:
        """The comparisons of training; None if it has to be repeated at a lower rate.

        Training in float64 is slow, so it runs only if a comparison fails.
        """
        staged = self.staged
        assert eval_loss is not None
        found = self._comparisons(got, want, None, eval_loss, None)
        if all(check.ok for check in found):
            return found
        staged.stage("training the original in float64")
        exact_eval_loss, exact = staged.train_exactly()
        if staged.may_train_more_slowly(want, exact):
            return None
        found = self._comparisons(got, want, exact, eval_loss, exact_eval_loss)
        # An engine cannot run its stages in float64, so the original's error decides.
        rounding = rounding_of(found)
        for check in found:
            settle(check, rounding, None)
        return found

    def _comparisons(
        self,
        got: Trained,
        want: Trained,
        exact: Trained | None,
        eval_loss: Tensor,
        exact_eval_loss: Tensor | None,
    ) -> list[Check]:
        limit = self.limits["loss"]
        done = [
            compare_loss(
                "loss in eval mode", limit, self.staged.eval_loss, eval_loss, exact_eval_loss
            )
        ]
        losses = zip(
            got.losses, want.losses, exact.losses if exact else [None] * STEPS, strict=True
        )
        names = ["loss", *[f"losses of steps 2 to {STEPS}"] * (STEPS - 1)]
        limits = [self.limits["loss"], *[self.limits["later losses"]] * (STEPS - 1)]
        first, *later = [
            compare_loss(name, limit, *loss)
            for name, limit, loss in zip(names, limits, losses, strict=True)
        ]
        done.append(first)
        if got.gradients:
            known = exact.gradients if exact else {}
            aliases = self.staged.aliases
            done += compare_gradients("gradients", got.gradients, want.gradients, known, aliases)
        done.append(max(later, key=lambda check: check.error or 0.0))
        limit, known = self.limits["weights"], exact.weights if exact else {}
        name = f"weights after {STEPS} steps"
        return [*done, compare_all(name, limit, got.weights, want.weights, known)]
