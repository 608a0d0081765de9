"""A model's results for its inputs, and whether two models give the same.

Imports torch only: the ranks that run a rewritten model cannot see the tool.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.soundness import ranks


@dataclass(frozen=True)
class Run:
    """One step: in training with a backward pass, or in eval mode.

    Attributes:
        name: What is special about it.
        training: Whether it is a training step.
        inputs: The arguments.
    """

    name: str
    training: bool
    inputs: dict[str, Any]


@dataclass
class Numbers:
    """What one step gave, as arrays: outputs, gradients, and the state after it, by name."""

    outputs: dict[str, Any]
    gradients: dict[str, Any]
    state: dict[str, Any]


class ConstructionError(Exception):
    """The rewritten model cannot be built, and says so in words."""


@contextmanager
def double_precision() -> Any:
    """Inside, floating-point tensors are double unless they are told otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def loaded(path: Path, name: str) -> types.ModuleType:
    """The module of a file, under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def varied(model: nn.Module) -> nn.Module:
    """The model with all of its parameters other than they are initialised: no ones, no zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """All tensors, numbers and words in nested outputs, by where they are."""
    if isinstance(value, (torch.Tensor, int, float, complex, str, bool)) or value is None:
        return {name: value}
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = enumerate(value)
    else:
        items = vars(value).items() if hasattr(value, "__dict__") else ()
    return {k: v for key, inner in items for k, v in flat(inner, f"{name}.{key}").items()}


def array(value: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().resolve_conj().resolve_neg()
    if value.layout != torch.strided:
        value = value.to_dense()
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()
    return value.numpy().copy()


def loss_of(outputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Every number of the outputs, weighted differently; None where none has a gradient."""
    terms = []
    for value in outputs.values():
        if isinstance(value, torch.Tensor) and value.requires_grad and value.numel():
            real = torch.view_as_real(value) if value.is_complex() else value
            weights = torch.cos(torch.arange(real.numel(), dtype=torch.float64) * 0.7 + 0.3)
            terms.append((real.double().reshape(-1) * weights).sum())
    return sum(terms[1:], terms[0]) if terms else None


def step(model: nn.Module, run: Run) -> dict[str, Any]:
    """One step; gradients are left at the parameters."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    model.train(run.training)
    given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in run.inputs.items()}
    if run.training:
        outputs = flat(model(**given))
        loss = loss_of(outputs)
        if loss is not None:
            loss.backward()
    else:
        with torch.no_grad():
            outputs = flat(model(**given))
    return {name: array(value) for name, value in outputs.items()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of every parameter; zeros where it has none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.is_floating_point() or p.is_complex()
    }


def restored(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Gives a model the weights that are full arrays."""
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})


def compare_rewritten(
    rank: int,
    world: int,
    folder: str,
    module_name: str,
    state: Mapping[str, Any],
    wanted: list[tuple[Run, Numbers]],
    limit: float,
) -> list[str]:
    """On a rank: runs a rewritten model, and says in words what differs.

    Args:
        rank: This rank.
        world: How many there are.
        folder: Holds the output, a package named as the module says, and `schedule.py`.
        module_name: The rewritten module's.
        state: The full weights.
        wanted: The steps, with what the original gives.
        limit: The largest relative error.
    """
    package = module_name.partition(".")[0]
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        with double_precision():
            return _compared(world, package, folder, module_name, state, wanted, limit)
    finally:
        sys.path.remove(folder)
        for name in [n for n in sys.modules if n.partition(".")[0] in (package, "schedule_file")]:
            del sys.modules[name]


def _compared(
    world: int,
    package: str,
    folder: str,
    module_name: str,
    state: Mapping[str, Any],
    wanted: list[tuple[Run, Numbers]],
    limit: float,
) -> list[str]:
    schedule: dict[str, Any] = {}
    exec(Path(folder, "schedule.py").read_text(), schedule)
    module = importlib.import_module(module_name)
    if Path(folder, package, "tensor_parallel.py").exists():
        importlib.import_module(f"{package}.tensor_parallel").set_group(ranks.group(world))
    loading: Any = None
    if Path(folder, package, "loading.py").exists():
        loading = importlib.import_module(f"{package}.loading")

    def full(model: nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        given = loading.to_full(model, named) if loading else named
        return {name: array(value) for name, value in given.items()}

    torch.manual_seed(6)
    try:
        model = schedule["model"](module)
    except ValueError as error:
        raise ConstructionError(str(error)) from error
    different: list[str] = []
    for run, numbers in wanted:
        restored(model, state)
        outputs = step(model, run)
        have = {"output": outputs, "state": full(model, model.state_dict())}
        if run.training:
            have["gradient"] = full(model, gradients(model))
        want = {"output": numbers.outputs, "state": numbers.state}
        if run.training:
            want["gradient"] = numbers.gradients
        for what in have:
            different += differences(f"{run.name}: {what}", have[what], want[what], limit)
    return different


def differences(
    what: str, have: Mapping[str, Any], want: Mapping[str, Any], limit: float
) -> list[str]:
    """In words, what is not the same to a limit, relative to the largest number of each array."""
    if have.keys() != want.keys():
        return [f"{what}: names {sorted(have.keys() ^ want.keys())}"]
    arrays = [np.abs(a[np.isfinite(a)]) for a in want.values() if isinstance(a, np.ndarray)]
    largest = max((float(a.max()) for a in arrays if a.size), default=1.0)
    found = []
    for name, expected in want.items():
        got = have[name]
        if not isinstance(expected, np.ndarray) or not isinstance(got, np.ndarray):
            if type(expected) is not type(got):
                found.append(f"{what} {name}: a {type(got).__name__}")
            elif isinstance(expected, float):
                if not abs(got - expected) <= limit * abs(expected) and got == got:
                    found.append(f"{what} {name}: {got} for {expected}")
            elif got != expected:
                found.append(f"{what} {name}: {got} for {expected}")
        elif expected.shape != got.shape:
            found.append(f"{what} {name}: shape {got.shape} for {expected.shape}")
        elif expected.size:
            if expected.dtype.kind not in "fc":
                expected, got = expected.astype(np.float64), got.astype(np.float64)
            fine = np.isfinite(expected)
            if (fine != np.isfinite(got)).any() or (
                (got[~fine] != expected[~fine]).any()
                and (np.isnan(got) != np.isnan(expected)).any()
            ):
                found.append(f"{what} {name}: not finite elsewhere")
                continue
            expected, got = expected[fine], got[fine]
            scale = max(float(np.abs(expected).max(initial=0.0)), largest * 1e-6, 1e-12)
            error = float(np.abs(got - expected).max(initial=0.0)) / scale
            if error > limit:
                found.append(f"{what} {name}: off by {error:.1e}")
    return found
