"""Rewritten models against their originals: outputs, gradients and the state, on every rank."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.small_model import build_small, loss_of, step_inputs
from slapo_rewrite.schedule.load import ScheduleFile


@dataclass(frozen=True)
class Case:
    """A model and its schedule.

    Attributes:
        source: The text of the model file, or the name of an importable module.
        schedule: The text of the schedule.
        limit: The largest error, relative to the largest number; models run in float64.
    """

    source: str
    schedule: str
    limit: float = 1e-10


def stem(name: str) -> str:
    """A case's name as that of a module."""
    return re.sub(r"\W", "_", name)


def prepare(folder: Path, cases: Mapping[str, Case]) -> None:
    """Rewrites every case to a folder of its own, beside its source and schedule."""
    for name, case in cases.items():
        source = case.source
        if "\n" in source:
            source = str(folder / f"{stem(name)}_original.py")
            Path(source).write_text(case.source)
        schedule = folder / f"{stem(name)}_schedule.py"
        schedule.write_text(case.schedule)
        output = rewrite(source, str(schedule))
        assert not output.warnings, output.warnings
        write(folder / f"{stem(name)}_out", output.files)


def modules(folder: Path, name: str, case: Case) -> tuple[ModuleType, ModuleType]:
    """The original and the rewritten module of a case that was prepared."""
    if sys.path[0] != str(folder):  # other folders have modules of these names
        sys.path.insert(0, str(folder))
        for loaded in [n for n in sys.modules if re.match(r"\w+_(out|original)\b", n)]:
            del sys.modules[loaded]
    original = f"{stem(name)}_original" if "\n" in case.source else case.source
    rewritten = f"{stem(name)}_out.{original.rpartition('.')[2]}"
    return importlib.import_module(original), importlib.import_module(rewritten)


def compare(folder: Path, cases: Mapping[str, Case]) -> None:
    """On every rank: that the rewritten models are the originals, in double precision."""
    for name, case in cases.items():
        schedule = ScheduleFile.load(str(folder / f"{stem(name)}_schedule.py")).module
        original, rewritten = modules(folder, name, case)
        loading = _loading(folder, name)
        torch.manual_seed(0)
        whole = build_small(schedule, original).double().train()
        torch.manual_seed(1)
        model = build_small(schedule, rewritten).double().train()
        state = {n: t.clone() for n, t in whole.state_dict().items()}
        model.load_state_dict(state)
        _same(name, loading.full_state_dict(model), state, 0.0)
        inputs = step_inputs(schedule, whole)
        given = {k: v.double() if _is_float(v) else v for k, v in inputs.items()}
        outputs = []
        for one in (whole, model):
            outputs.append(one(**given))
            loss_of(schedule, outputs[-1], inputs).backward()
        want, have = (dict(enumerate(tensors(output))) for output in outputs)
        have = {key: _whole(tensor, want[key]) for key, tensor in have.items()}
        _same(name, have, want, case.limit)
        gradients = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
        own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        _same(name, loading.to_full(model, own), gradients, case.limit)
        _same(name, loading.full_state_dict(model), whole.state_dict(), case.limit)


def _loading(folder: Path, name: str) -> Any:
    """The output's `loading`, or the like of it where nothing is sharded."""
    if (folder / f"{stem(name)}_out" / "loading.py").exists():
        return importlib.import_module(f"{stem(name)}_out.loading")
    return SimpleNamespace(
        full_state_dict=lambda model: model.state_dict(), to_full=lambda model, named: named
    )


def _whole(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Logits that stay split where a loss is computed of them, put together."""
    axes = [axis for axis, size in enumerate(like.shape) if part.shape[axis] != size]
    if not axes:
        return part
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach())
    return torch.cat(parts, *axes)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _same(name: str, have: Mapping[Any, Any], want: Mapping[Any, Any], limit: float) -> None:
    assert list(have) == list(want), name
    for key, tensor in want.items():
        if not limit:
            assert torch.equal(have[key], tensor), f"{name}: {key}"
        else:
            scale = max(1e-6, float(tensor.detach().abs().max())) if tensor.numel() else 1.0
            error = float((have[key] - tensor).detach().abs().max()) / scale
            assert error < limit, f"{name}: {key} differs by {error:.1e}"
