"""Constructor branches that the model did not take: refused if they would get parts."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.rewriting import SPLITTING, imported, rewritten, written

SOURCE = """\
from dataclasses import dataclass

from torch import nn


@dataclass
class Config:
    norm: bool = False
    gate: bool = False
    kind: str = "plain"
    drop: bool = False
    scale: bool = False
    deep: bool = False
    head: bool = False
    twin: bool = False
    half: bool = False
    more: bool = False
    nested: bool = False


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.deep:
            self.deep = nn.LayerNorm(8)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(x)


class Block(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.up = nn.Linear(8, 16)
        if config.norm: self.norm = nn.LayerNorm(16)
        self.gate = nn.Linear(16, 16) if config.gate else None
        if config.kind == "plain":
            self.inner = Inner(config)
        elif config.kind == "wide":
            self.inner = nn.Sequential(nn.Linear(16, 16), Inner(config))
        else:
            self.inner = nn.Identity()
        if config.drop:
            self.drop = nn.Dropout(0.1)
        if config.scale:
            self.scale = 2.0
        if config.more:
            self.more = nn.LayerNorm(16)
            if config.head:
                self.most = nn.LayerNorm(16)
        if config.nested and number < 2:
            self.nested = Block(config, 2)
        self.is_new = True
        if self.is_new:
            self.made = nn.LayerNorm(8)
            self.is_new = False
        if number == 1:
            self.last = nn.LayerNorm(8)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.inner(self.up(x)))


class Model(nn.Module):
    def __init__(self, config=Config()):
        super().__init__()
        self.layers = nn.ModuleList([Block(config, i) for i in range(2)])
        if config.head:
            self.head = nn.Linear(8, 8)
        if config.twin:
            self.twin = Block(config, 2)
        if config.half:
            self.half = Inner(config)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x
"""
SCHEDULE = SPLITTING + '    split(s["layers.*"])\n'
REFUSED = {
    "a layer of a class with parts": {"norm": True},
    "a layer by an expression": {"gate": True},
    "one of several ways": {"kind": "wide"},
    "a layer of a class that is given parts": {"deep": True},
    "a class that is given parts": {"half": True},
    "a layer, and others in a branch inside": {"more": True},
}
TAKEN = {
    "what computes each element by itself": {"drop": True, "kind": "none"},
    "a number": {"scale": True},
    "a layer among whole values": {"head": True},
    "a class with parts inside alone": {"twin": True},
    "one among parts": {"nested": True},
}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untaken")
    output = rewritten(folder, SOURCE, SCHEDULE)
    assert not output.warnings
    model = imported(written(folder, output))
    return output, model, importlib.import_module(f"{model.__package__}.shards")


def test_what_is_written(output):
    text = output[0].files[output[0].model_file]
    assert text.count("single_rank_only()\n") == len(REFUSED)
    assert "        if config.gate:\n            single_rank_only()\n        self.gate = " in text
    assert '        elif config.kind == "wide":\n            single_rank_only()\n' in text


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_two_ranks_alone(output, case):
    _, module, shards = output
    config = module.Config(**REFUSED[case])
    assert module.Model(config)(torch.randn(2, 8)).shape == (2, 8)
    with shards.world_of(2), pytest.raises(NotImplementedError, match="adds layers that"):
        module.Model(config)


@pytest.mark.parametrize("case", TAKEN)
def test_taken_on_two_ranks(output, case):
    _, module, shards = output
    with shards.world_of(2):
        module.Model(module.Config(**TAKEN[case]))


def test_a_branch_that_whole_layers_of_the_class_take(tmp_path):
    """The subclass of the split ones asks after it has made them, with the locals of the test."""
    source = SOURCE.replace("if number == 1:", "last = number + 0\n        if last == 1:")
    output = rewritten(tmp_path, source, SPLITTING + '    split(s["layers.0"])\n')
    module = imported(written(tmp_path, output))
    text = output.files[output.model_file]
    subclass = text.partition("class TensorParallelBlock(Block):")[2].partition("\n\n\n")[0]
    assert "        last = number + 0\n" in subclass
    assert "        if last == 1:\n            single_rank_only()\n" in subclass
    with importlib.import_module(f"{module.__package__}.shards").world_of(2):
        model = module.Model()
        assert type(model.layers[1]) is module.Block and hasattr(model.layers[1], "last")
        for given in ({"norm": True}, {"gate": True}, {"kind": "wide"}):
            with pytest.raises(NotImplementedError, match="adds layers that"):
                module.Model(module.Config(**given))
        with pytest.raises(NotImplementedError, match="adds layers that"):
            module.TensorParallelBlock(module.Config(), 1)


BY_VALUE = """\
from functools import partial

from torch import nn


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


KINDS = {"plain": nn.Linear, "twice": Twice}


class MLP(nn.Module):
    def __init__(self, kind, make):
        super().__init__()
        self.up = KINDS[kind](8, 16)
        self.down = make(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, kind="plain", maker=nn.Linear):
        super().__init__()
        make = partial(maker, bias=True)
        self.layers = nn.ModuleList([MLP(kind, make) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x
"""


@pytest.mark.parametrize("path", ["layers.*", "layers.0"])
def test_layers_whose_class_is_a_value(tmp_path, path):
    """Of another class they are the original's on one rank, and refused on two."""
    output = rewritten(tmp_path, BY_VALUE, f'{SPLITTING}    split(s["{path}"])\n')
    module = imported(written(tmp_path, output))
    text = "".join(output.files[output.model_file].split())
    assert "ifKINDS[kind]isnn.Linearelsesingle_rank_only(KINDS[kind](8,16))" in text
    assert "with_class(make,nn.Linear,RowParallelLinear,single_rank_only)(" in text
    original = imported(tmp_path / "source_0.py")
    shards = importlib.import_module(f"{module.__package__}.shards")
    with shards.world_of(2):
        module.Model()
    for given, of in (({"kind": "twice"}, "Twice"), ({"maker": "Twice"}, "Twice")):
        models = []
        for each in (original, module):
            torch.manual_seed(0)
            models.append(each.Model(**{n: getattr(each, v, v) for n, v in given.items()}))
        x = torch.randn(2, 8)
        assert torch.equal(models[0](x), models[1](x))
        assert any(type(m).__name__ == of for m in models[1].modules())
        with shards.world_of(2), pytest.raises(NotImplementedError, match="adds layers that"):
            module.Model(**{n: getattr(module, v, v) for n, v in given.items()})
