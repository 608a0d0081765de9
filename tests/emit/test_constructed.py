"""An output is imported and its model built before anything is written."""

from __future__ import annotations

import sys

import pytest

from slapo_rewrite import errors
from slapo_rewrite.cli import main
from slapo_rewrite.code.splice import Change
from slapo_rewrite.directive import Directive
from slapo_rewrite.emit.draft import Causes
from slapo_rewrite.model.emitted import PACKAGE, imported
from slapo_rewrite.primitives.shard import MLP, MODEL
from tests.rewriting import refused, rewritten

NET = "from torch import nn\nfrom .helper import HALF\n\n\nclass Model(nn.Linear):\n    x = HALF\n"
HELPER = "HALF = 0.5\n"
AT = errors.Span("s.py", 7, 5, 4, "    s.shard()")


def causes(files: dict[str, str]) -> Causes:
    directive = Directive(0, "shard", AT, "s.shard()", ())
    return Causes(files, {"net.py": [Change(6, 6, (directive,), "why")]}, {"helper.py": []})


def built(net: str, helper: str = HELPER) -> object:
    files = {"net.py": net, "helper.py": helper, "rewrite.json": "{}"}
    with causes(files).told(), imported(files, "net.py") as emitted:
        return emitted.tree(lambda m: m.Model(2, 3)).root.live


def test_the_model_is_built_of_what_is_emitted(capsys):
    model = built(NET, HELPER + "print('loud')\n")
    assert type(model).x == 0.5 and model.weight.is_meta
    assert not [name for name in sys.modules if name.startswith(PACKAGE)]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("net", "helper", "name", "line"),
    [
        (NET.replace("x = HALF", "x = HALVES"), HELPER, "net.py", 6),
        (NET, "import slapo_no_such\n" + HELPER, "helper.py", 1),
        (NET, "HALF = (\n", "helper.py", 1),
        (NET.replace("x = HALF", "__init__ = HALF"), HELPER, None, None),
    ],
)
def test_what_the_tool_wrote_fails(net, helper, name, line):
    if name is None:  # no line of the output is run
        with pytest.raises(errors.ModelError, match="'float' object is not callable"):
            built(net, helper)
        return
    with pytest.raises(errors.BrokenOutput) as caught:
        built(net, helper)
    error = caught.value
    assert error.exit_code == 3 and "defect of slapo-rewrite" in error.render()
    assert error.at is not None and (error.at.path, error.at.line) == (f"rewritten/{name}", line)
    assert (AT in error.also) == (name == "net.py")


def test_what_the_source_does_fails(tmp_path):
    source = "if __name__ != 'source_0':\n    raise RuntimeError('moved')\n" + MLP
    words = refused(tmp_path, source, MODEL + "def schedule(s):\n    pass\n", "SR404")
    assert "RuntimeError: moved" in words and "rewritten/source_0.py:2" in words
    assert "registry" in words and "into a module that both import" in words


TANH = "lambda self, x: self.down(torch.tanh(self.up(x)))"
SOME = 's["blocks"][:1].checkpoint()'
DERIVED = """

class Base(nn.Module):
    def __init_subclass__(cls):
        before = cls.forward
        cls.forward = lambda self, x: 2 * before(self, x)


class MLP(Base):"""
STACK = """

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([MLP(8) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        (MLP + f"\n\nMLP.forward = {TANH}\n", 's["up"].decompose()', "`MLP.forward` would"),
        (MLP + f"\n\nMLP.forward = {TANH}\n", 's.checkpoint(["up"])', "`MLP.forward` would"),
        (
            (MLP + STACK).replace("\n\nclass MLP(nn.Module):", DERIVED),
            SOME,
            "`CheckpointedMLP.forward` would not run",
        ),
        (
            (MLP + STACK)
            .replace("\n\nclass MLP(nn.Module):", DERIVED)
            .replace("cls.forward = lambda", "cls.forward = functools.wraps(before)(lambda")
            .replace("2 * before(self, x)", "2 * before(self, x))")
            .replace("import torch\n", "import functools\n\nimport torch\n", 1),
            SOME,
            "`CheckpointedMLP.forward` would not run",
        ),
        (
            MLP.replace("class MLP", "class Other").replace(
                "4 * width, width)\n", "4 * width, width)\n        self.forward = self.compute\n"
            ).replace("def forward", "def compute")
            + STACK.replace("MLP(8)", "Other(8)"),
            SOME,
            "`blocks.0.forward` would not run",
        ),
    ],
    ids=["decomposed", "in part", "subclass", "subclass, wrapped", "constructor"],
)  # fmt: skip
def test_a_method_that_does_not_run_is_refused(source, line, words, tmp_path):
    model = MODEL.replace("m.MLP(8)", "m.Stack()" if "Stack" in source else "m.MLP(8)")
    schedule = model + f"def schedule(s):\n    {line}\n"
    text = refused(tmp_path, source, schedule, "SR305")
    assert words in text and line in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("self.up.weight = nn.Parameter(self.up.weight.clone())", None),
        ("nn.init.zeros_(self.up.bias)", None),
        ("self.up.bias = nn.Parameter(torch.zeros(12))", "`mlp.up.bias` is replaced"),
        ("self.up.bias.data = torch.zeros(12)", "`mlp.up.bias` is replaced"),
        ("setattr(self.up, 'bias', nn.Parameter(torch.zeros(12)))", "`mlp.up.bias` is replaced"),
        ("self.late()", "`mlp.up.weight` is replaced"),
        ("self.register_state_dict_post_hook(renamed)", "`mlp.up.bias` is not in the model's"),
        ("self.register_state_dict_post_hook(lambda *of: None)", None),
        (
            "self.register_buffer('scale', self.up.bias.detach().abs())",
            "`mlp.scale` is computed from a rank's part",
        ),
        ("self.register_buffer('scale', torch.rand(12))", None),
    ],
)
def test_a_part_that_is_replaced_is_refused(line, words, tmp_path):
    """Each rank would have all of it, and the wrong sizes meet in `forward`."""
    source = f"""import torch
from torch import nn


def renamed(module, state, prefix, metadata):
    for name in [n for n in state if ".up." in n]:
        state[name.replace(".up.", ".fc.")] = state.pop(name)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        {line}

    def late(self):
        self.up.weight = nn.Parameter(torch.ones(12, 8))

    def forward(self, x):
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLP()

    def forward(self, x):
        return self.mlp(x)
"""
    schedule = """import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def schedule(s):
    s["mlp.up"].shard(["weight", "bias"], axis=0)
    s["mlp.down"].shard("weight", axis=1)
    s.infer_sync()
"""
    if "scale" in line:
        schedule += '    s["mlp"].shard("scale", axis=0)\n'
    if words is None:
        rewritten(tmp_path, source, schedule)
    else:
        assert words in refused(tmp_path, source, schedule, "SR305")


def test_nothing_is_written_then(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(f"assert __name__ == 'net'\n{MLP}")
    (tmp_path / "s.py").write_text(MODEL + "def schedule(s):\n    pass\n")
    assert main(["net.py", "--schedule", "s.py", "-o", "out"]) == 2
    assert "AssertionError" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
