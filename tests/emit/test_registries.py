"""Registries that make modules by a name: the output has its own, which holds its own classes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slapo_rewrite.emit.rewrite import Output, rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.isolated_imports import import_output
from tests.rewriting import SPLITTING, changed_lines

FUNCTIONS = """\
KNOWN = {}


def register(name):
    def put(cls):
        if name in KNOWN:
            raise KeyError(name)
        KNOWN[name] = cls
        return cls

    return put


def build(name, *args):
    return KNOWN[name](*args)
"""
OBJECT = """\
class Registry:
    def __init__(self):
        self.known = {}

    def register(self, name):
        def put(cls):
            assert name not in self.known
            self.known[name] = cls
            return cls

        return put

    def build(self, name, *args):
        made = dict(type=name, args=args)
        return self.known[made.pop("type")](*made["args"])


LAYERS = Registry()
"""
MLP = """\
from torch import nn
{imported}


{put}
class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x):
        x = self.up(x)
        return self.down(x.relu())
{below}"""
NET = """\
from torch import nn
{imported}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({{f"block_{{i}}": {build}("mlp", 8) for i in range(2)}})

    def forward(self, x):
        for block in self.blocks.values():
            x = x + block(x)
        return x
"""
SPLIT = '    split(s["blocks.*"])\n'
BY_FUNCTION = ("from .registry import register", '@register("mlp")', "")
BY_OBJECT = ("from .registry import LAYERS", '@LAYERS.register("mlp")', "")
BELOW = ("from . import registry", "# below", '\n\nregistry.LAYERS.known["mlp"] = Mlp\n')


def output(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    put: tuple[str, str, str],
    schedule: str,
    maker: str = "",
) -> Output:
    """The output for a model of a package whose file does not import that of its layers."""
    package = folder / f"registries_{folder.name}"
    package.mkdir()
    is_function = put is BY_FUNCTION
    build = "build" if is_function else "LAYERS.build"
    mlp = MLP.format(imported=put[0], put=put[1], below=put[2])
    net = NET.format(imported=f"from .registry import {build.partition('.')[0]}", build=build)
    if maker:  # what is called is a variable's
        net = net.replace("self.blocks", f"make, _ = {maker}, None\n        self.blocks", 1)
        net = net.replace(f'{build}("mlp", 8) for', "make(8) for")
    (package / "__init__.py").write_text("from . import mlp, net\n")
    (package / "registry.py").write_text(FUNCTIONS if is_function else OBJECT)
    (package / "mlp.py").write_text(mlp)
    (package / "net.py").write_text(net)
    (folder / "s.py").write_text(SPLITTING + schedule)
    monkeypatch.syspath_prepend(str(folder))
    return rewrite(f"{package.name}.net", str(folder / "s.py"))


def block_of(folder: Path, made: Output) -> object:
    """A block of the output's model, imported as its user imports it."""
    write(folder / "out", made.files)
    module, _ = import_output(folder / "out", "net")
    try:
        return module.Model().blocks["block_0"]
    finally:
        for name in [n for n in sys.modules if n.startswith(module.__package__)]:
            del sys.modules[name]


@pytest.mark.parametrize("put", [BY_FUNCTION, BY_OBJECT, BELOW], ids=["function", "object", "dict"])
def test_a_registry_makes_what_was_split(tmp_path, monkeypatch, put):
    """It is copied as it is, and what nothing else imports is imported to register its classes."""
    made = output(tmp_path, monkeypatch, put, SPLIT)
    assert made.files["registry.py"] == (FUNCTIONS if put is BY_FUNCTION else OBJECT)
    assert "self.blocks" not in changed_lines(made)
    assert "from . import mlp  #" in made.files["__init__.py"]
    assert type(block_of(tmp_path, made).up).__name__ == "ColumnParallelLinear"
    assert not made.warnings


def test_what_is_made_by_a_registry_becomes_a_checkpointed_subclass(tmp_path, monkeypatch):
    """It gets no class, so that what it made becomes one of the subclass, if it is of its base."""
    made = output(tmp_path, monkeypatch, BY_FUNCTION, '    s["blocks.*"].checkpoint()\n')
    assert 'as_subclass(build("mlp", 8), Mlp, CheckpointedMlp)' in made.files["net.py"]
    assert type(block_of(tmp_path, made)).__name__ == "CheckpointedMlp"


def test_so_does_what_a_variable_makes(tmp_path, monkeypatch):
    schedule = '    s["blocks.*"].checkpoint()\n'
    maker = '__import__("functools").partial(build, "mlp")'
    made = output(tmp_path, monkeypatch, BY_FUNCTION, schedule, maker)
    assert type(block_of(tmp_path, made)).__name__ == "CheckpointedMlp"
