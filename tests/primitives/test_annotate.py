"""Slapo's `annotate`, on source: parameter attributes that survive all other changes."""

from __future__ import annotations

import pytest
import torch

from tests.rewriting import changed_lines, imported, refused, rewritten, written

SOURCE = """\
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))  # the scale
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.weight * x


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = Norm(width)
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(6, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.tail = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.mixes = nn.ModuleList([nn.Linear(width, width) for _ in range(6)])
        self.gates = nn.ModuleList()
        for i in range(4):
            self.gates.append(nn.Sequential(nn.Linear(width, width), nn.Sigmoid()))
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        for mix, gate in zip(self.mixes, self.gates):
            x = x + gate(x) * mix(x)
        return self.head(self.tail(x))
"""

SCHEDULE = """\
import torch
from torch import nn


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 1


def model(m):
    return m.Model()


def inputs(model):
    return {"ids": torch.arange(6)[None]}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""


def attributes(model, key="tag"):
    """The parameters that have the attribute, by name, and its value."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: getattr(p, key) for name, p in named if hasattr(p, key)}


def model_of(folder, lines):
    output = rewritten(folder, SOURCE, SCHEDULE + "".join(f"    {line}\n" for line in lines))
    return output, imported(written(folder, output)).Model()


@pytest.mark.parametrize(
    ("path", "parameter", "names", "line"),
    [
        ("tail.0", "weight", ["tail.0.weight"], 'annotate(self.tail[0], "weight", tag="a")'),
        ("", "scale", ["scale"], 'annotate(self, "scale", tag="a")'),
        (
            "blocks.*.norm",
            "weight",
            [f"blocks.{i}.norm.weight" for i in range(3)],
            'annotate(self, "weight", tag="a")',
        ),
        (
            "blocks.*.up",
            "bias",
            [f"blocks.{i}.up.bias" for i in range(3)],
            'annotate(self.up, "bias", tag="a")',
        ),
        ("head", "weight", ["embed.weight", "head.weight"], 'annotate(self.head, "weight"'),
        ("mixes.*", "bias", [f"mixes.{i}.bias" for i in range(6)], "for module in self.mixes:"),
        (
            "mixes.{0,1}",
            "bias",
            ["mixes.0.bias", "mixes.1.bias"],
            "for module in self.mixes[:2]:",
        ),
        (
            "mixes.{1,3,5}",
            "bias",
            [f"mixes.{i}.bias" for i in (1, 3, 5)],
            "for module in self.mixes[1:6:2]:",
        ),
        (
            "mixes.{0,1,4}",
            "bias",
            [f"mixes.{i}.bias" for i in (0, 1, 4)],
            "for module in (self.mixes[i] for i in (0, 1, 4)):",
        ),
        (
            "gates.*.0",
            "weight",
            [f"gates.{i}.0.weight" for i in range(4)],
            'annotate(module[0], "weight", tag="a")',
        ),
        ("gates.2.0", "weight", ["gates.2.0.weight"], "for module in self.gates[2:3]:"),
        ("blocks.1.norm", "weight", ["blocks.1.norm.weight"], "class AnnotatedNorm(Norm):"),
        ("blocks.1.down", "bias", ["blocks.1.down.bias"], "class AnnotatedBlock(Block):"),
    ],
)
def test_the_parameters_that_are_named(path, parameter, names, line, tmp_path):
    select = f's["{path}"]' if path else "s"
    output, model = model_of(tmp_path, [f'{select}.annotate("{parameter}", "tag", "a")'])
    assert attributes(model) == dict.fromkeys(names, "a")
    assert line in output.files["source_0.py"]
    assert "self.scale" not in changed_lines(output)
    assert "annotations.py" in output.files and "tensor_parallel.py" not in output.files


EVERYTHING = [
    's["**.up"].annotate("weight", "tag", ("a", 1))',
    's["**.{up,down}"].annotate("bias", "tag", None)',
    's["embed"].annotate("weight", "tag", {"rows": [1.5, True]})',
    's["blocks.*.norm"].annotate("weight", "tag", "norm")',
    's["tail.2"].annotate("weight", "tag", "new")',
    's["blocks.*.up"].shard(["weight", "bias"], axis=0)',
    's["blocks.*.up"].sync("bwd_post", "all_reduce")',
    's["blocks.*.down"].shard("weight", axis=1)',
    's["blocks.*.down"].sync("fwd_post", "all_reduce")',
    's["embed"].shard("weight", axis=0)',
    's["embed"].sync("fwd_post", "all_reduce")',
    's["tail.2"].replace(Doubled)',
    's["blocks"][1:].checkpoint()',
]
TAGS = {
    **{f"blocks.{i}.up.weight": ("a", 1) for i in range(3)},
    **{f"blocks.{i}.{name}.bias": None for i in range(3) for name in ("up", "down")},
    "embed.weight": {"rows": [1.5, True]},
    "head.weight": {"rows": [1.5, True]},
    **{f"blocks.{i}.norm.weight": "norm" for i in range(3)},
    "tail.2.weight": "new",
}


def test_attributes_outlive_everything_else(tmp_path):
    """Whatever the order in the schedule, and however weights are loaded."""
    for lines in (EVERYTHING, EVERYTHING[5:] + EVERYTHING[:5]):
        _, model = model_of(tmp_path, lines)
        assert attributes(model) == TAGS
        assert type(model.tail[2]).__name__ == "Doubled"
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(state)
        assert attributes(model) == TAGS
        model.load_state_dict(state, assign=True)
        assert attributes(model) == TAGS
        model.double().requires_grad_(False)
        assert attributes(model) == TAGS
        with torch.device("meta"):
            empty = type(model)()
        assert attributes(empty) == TAGS
        empty.to_empty(device="cpu").load_state_dict(state)
        assert attributes(empty) == TAGS
        assert list(empty.state_dict()) == list(state)


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        (['s["head"].annotate("wieght", "tag", 1)'], "SR203", "did you mean `weight`"),
        (['s["head"].annotate("bias", "tag", 1)'], "SR203", "it has weight"),
        (
            ['s["blocks.0"].annotate("norm.weight", "tag", 1)'],
            "SR203",
            'select the module that owns it: s[...]["norm"], and name `weight` alone',
        ),
        (['s["blocks.0"].annotate("nrom.weight", "tag", 1)'], "SR203", "none of its own"),
        (['s["blocks.0.norm"].annotate("seen", "tag", 1)'], "SR203", "it is a buffer"),
        (
            ['s["head"].annotate("weight", "shape", 1)'],
            "SR206",
            "already have an attribute `shape`",
        ),
        (['s["head"].annotate("weight", "a b", 1)'], "SR206", "not a valid name of an attribute"),
        (['s["head"].annotate("weight", "class", 1)'], "SR206", "not a valid name of an attribute"),
        (['s["head"].annotate("weight", "tag", torch.float32)'], "SR206", "no literal"),
        (['s["head"].annotate("weight", "tag", float("nan"))'], "SR206", "no literal"),
        (['s["head"].annotate("weight", "tag", {"a", "b"})'], "SR206", "no literal"),
        (['s["head"].annotate("weight", "tag")'], "SR206", "missing a required argument"),
        (
            ['s["head"].annotate("weight", "tag", 1)', 's["embed"].annotate("weight", "tag", 2)'],
            "SR306",
            "is tied to a parameter whose `tag` is 1",
        ),
    ],
)
def test_refusals(lines, code, words, tmp_path):
    schedule = SCHEDULE + "".join(f"    {line}\n" for line in lines)
    assert words in refused(tmp_path, SOURCE, schedule, code)
