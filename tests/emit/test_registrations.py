"""Registries that refuse a second registration after the original's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import Output, rewrite
from tests.rewriting import changed_lines

REGISTRY = """\
import functools

KNOWN = {{}}


def register(name=None):
    def registered(defined):
        key = name or defined.__name__
        if key in KNOWN:
            raise ValueError(f"`{{key}}` is registered already")
        KNOWN[key] = defined
        {given_back}

    return registered


def cached(make):
    @functools.wraps(make)
    def wrapper(*args):
        return make(*args)

    return wrapper
"""
NET = """\
from torch import nn

from .registry import cached, register


@register()
class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x):
        x = self.up(x)
        return self.down(x.relu())


@register(
    name="small",
)
@cached
def small_net():
    return Net(4)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.small_net()


def inputs(model):
    return {"x": torch.randn(2, 4)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["up"].shard(["weight", "bias"], axis=0)
    s["down"].shard("weight", axis=1)
    s.infer_sync()
"""


def output(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given_back: str, schedule: str = SCHEDULE
) -> Output:
    """The output for a model of a package that imports it, as one of a library does."""
    package = folder / f"registered_{folder.name}"
    package.mkdir()
    (package / "__init__.py").write_text("from .net import Net\n")
    (package / "registry.py").write_text(REGISTRY.format(given_back=given_back))
    (package / "net.py").write_text(NET)
    (folder / "s.py").write_text(schedule)
    monkeypatch.syspath_prepend(str(folder))
    return rewrite(f"{package.name}.net", str(folder / "s.py"))


def test_what_the_registry_has_is_not_registered_again(tmp_path, monkeypatch):
    """The package brings the original, also where the output alone is imported."""
    found = output(tmp_path, monkeypatch, "return defined")
    changed = changed_lines(found)
    assert "-@register()\n" in changed and '-@register(\n-    name="small",\n-)\n' in changed
    assert "@cached" not in changed and "registry import cached\n" in found.files["net.py"]
    assert "`register` refuses a name that the original has registered" in found.warnings[0]
    assert "does not register `Net` and `small_net`" in found.warnings[0]


def test_a_source_that_a_schedule_changes_is_not_registered_again(tmp_path, monkeypatch):
    """What fuses runs the changed source, in which the model is built then."""
    head, _, _ = SCHEDULE.partition("def schedule")
    fused = (
        "def rectified(x, weight, bias):\n"
        "    return torch.nn.functional.linear(x, weight, bias).relu()\n\n\n"
        "def schedule(s):\n    s.fuse(rectified, name='rectified')\n"
    )
    found = output(tmp_path, monkeypatch, "return defined", head + fused)
    assert "self.rectified(" in changed_lines(found)
    assert "does not register `Net` and `small_net`" in found.warnings[0]


def test_stages_of_what_is_not_registered_again(tmp_path, monkeypatch):
    head, _, _ = SCHEDULE.partition("def schedule")
    cut = "def schedule(s):\n    s['up'].cut_pipeline_stage(target='torch')\n"
    found = output(tmp_path, monkeypatch, "return defined", head + cut)
    assert "pipeline.py" in found.files
    assert sum("does not register `Net`" in warning for warning in found.warnings) == 1


@pytest.mark.parametrize(
    "given_back",
    [
        "defined.entry = key; return defined",
        "return functools.wraps(defined)(lambda *args: defined(*args))",
        "return functools.partial(defined)",
    ],
)
def test_a_decorator_that_does_more_is_not_left_out(given_back, tmp_path, monkeypatch):
    with pytest.raises(errors.OutputFails, match="is registered already"):
        output(tmp_path, monkeypatch, given_back)


@pytest.fixture(autouse=True)
def _forgotten():
    """What a test imports is not there for the next one."""
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.startswith("registered_"):
            del sys.modules[name]
