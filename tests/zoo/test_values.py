"""Collectives at values inside `forward`: stated by the value's name, and inferred."""

from __future__ import annotations

import pytest

from slapo_rewrite.emit.explanation import explain
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify
from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.rewriting import changed_lines, refused, rewritten

SOURCE = '''\
import functools

import torch
import torch.nn.functional as F
from torch import nn


def traced(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Block(nn.Module):
    def forward(self, x):
        return x * 2


class Latent(Block):
    """Heads that share a part of their keys, as multi-head latent attention has it."""

    def __init__(self, width=16, size=4):
        super().__init__()
        self.__size = self.size = size
        self.query = nn.Linear(width, width)
        self.shared = nn.Linear(width, width + size)
        self.norm = nn.LayerNorm(width)
        self.key = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    @traced
    def joined(self, latent, rot):
        key = self.key(latent).unflatten(-1, (4, self.size))
        rot = rot.expand(-1, -1, key.shape[2], -1)
        return torch.cat((key, rot), dim=-1)

    @traced
    def forward(self, x, scale=1.0):
        latent, rot = self.shared(x).split([x.shape[-1], self.__size], dim=-1)
        rot = rot.unsqueeze(2).tanh()
        key = self.joined(self.norm(latent), rot)
        query = self.query(x).unflatten(-1, (-1, self.size))
        query = torch.cat((query, query), dim=-1)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores, key[..., : self.size])
        mixed = self.out(mixed.flatten(2))
        return super().forward(mixed) * scale + rot.mean()


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList([Latent(width) for _ in range(2)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x
'''

MODEL = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 5, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    layers = s["layers.*"]
"""

LATENT = """\
    layers["{query,key}"].shard(["weight", "bias"], axis=0)
    layers["out"].shard("weight", axis=1)
"""

# A partial sum and a part in the middle of a `forward`.
MIDDLE = """\
import torch
from torch import nn


class Latent(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width, bias=False)
        self.gate = nn.Linear(width, 32)

    def forward(self, x):
        outer: torch.Tensor = self.down(self.up(x).relu())
        if x.dim() == 3:
            gates = self.gate(x.tanh())  # a part
            x = x + gates.softmax(-1).amax(-1, keepdim=True)
        return x + outer.sigmoid()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Latent() for _ in range(2)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x
"""

SPLIT = """\
    layers["{up,gate}"].shard(["weight", "bias"], axis=0)
    layers["{up,gate}"].sync("bwd_post", "all_reduce")
    layers["down"].shard("weight", axis=1)
"""
AT_VALUES = """\
    layers.sync("fwd_post", "all_reduce", of="outer")
    layers.sync("fwd_post", "all_gather", axis=-1, of="gates")
"""
INFERRED = "    s.infer_sync()\n"

# Experts in a loop, as models wrote them before kernels did.
LOOP = """\
import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, width) * 0.2)
        self.down = nn.Parameter(torch.randn(4, width, 32) * 0.2)
        self.gate = nn.Linear(width, 4)

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, 1)
        gates = self.gate(x)
        weights = gates.softmax(-1)
        mixed = torch.zeros_like(x)
        for number in range(4):
            (chosen,) = torch.where(torch.arange(len(x)) % 4 != number)
            given = x[chosen]
            h = F.linear(F.linear(given, self.up[number]).relu(), self.down[number])
            mixed.index_add_(0, chosen, h * weights[chosen, number, None])
        return mixed.view(shape), gates


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList([Experts() for _ in range(2)])

    def forward(self, x):
        x, balance = self.first(x), 0
        for layer in self.layers:
            h, gates = layer(x)
            x, balance = x + h.tanh(), balance + gates.logsumexp(-1).mean()
        return x + balance
"""

EXPERTS = """\
    layers.shard("up", axis=1)
    layers.shard("down", axis=2)
"""

CASES = {
    "inferred": Case(SOURCE, MODEL + LATENT + INFERRED),
    "middle": Case(MIDDLE, MODEL + SPLIT + AT_VALUES),
    "loop": Case(LOOP, MODEL + EXPERTS + INFERRED),
    "middle inferred": Case(MIDDLE, MODEL + SPLIT + INFERRED),
}


@pytest.mark.processes
def test_numbers(tmp_path):
    prepare(tmp_path, CASES)
    for world in (2, 4):
        run(compare, world, tmp_path, CASES)


def test_what_is_inferred_at_a_value_stands_where_its_gradient_is_a_summand(tmp_path):
    """The gradients of the norm and of its input are whole: only the shared keys' are not."""
    output = rewritten(tmp_path, SOURCE, MODEL + LATENT + INFERRED)
    changed = changed_lines(output)
    assert "+        rot = all_reduce_gradient(rot)\n" in changed
    assert changed.count("all_reduce_gradient(") == 1
    line = (
        output.files[output.model_file].splitlines().index("        rot = all_reduce_gradient(rot)")
    )
    write(tmp_path / "out", output.files)
    assert "all_reduce of rot" in explain(tmp_path / "out", f"{output.model_file}:{line + 1}")


def test_what_is_stated_of_a_value_follows_its_assignment(tmp_path):
    output = rewritten(tmp_path, MIDDLE, MODEL + SPLIT + AT_VALUES)
    lines = output.files[output.model_file].splitlines()
    place = lines.index("        outer = all_reduce(outer)")
    assert lines[place - 1].startswith("        outer: torch.Tensor = self.down(")
    place = lines.index("            gates = all_gather(gates)")
    assert lines[place - 1].endswith("# a part")


def test_a_value_of_some_instances_alone(tmp_path):
    """The others keep the class."""
    schedule = (MODEL + SPLIT + AT_VALUES).replace('s["layers.*"]', 's["layers.0"]')
    changed = changed_lines(rewritten(tmp_path, MIDDLE, schedule))
    assert "+class TensorParallelLatent(Latent):" in changed
    assert "-        outer" not in changed


def test_what_all_turns_of_a_loop_share_is_added_up_before_it(tmp_path):
    """The gates go into the loss as well, where their gradient is whole."""
    output = rewritten(tmp_path, LOOP, MODEL + EXPERTS + INFERRED)
    lines = output.files[output.model_file].splitlines()
    place = lines.index("        for number in range(4):")
    added = {"        x = all_reduce_gradient(x)", "        weights = all_reduce_gradient(weights)"}
    assert {*lines[place - 2 : place]} == added


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ('"bwd_post", "all_reduce", of="rot"', "SR305", "`rot` is bound in lines 41, 42 of"),
        ('"bwd_post", "all_reduce", of="rod"', "SR206", "binds no such name"),
        ('"fwd_pre", "all_reduce", of="query"', "SR206", "takes no argument 'query'"),
        ('"fwd_post", "all_reduce", of="x"', "SR206", "binds no name 'x' beside its arguments"),
        ('"fwd_post", "all_reduce", of="scores"', "SR104", "the value `scores` of `layers.0` is"),
        ('"fwd_post", torch.relu, of="scores"', "SR206", "not for functions"),
    ],
)
def test_what_is_refused(line, code, words, tmp_path):
    schedule = MODEL + LATENT + '    layers.sync("bwd_post", "all_reduce")\n'
    assert words in refused(tmp_path, SOURCE, f"{schedule}    layers.sync({line})\n", code)


def test_a_value_of_no_tensor_is_refused(tmp_path):
    source = MIDDLE.replace("if x.dim() == 3:", "axes = x.dim()\n        if axes == 3:")
    schedule = MODEL + SPLIT + AT_VALUES + '    layers.sync("bwd_post", "all_reduce", of="axes")\n'
    assert "`axes` of `layers.0` is no tensor" in refused(tmp_path, source, schedule, "SR104")


def test_a_value_whose_gradient_a_layer_adds_up_is_refused(tmp_path):
    source = MIDDLE.replace("self.gate(x.tanh())", "self.gate(y)").replace(
        "if x.dim() == 3:", "y = x.tanh()\n        if x.dim() == 3:"
    )
    schedule = MODEL + SPLIT + AT_VALUES + '    layers.sync("bwd_post", "all_reduce", of="y")\n'
    assert "summed over the ranks twice" in refused(tmp_path, source, schedule, "SR104")


MAMBA = """\
from transformers import MambaConfig


def model(m):
    return m.MambaForCausalLM(
        MambaConfig(
            vocab_size=203, hidden_size=64, state_size=8, num_hidden_layers=2, time_step_rank=8
        )
    )


verify_model = model


def schedule(s):
    mixer = s["**.mixer"]
    mixer["in_proj"].shard("weight", axis=0, parts=2)
    mixer["{conv1d,dt_proj}"].shard(["weight", "bias"], axis=0)
    mixer["{x_proj,out_proj}"].shard("weight", axis=1)
    mixer.shard(["A_log", "D", "intermediate_size"], axis=0)
    s.infer_sync()
"""

MAMBA2 = """\
from transformers import Mamba2Config


def model(m):
    return m.Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=203, hidden_size=64, state_size=8, num_hidden_layers=2, num_heads=8,
            head_dim=16, n_groups=4, chunk_size=16,
        )
    )


verify_model = model


def schedule(s):
    mixer = s["**.mixer"]
    mixer["in_proj"].shard("weight", axis=0, parts=[128, 128, 32, 32, 8])
    mixer["conv1d"].shard(["weight", "bias"], axis=0, parts=[128, 32, 32])
    mixer.shard(["A_log", "D", "dt_bias"], axis=0)
    mixer["norm"].shard("weight", axis=0)
    mixer["out_proj"].shard("weight", axis=1)
    s.infer_sync()
"""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("name", "schedule"), [("mamba", MAMBA), ("mamba2", MAMBA2)])
def test_scans(name, schedule, tmp_path):
    """What all channels of a scan share has its gradient added up before the scan."""
    path = tmp_path / "s.py"
    path.write_text(schedule)
    output = rewrite(f"transformers.models.{name}.modeling_{name}", str(path))
    assert not output.warnings
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", [2])
    assert report.ok, report.render()
