"""Measures how much tensors differ, and decides whether that is too much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slapo_rewrite.model.results import result_pairs
from slapo_rewrite.model.step_results import error

from .one_check import Check

SMALLEST_SCALE = 1e-6
LIMITS = {
    "outputs": 1e-4,
    "loss": 1e-5,
    "gradients": 1e-3,
    "later losses": 1e-4,
    "weights": 1e-3,
}
ROUNDING = 4  # allowed multiple of the original's rounding error: sums in another order
LARGEST_ROUNDING = 0.05  # with a larger rounding error the original is no reference
# Larger, since a bfloat16 number has 8 significant bits.
LIMITS_BF16 = {"loss": 2e-2, "later losses": 2e-2, "weights": 2e-2}

Named = dict[str, Tensor]
Aliases = Mapping[str, list[str]]


class StoppedError(Exception):
    """A check failed, and without it no further comparison is possible."""


def difference(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest number in `want`; `inf` if shapes differ."""
    return error(want, got, SMALLEST_SCALE) if got.shape == want.shape else math.inf


def tensors_in(value: Any) -> Named:
    """All tensors in a model's output by name, without caches."""
    parts = result_pairs(value, value, "")
    return {name or "output": part for name, part, _ in parts if isinstance(part, Tensor)}


def compare(name: str, limit: float, got: Named, want: Named, exact: Named) -> Check:
    """Compares the tensors that both have; `exact` has the original's in float64, if known."""
    errors = {key: difference(got[key], want[key]) for key in want if key in got}
    if not errors:
        return Check(name, False, detail="nothing to compare")
    own = {key: difference(want[key], exact[key]) for key in errors if key in exact}
    key = max(errors, key=lambda k: (errors[k], own.get(k, 0.0)))
    differs = [(k, error) for k, error in errors.items() if error > limit]
    check = Check(name, not differs, errors[key], limit, own.get(key), place=key, differs=differs)
    if differs:
        names = list(errors)
        check.after = "".join(names[names.index(differs[-1][0]) + 1 :][:1])
    if got[key].shape != want[key].shape:
        check.detail = f"the shape is {list(got[key].shape)}, not {list(want[key].shape)}"
    elif key in exact:
        check.reference = difference(got[key], exact[key])
    return check


def compare_all(name: str, limit: float, got: Named, want: Named, exact: Named) -> Check:
    """Like `compare`, but fails if `got` lacks a tensor of `want`."""
    check = compare(name, limit, got, want, exact)
    if missing := [key for key in want if key not in got]:
        check.ok, check.detail = False, some("missing:", missing)
    return check


def rounding_of(checks: Iterable[Check]) -> float:
    """The largest rounding error of the original in any check."""
    return max((c.own for c in checks if c.own is not None and math.isfinite(c.own)), default=0.0)


def may_be_rounding(check: Check, rounding: float) -> bool:
    """Whether a failed check's error is small enough to be rounding where numbers cancel."""
    most = max(ROUNDING * rounding, LARGEST_ROUNDING)
    return not check.ok and check.error is not None and 0 < check.error <= most


def settle(check: Check, rounding: float, exact: Check | None) -> None:
    """Decides a check that `may_be_rounding`: by float64, else by the original's own error."""
    if not may_be_rounding(check, rounding):
        return
    assert check.error is not None
    if exact is not None and exact.error is not None:
        check.ok = exact.ok
        check.detail = f"{exact.error:.1e} in float64" + (", so it is rounding" if exact.ok else "")
    elif check.error > ROUNDING * rounding:
        return
    elif check.own is not None and check.own <= LARGEST_ROUNDING:
        check.ok = check.error <= ROUNDING * check.own
        check.detail = "as rounding does to the original itself" if check.ok else check.detail
    else:
        check.detail = "rounding alone does as much to the original: nothing can be concluded"
    if check.ok:
        check.differs, check.after = [], ""


def some(label: str, names: list[str]) -> str:
    """A label, the first of `names`, and the number of the others."""
    if not names:
        return ""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{label} {', '.join(names[:3])}{rest}".strip()


def gradients_of(model: nn.Module) -> Named:
    """The existing gradients, by the parameters' names."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def parameters_of(model: nn.Module) -> Named:
    """The parameters by name."""
    return {n: p.detach() for n, p in model.named_parameters()}


def find(named: Named, names: Iterable[str], aliases: Aliases) -> Named:
    """The tensors of `named` for these names, or for an alias if the parameter is tied."""
    found = {}
    for name in names:
        known = [n for n in (name, *aliases.get(name, [])) if n in named]
        if known:
            found[name] = named[known[0]]
    return found


def compare_gradients(
    name: str, full: Named, want: Named, exact: Named, aliases: Aliases
) -> list[Check]:
    """Checks that the same parameters have gradients as in the original, and compares these.

    `full` has the rewritten model's full gradients, `aliases` all names of each tied parameter.
    """
    got = find(full, want, aliases)
    missing = [n for n in want if n not in got]
    known = {alias for n in want for alias in (n, *aliases.get(n, []))}
    extra = [n for n, g in full.items() if n not in known and bool(g.count_nonzero())]
    words = [some("none for", missing), some("unasked for:", extra)]
    complete = Check(
        f"{name} complete",
        not missing and not extra,
        detail="; ".join(w for w in words if w) or f"{len(got)} parameters",
        differs=[(n, math.inf) for n in missing],
    )
    return [complete, compare(name, LIMITS["gradients"], got, want, exact)]


def compare_state(want: Named, got: Named) -> Check:
    """Checks that a state dict has the same names, and tensors equal bit for bit."""
    wrong = {}
    for name in want.keys() & got.keys():
        a, b = got[name], want[name]
        if a.shape != b.shape:
            wrong[name] = f"{name} is {list(a.shape)}, not {list(b.shape)}"
        elif a.dtype != b.dtype:
            wrong[name] = f"{name} is {a.dtype}, not {b.dtype}"
        elif not torch.equal(a, b) and not (a.isnan() & b.isnan() | (a == b)).all():
            wrong[name] = f"{name} has other values"
    missing = [name for name in want if name not in got]
    words = (
        some("missing:", missing),
        some("unknown:", [name for name in got if name not in want]),
        some("", [wrong[name] for name in want if name in wrong]),
    )
    detail = "; ".join(w for w in words if w)
    differs = [(name, math.inf) for name in want if name in wrong or name not in got]
    return Check("gives them back bit for bit", not detail, detail=detail, differs=differs)


def compare_start(want: Named, got: Named) -> Check:
    """Checks that a model starts with the original's weights from the same seed."""
    both = [name for name in want if name in got]
    check = compare_state({n: want[n] for n in both}, {n: got[n] for n in both})
    check.name = "starts with the original's weights"
    return check


def compare_loss(name: str, limit: float, got: Tensor, want: Tensor, exact: Tensor | None) -> Check:
    """Compares two losses."""

    def named(loss: Tensor) -> Named:
        return {"loss": loss.reshape(())}

    known = {} if exact is None else named(exact)
    check = compare(name, limit, named(got), named(want), known)
    check.detail = "" if check.ok else f"{got.item():.6g}, not {want.item():.6g}"
    check.place, check.differs = "", []
    return check
