"""What rounding to half precision does, beside what `torch.autocast` does to the original.

All else is compared with the casts left out, so that the two models have to be equal; with them,
what is left of a difference is rounding. Where both round the same values it is the same to the
last bit. Where they do not, two gradients are as wrong as two draws of one error: the sum over all
of them tells less than a tenth apart, a single one of a few numbers may be half as large or twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .figures import LIMITS_BF16, Check, Named, compare_loss, find, gradients_of
from .pair import Pair

ALL, EACH = 1.1, 2.0
# What ranks add up is rounded before that, which is once more.
ALL_ON_RANKS = 1.25
# Gradients that are this small beside the largest are rounding as a whole.
FLOOR = 1e-4


def casts_left_out(pair: Any) -> contextlib.AbstractContextManager[None]:
    """What an output that computes in half precision is compared in; nothing for others."""
    left_out: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if pair.job["half"]:
        left_out = pair.twin.casts_left_out()
    return left_out


def compare_with_autocast(pair: Pair) -> list[Check]:
    """The loss and the gradients in half precision, beside those under `torch.autocast`."""
    name = str(pair.job["half"])
    pair.stage(f"comparing gradients in {name}")
    for model in pair.models():
        model.load_state_dict(dict(pair.full))
    if pair.exact is None or pair.nudged:
        return [Check(f"loss in {name}", True, detail="not comparable: no reference in float64")]
    exact_loss = pair.step(pair.exact)[1]
    got_loss = pair.step(pair.rewritten)[1]
    loss = compare_loss(f"loss in {name}", LIMITS_BF16["loss"], got_loss, exact_loss, None)
    exact = gradients_of(pair.exact)
    ours = _errors(find(pair.to_full(gradients_of(pair.rewritten)), exact, pair.aliases), exact)
    try:
        with torch.autocast("cpu", getattr(torch, name)):
            pair.step(pair.original)
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        pair.note(f"the original does not run under torch.autocast: {words[0]}")
        return [loss]
    theirs = _errors(gradients_of(pair.original), exact)
    return [loss, *_compared(name, ours, theirs, pair.world)]


def _errors(got: Named, exact: Named) -> dict[str, tuple[float, float]]:
    """How far each gradient is from the true one, and how long that is at least."""
    lengths = {key: float(tensor.norm()) for key, tensor in exact.items()}
    floor = FLOOR * max(lengths.values(), default=0.0)
    return {
        key: (float((tensor.to(torch.float64) - exact[key]).norm()), max(lengths[key], floor))
        for key, tensor in got.items()
        if key in exact
    }


def _compared(
    name: str,
    ours: Mapping[str, tuple[float, float]],
    theirs: Mapping[str, tuple[float, float]],
    world: int,
) -> list[Check]:
    total = _length(ours) / max(_length(theirs), 1e-30)
    limit = ALL if world == 1 else ALL_ON_RANKS
    own, other = _share(ours), _share(theirs)
    of_all = f"{own:.1e}, at most {limit} times that under torch.autocast, {other:.1e}"
    checks = [
        Check(f"rounding in {name}", total <= limit, total, limit, detail=of_all),
    ]
    ratios = {key: ours[key][0] / max(theirs[key][0], 1e-30) for key in ours if key in theirs}
    # An error far below the others' is none that anybody sees.
    seen = {k: r for k, r in ratios.items() if ours[k][0] > 0.1 * _share(theirs) * ours[k][1]}
    worst = max(seen, key=lambda key: seen[key], default="")
    each = limit / ALL * EACH
    ratio = seen.get(worst, 0.0)
    checks.append(
        Check(
            "that of each gradient",
            ratio <= each,
            ratio,
            each,
            place=worst,
            detail=f"as a multiple of that under torch.autocast, at most {each:.1f}",
        )
    )
    return checks


def _length(errors: Mapping[str, tuple[float, float]]) -> float:
    return float(Tensor([error for error, _ in errors.values()]).norm())


def _share(errors: Mapping[str, tuple[float, float]]) -> float:
    """The error of all gradients, relative to all of them."""
    lengths = Tensor([length for _, length in errors.values()])
    return _length(errors) / max(float(lengths.norm()), 1e-30)
