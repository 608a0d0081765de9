"""Compares the errors of half precision with those of the original under `torch.autocast`.

All other checks run without the casts, so the two models have to be equal there; what differs with
the casts is rounding. If both round the same values, the errors agree to the last bit. If not, they
are like two draws from one distribution: summed over all gradients they differ by less than a
tenth, while the error of a single gradient of few numbers may be half as large or twice.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from slapo_rewrite.errors import first_line

from .figures import LIMITS_BF16, Named, compare_loss, find, gradients_of
from .one_check import Check
from .pair import Pair

ALL, EACH = 1.1, 2.0
# With several ranks: partial sums are rounded once more before they are summed.
ALL_ON_RANKS = 1.25
# Number of batches over which errors are averaged.
DRAWS = 4
TINY = 1e-30
# Gradients smaller than this share of the largest may be rounding entirely.
FLOOR = 1e-4


def casts_left_out(pair: Any) -> contextlib.AbstractContextManager[None]:
    """Switches off the casts of an output in half precision; does nothing for others."""
    left_out: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if pair.job["half"]:
        left_out = pair.twin.casts_left_out()
    return left_out


def compare_with_autocast(pair: Pair) -> list[Check]:
    """Compares the errors of loss and gradients in half precision with `torch.autocast`'s."""
    name = str(pair.job["half"])
    pair.stage(f"comparing gradients in {name}")
    for model in pair.models():
        model.load_state_dict(pair.full)
    if pair.exact is None or pair.nudged:
        return [Check(f"loss in {name}", True, detail="not comparable: no reference in float64")]
    losses: list[Check] = []
    ours, theirs = Errors(), Errors()
    for seed in range(DRAWS):
        pair.inputs = pair.twin.step_inputs(pair.schedule, pair.original, seed)
        exact_loss = pair.step(pair.exact)[1]
        exact = gradients_of(pair.exact)
        got_loss = pair.step(pair.rewritten)[1]
        limit = LIMITS_BF16["loss"]
        losses.append(compare_loss(f"loss in {name}", limit, got_loss, exact_loss, None))
        ours.add(find(pair.to_full(gradients_of(pair.rewritten)), exact, pair.aliases), exact)
        try:
            with torch.autocast("cpu", getattr(torch, name)):
                pair.step(pair.original)
        except Exception as error:
            pair.note(f"the original does not run under torch.autocast: {first_line(error)}")
            return losses
        theirs.add(gradients_of(pair.original), exact)
    loss = max(losses, key=lambda check: check.error or 0.0)
    return [loss, *_compared(name, ours, theirs, pair.world)]


class Errors:
    """The errors of gradients, averaged over several batches."""

    def __init__(self) -> None:
        # By gradient: the squared norms of its error and of itself, summed over the batches.
        self.squares: dict[str, tuple[float, float]] = {}

    def add(self, got: Named, exact: Named) -> None:
        """Adds the gradients of one batch."""
        lengths = {key: float(tensor.norm()) for key, tensor in exact.items()}
        floor = FLOOR * max(lengths.values(), default=0.0)
        for key in got.keys() & exact.keys():
            error = float((got[key].to(torch.float64) - exact[key]).norm())
            known = self.squares.get(key, (0.0, 0.0))
            length = max(lengths[key], floor)
            self.squares[key] = known[0] + error**2, known[1] + length**2

    def of(self, key: str) -> float:
        """The relative error of one gradient."""
        error, length = self.squares[key]
        return math.sqrt(error / length)

    def of_all(self) -> float:
        """The relative error of all gradients as one vector."""
        errors, lengths = zip(*self.squares.values(), strict=True)
        return math.sqrt(sum(errors) / sum(lengths))


def _compared(name: str, ours: Errors, theirs: Errors, world: int) -> list[Check]:
    own, other = ours.of_all(), theirs.of_all()
    limit = ALL if world == 1 else ALL_ON_RANKS
    total = own / max(other, TINY)
    words = f"{own:.1e}, at most {limit} times that under torch.autocast, {other:.1e}"
    both = ours.squares.keys() & theirs.squares.keys()
    # Errors far below the total error under `torch.autocast` do not matter.
    seen = [key for key in sorted(both) if ours.of(key) > 0.1 * other]
    ratios = {key: ours.of(key) / max(theirs.of(key), TINY) for key in seen}
    worst = max(ratios, key=lambda key: ratios[key], default="")
    ratio, each = ratios.get(worst, 0.0), limit / ALL * EACH
    of_each = f"as a multiple of that under torch.autocast, at most {each:.1f}"
    return [
        Check(f"rounding in {name}", total <= limit, total, limit, detail=words),
        Check("that of each gradient", ratio <= each, ratio, each, place=worst, detail=of_each),
    ]
