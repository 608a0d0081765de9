"""Rewrites small sources in this process."""

from __future__ import annotations

import importlib
import sys
from contextlib import chdir
from pathlib import Path
from types import ModuleType

import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import Output, rewrite

# The head of a schedule with `split(s[PATH])`, for two linear layers `up` and `down`.
SPLITTING = """\
import torch
from torch import nn


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def split(mlp):
    mlp["up"].shard(["weight", "bias"], axis=0)
    mlp["up"].sync("bwd_post", "all_reduce")
    mlp["down"].shard("weight", axis=1)
    mlp["down"].sync("fwd_post", "all_reduce")


def schedule(s):
"""


def rewritten(
    folder: Path, source: str, schedule: str, settings: tuple[str, ...] = (), newline: str = "\n"
) -> Output:
    """The output for the text of a source file, named as users name it, and of a schedule."""
    number = len(list(folder.glob("source_*.py")))
    name = f"source_{number}.py"
    (folder / name).write_text(source, encoding="utf-8", newline=newline)
    (folder / "s.py").write_text(schedule, encoding="utf-8")
    with chdir(folder):
        output = rewrite(name, str(folder / "s.py"), settings)
    # It may be verified from elsewhere.
    text = output.files["rewrite.json"].replace(
        f'"name": "{name}"', f'"name": "{folder / name}"', 1
    )
    output.files["rewrite.json"] = text
    return output


def written(folder: Path, output: Output) -> Path:
    """The output as a package below `folder`, to be imported by `imported`."""
    number = len(list(folder.glob("output_*")))
    package = folder / f"output_{number}_{folder.name}"
    package.mkdir()
    for name, text in output.files.items():
        (package / name).write_text(text, encoding="utf-8", newline="")
    return package / output.model_file


def imported(path: Path) -> ModuleType:
    """The module of a file: the model file of a written output, or an original."""
    package = path.parent if (path.parent / "__init__.py").exists() else None
    folder = str(package.parent if package else path.parent)
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    name = f"{package.name}.{path.stem}" if package else path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and Path(str(loaded.__file__)).resolve() != path.resolve():
        del sys.modules[name]  # another test's file of the same name
    return importlib.import_module(name)


def changed_lines(output: Output) -> str:
    """The added and removed lines of the model file, blank ones apart."""
    lines = output.diff(0).splitlines(keepends=True)[2:]
    return "".join(line for line in lines if line[0] in "+-" and line[1:].strip())


def refused(
    folder: Path, source: str, schedule: str, code: str, settings: tuple[str, ...] = ()
) -> str:
    """The rendered error that a rewrite ends with."""
    with pytest.raises(errors.RewriteError) as caught:
        rewritten(folder, source, schedule, settings)
    assert caught.value.code == code, caught.value.render()
    return caught.value.render()
