"""Compares a model with its fused version: outputs, gradients and buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slapo_rewrite.model.results import tensors
from slapo_rewrite.schedule.load import ScheduleFile
from tests.rewriting import imported, rewritten, written

HEAD = """\
import math

import torch
import torch.nn.functional as F
from torch import nn


"""
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 3, 8, requires_grad=True)}


def loss(outputs):
    return sum(output.pow(3).mean() for output in outputs)


def schedule(s):
    s.apply_all()
"""


def model(forward: str, *init: str, classes: str = "") -> str:
    """The text of a model of a few statements, below the usual imports."""
    lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for text in init for line in text.splitlines()]
    lines += ["", "    def forward(self, x):"]
    lines += [f"        {line}" for line in forward.splitlines()]
    return HEAD + (f"{classes}\n\n\n" if classes else "") + "\n".join(lines) + "\n"


def both(folder: Path, source: str, schedule: str) -> tuple[Any, Any, Any, str]:
    """The original's class built, the output's, the schedule, and the output's text."""
    output = rewritten(folder, source, schedule)
    return *built(folder, written(folder, output)), output.files[output.model_file]


def built(folder: Path, output: Path) -> tuple[Any, Any, Any]:
    """The models of the original and of an output's model file, and the schedule, of a folder."""
    given: Any = ScheduleFile.load(str(folder / "s.py")).module
    found = []
    for path in (max(folder.glob("source_*.py")), output):
        torch.manual_seed(0)
        found.append(given.model(imported(path)).double())
    found[1].load_state_dict(found[0].state_dict())
    return *found, given


def same(folder: Path, source: str, schedule: str = SCHEDULE, *, train: bool = True) -> str:
    """Rewrites, holds all numbers against the original's, and gives the model's text."""
    *models, given, text = both(folder, source, schedule)
    hold_alike(*models, given, train=train)
    return text


def hold_alike(one: Any, other: Any, given: Any, *, train: bool = True) -> None:
    """Runs two models on the same inputs, and compares all that comes of it."""
    found: list[dict[str, Any]] = []
    for module in (one, other):
        torch.manual_seed(0)
        module.train(train).zero_grad()
        inputs = given.inputs(module)
        inputs = {
            n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for n, v in inputs.items()
        }
        outputs = tuple(tensors(module(**inputs)))
        given.loss(outputs).backward()
        seen: dict[str, Any] = dict(enumerate(outputs))  # type: ignore[arg-type]
        seen |= {n: p.grad for n, p in module.named_parameters()}
        found.append(seen | dict(module.named_buffers()))
    torch.testing.assert_close(*reversed(found), equal_nan=True)
