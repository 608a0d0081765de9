"""Looks for patterns in small sources, in this process."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import textwrap
from pathlib import Path

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Tree, build_model
from slapo_rewrite.schedule.load import ScheduleFile
from slapo_rewrite.schedule.plan import Plan
from slapo_rewrite.schedule.selection import Selection

HEAD = """\
import math

import torch
import torch.nn.functional as F
from torch import nn


"""
_NUMBERS = itertools.count()


def selection(folder: Path, source: str, cls: str = "Model") -> Selection:
    """The whole model of a source text, selected.

    Args:
        folder: Where the file is written.
        source: The text, below the usual imports.
        cls: The class to build; it takes no arguments.
    """
    name = f"finding_{next(_NUMBERS)}"
    path = folder / f"{name}.py"
    path.write_text(HEAD + textwrap.dedent(source), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return selected(SourceFile.read(path, name), getattr(module, cls), folder)


def selected(file: SourceFile, make: type, folder: Path) -> Selection:
    """The whole of a model, selected."""
    schedule = folder / "s.py"
    schedule.write_text("def model(m): ...\ndef schedule(s): ...\n")
    tree = Tree(build_model(lambda _: make(), sys))
    plan = Plan(tree, ScheduleFile.load(str(schedule)), Sources(file))
    return Selection(plan, [tree.root])


def forward(body: str, arguments: str = "self, x, y, z", init: str = "pass") -> str:
    """A model with this body of `forward`, and of `__init__` after the call of the base class."""
    lines = [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        textwrap.indent(textwrap.dedent(init).strip(), " " * 8),
        "",
        f"    def forward({arguments}):",
        textwrap.indent(textwrap.dedent(body).strip(), " " * 8),
    ]
    return "\n".join(lines) + "\n"
