"""Norms that a model file writes out, over features that are split over the ranks."""

from __future__ import annotations

import pytest

from tests.numbers import Case
from tests.rewriting import changed_lines, refused, rewritten

SOURCE = '''\
import torch
from torch import nn


class Norm(nn.Module):
    """As LLaMA and T5 write it."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))
        self.eps = eps

    def forward(self, x):
        RMS
        return self.weight * x * torch.rsqrt(variance + self.eps)


class LayerNorm(nn.Module):
    """As tutorials write it."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Parameter(torch.rand(width))
        self.b = nn.Parameter(torch.rand(width))

    def normal(self, x):
        LAYER

    def forward(self, x):
        return self.a * self.normal(x) + self.b


class Model(nn.Module):
    def __init__(self, width=22):
        super().__init__()
        self.first = Norm(8)
        self.q = nn.Linear(8, width)
        self.k = nn.Linear(8, width)
        self.q_norm = Norm(width)
        self.k_norm = LayerNorm(width)
        self.out = nn.Linear(width, 8)

    def forward(self, x):
        x = self.first(x)
        return self.out(torch.relu(self.q_norm(self.q(x))) + self.k_norm(self.k(x)))
'''
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 5, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["{q,k}"].shard(["weight", "bias"], axis=0)
    s["{q,k}"].sync("bwd_post", "all_reduce")
    s["out"].shard("weight", axis=1)
    s["out"].sync("fwd_post", "all_reduce")
"""
NORMS = """\
    s["q_norm"].shard("weight", axis=0)
    s["k_norm"].shard(["a", "b"], axis=0)
"""
RMS = "variance = x.pow(2).mean(-1, keepdim=True)"
VAR = """\
var = x.var(-1, unbiased=False, keepdim=True)
        mean = x.mean(dim=-1, keepdim=True)
        return (x - mean) / torch.sqrt(var + 1e-5)"""
TWICE = """\
mean = torch.mean(x, -1, keepdim=True)
        return (x - mean) / ((x - mean).pow(2).mean(-1, True) + 1e-5).sqrt()"""
STD = """\
mean = x.mean(-1).unsqueeze(-1)
        std = x.std(-1, keepdim=True)
        return (x - mean) / (std + 1e-5)"""


def source(rms: str = RMS, layer: str = VAR) -> str:
    return SOURCE.replace("RMS", rms).replace("LAYER", layer)


CASES = {
    "var": Case(source(), SCHEDULE + NORMS),
    "twice": Case(source(RMS.replace("x.pow(2)", "(x * x)"), TWICE), SCHEDULE + NORMS),
    "std": Case(source(layer=STD), SCHEDULE + NORMS),
    "norms_inferred": Case(
        source(),
        SCHEDULE[: SCHEDULE.index("    s[")]
        + '    s["{q,k}"].shard(["weight", "bias"], axis=0)\n'
        + '    s["out"].shard("weight", axis=1)\n    s.infer_sync()\n'
        + NORMS,
    ),
}
# As a rule has written it: how it leaves float32, and what carries it out.
FUSED = SCHEDULE.replace("s[", 's.apply("rms_norm", backend="{backend}")\n    s[', 1) + NORMS
CAST = """\
dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return {result}
"""
RESULTS = {
    "input": "self.weight * x.to(dtype)",
    "output": "(self.weight * x).to(dtype)",
    "offset": "(x * (1.0 + self.weight.float())).to(dtype)",
}


def fused(result: str, backend: str) -> Case:
    """The case of a norm that a rule has written."""
    text = source(CAST.format(result=result)).replace(
        "        return self.weight * x * torch.rsqrt(variance + self.eps)\n", ""
    )
    return Case(text, FUSED.replace("{backend}", backend), 1e-5)


CASES |= {
    f"fused_{cast}_{backend}": fused(result, backend)
    for (cast, result), backend in zip(RESULTS.items(), ("triton", "eager", "triton"), strict=True)
}


def test_a_norm_without_a_scale_is_fused_over_all_ranks_too(tmp_path):
    """Another parameter of the module says how many features there are."""
    text = CASES["fused_output_eager"].source.replace("(self.weight * x).to(dtype)", "x.to(dtype)")
    lines = added(rewritten(tmp_path, text, CASES["fused_output_eager"].schedule))
    assert 'return rms_norm_of_parts(x, full_size(self, "weight"), None, self.eps)' in lines


def added(output) -> list[str]:
    return [line[1:].strip() for line in changed_lines(output).splitlines() if line[0] == "+"]


def test_a_norm_over_split_features_is_one_over_all_ranks(tmp_path):
    """The norm over whole features keeps its class; the other gets a subclass."""
    lines = added(rewritten(tmp_path, CASES["var"].source, CASES["var"].schedule))
    size = 'full_size(self, "weight")'
    assert f"variance = mean_of_parts(x.pow(2), {size}, -1, keepdim=True)" in lines
    assert "self.q_norm = TensorParallelNorm(width)" in lines
    assert "from .normalization import full_size, mean_of_parts, var_of_parts" in lines


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("var", 'var_of_parts(x, full_size(self, "a"), -1, unbiased=False, keepdim=True)'),
        ("var", 'mean_of_parts(x, full_size(self, "a"), dim=-1, keepdim=True)'),
        ("twice", 'mean_of_parts(x * x, full_size(self, "weight"), -1, keepdim=True)'),
        ("twice", 'mean_of_parts(x, full_size(self, "a"), -1, keepdim=True)'),
        ("twice", 'mean_of_parts((x - mean).pow(2), full_size(self, "a"), -1, True)'),
        ("std", 'mean_of_parts(x, full_size(self, "a"), -1).unsqueeze(-1)'),
        ("std", 'std_of_parts(x, full_size(self, "a"), -1, keepdim=True)'),
        (
            "fused_input_triton",
            'rms_norm_of_parts(x, full_size(self, "weight"), self.weight, self.eps)',
        ),
    ],
)
def test_what_is_called_keeps_its_arguments(name, line, tmp_path):
    text = "\n".join(added(rewritten(tmp_path, CASES[name].source, CASES[name].schedule)))
    assert line in text, text


def test_a_norm_whose_weight_stays_whole_says_what_to_split(tmp_path):
    text = refused(tmp_path, source(), SCHEDULE, "SR104")
    assert '.shard("weight", axis=0)' in text and RMS in text


@pytest.mark.parametrize(
    "rms",
    [
        "variance = torch.norm(x, dim=-1, keepdim=True)",
        "variance = x.var((-2, -1), keepdim=True)",
        "variance = x.amax(-1, keepdim=True)",
    ],
)
def test_other_statistics_of_parts_are_refused(rms, tmp_path):
    text = refused(tmp_path, source(rms), SCHEDULE + NORMS, "SR104")
    assert "needs the whole axis, but each rank has only a part" in text and rms in text


def test_a_mean_that_leaves_the_norm_is_refused(tmp_path):
    """Each rank would have the whole gradient of it, and they would be added up."""
    method = "    def level(self, x):\n        return x.mean(-1, keepdim=True)\n\n\nclass LayerNorm"
    text = source().replace("\nclass LayerNorm", method)
    text = text.replace("return self.out(", "return self.q_norm.level(self.q(x)) + self.out(")
    text = refused(tmp_path, text, SCHEDULE + NORMS, "SR104")
    assert "is computed inside `q_norm`" in text or "inside `q_norm`, whose gradient" in text
