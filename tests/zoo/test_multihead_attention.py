"""`nn.MultiheadAttention` split over its heads, with every mask that it takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from slapo_rewrite.runtime.multihead_attention import ParallelMultiheadAttention
from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.rewriting import changed_lines, refused, rewritten

SOURCE = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, 0.0, False)
        self.bias = nn.Parameter(torch.randn(heads, 5, 5) * 0.2)

    def forward(self, x, memory, padding):
        y = self.norm(x)
        mask = torch.ones(5, 5, dtype=torch.bool, device=x.device).triu(1)
        y, weights = self.attention(y, y, y, attn_mask=mask, key_padding_mask=padding)
        x = x + y + weights.square().sum(-1, keepdim=True)
        bias = self.bias.repeat(len(x), 1, 1)
        y, weights = self.attention(x, x, x, attn_mask=bias, average_attn_weights=False)
        x = x + y.tanh() + weights.square().sum((1, 3)).unsqueeze(-1)
        x = x + torch.stack([self.attention(each, each, each)[0] for each in x])
        x = x.transpose(0, 1)
        late = torch.full((5, 7), -1.0, device=x.device, dtype=x.dtype).triu(2)
        y, _ = self.cross(x, memory, memory.tanh(), need_weights=False, attn_mask=late)
        return (x + y).transpose(0, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x, memory, padding):
        x, memory = self.first(x), self.first(memory)
        for block in self.blocks:
            x = block(x, memory, padding)
        return x
"""

# One that is read past its call as well, as three blocks.
READ = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, width)

    def forward(self, x, memory, padding):
        x = self.first(x)
        y, _ = self.attention(x.sin(), x.cos(), x)
        z = x.tanh()
        packed = F.linear(z, self.attention.in_proj_weight, self.attention.in_proj_bias)
        query, key, value = packed.chunk(3, dim=-1)
        return y + self.out(query * key + value)
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return {"x": torch.randn(2, 5, 16), "memory": torch.randn(7, 2, 16), "padding": padding}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    blocks = s["blocks.*"]
"""
WEIGHTS = """\
    blocks["attention"].shard(["in_proj_weight", "in_proj_bias"], axis=0, parts=3)
    blocks["cross"].shard("in_proj_weight", axis=0, parts=3)
"""
PROJECTIONS = '    blocks["{attention,cross}.out_proj"].shard("weight", axis=1)\n'
STATED = """\
    blocks["{attention,cross}"].sync("bwd_post", "all_reduce")
    blocks["{attention,cross}.out_proj"].sync("fwd_post", "all_reduce")
"""
CASES = {
    "stated": Case(SOURCE, SCHEDULE + WEIGHTS + PROJECTIONS + STATED),
    "read": Case(
        READ,
        SCHEDULE.replace('    blocks = s["blocks.*"]\n', "")
        + """\
    s["attention"].shard(["in_proj_weight", "in_proj_bias"], axis=0, parts=3)
    s["attention.out_proj"].shard("weight", axis=1)
    s["out"].shard("weight", axis=1)
    s.infer_sync()
""",
    ),
    "inferred": Case(SOURCE, SCHEDULE + WEIGHTS + PROJECTIONS + "    s.infer_sync()\n"),
}


@pytest.mark.processes
def test_numbers(tmp_path):
    """The gradient of a learnt mask is a sum over the ranks as well."""
    prepare(tmp_path, CASES)
    for world in (1, 2, 4):
        run(compare, world, tmp_path, CASES)


def test_the_layer_takes_the_place_of_torchs(tmp_path):
    changed = changed_lines(rewritten(tmp_path, SOURCE, CASES["stated"].schedule))
    assert "+        self.cross = ParallelMultiheadAttention(width, heads, 0.0, False)\n" in changed
    assert changed == changed_lines(rewritten(tmp_path, SOURCE, CASES["inferred"].schedule))


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        (WEIGHTS, "SR307", "attention.out_proj.weight` is not sharded along axis 1"),
        (PROJECTIONS, "SR307", "attention.in_proj_weight` is not sharded along axis 0"),
        (
            WEIGHTS.replace(", parts=3", "") + PROJECTIONS,
            "SR301",
            "packs 3 blocks: queries, keys and values",
        ),
        (
            WEIGHTS.replace('"in_proj_bias"', "") + PROJECTIONS,
            "SR307",
            "`blocks.0.attention.in_proj_bias` is not sharded along axis 0",
        ),
        (
            WEIGHTS + PROJECTIONS + '    blocks["cross.out_proj"].sync("bwd_post", "all_reduce")\n',
            "SR305",
            "`blocks.0.cross.out_proj` is inside `blocks.0.cross`",
        ),
        (
            WEIGHTS + PROJECTIONS + STATED.replace('"{attention,cross}"', '"attention"', 1),
            "SR104",
            "nothing adds it up",
        ),
    ],
)
def test_refusals(lines, code, words, tmp_path):
    assert words in refused(tmp_path, SOURCE, SCHEDULE + lines, code)


MASKS = {
    "none": lambda: {},
    "boolean": lambda: {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
    "causal": lambda: {
        "attn_mask": nn.Transformer.generate_square_subsequent_mask(5).double(),
        "is_causal": True,
    },
    "of each head": lambda: {"attn_mask": torch.randn(12, 5, 5).double()},
    "padding": lambda: {
        "key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2] * 2)[:3]
    },
    "both": lambda: {
        "attn_mask": torch.randn(5, 5).double(),
        "key_padding_mask": torch.randn(3, 5).double(),
    },
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("training", [True, False])
def test_it_gives_what_torch_gives(mask, training):
    """In eval mode and without gradients torch takes another way, through a kernel."""
    for first, weights, average in itertools.product([True, False], repeat=3):
        torch.manual_seed(0)
        whole = nn.MultiheadAttention(16, 4, batch_first=first, dtype=torch.double)
        torch.manual_seed(0)
        mine = ParallelMultiheadAttention(16, 4, batch_first=first, dtype=torch.double)
        for one, other in zip(whole.parameters(), mine.parameters(), strict=True):
            assert torch.equal(one, other)
        x = torch.randn(3, 5, 16, dtype=torch.double)
        x = x if first else x.transpose(0, 1)
        given = {**MASKS[mask](), "need_weights": weights, "average_attn_weights": average}
        with torch.set_grad_enabled(training):
            want, have = (m.train(training)(x, x, x, **given) for m in (whole, mine))
        torch.testing.assert_close(have, want)


def test_dropout_draws_what_torch_draws():
    whole = nn.MultiheadAttention(16, 4, 0.4, dtype=torch.double)
    mine = ParallelMultiheadAttention(16, 4, 0.4, dtype=torch.double)
    mine.load_state_dict(whole.state_dict())
    x = torch.randn(5, 3, 16, dtype=torch.double)
    for weights in (True, False):
        results = []
        for module in (whole, mine):
            torch.manual_seed(1)
            results.append(module(x, x, x, need_weights=weights))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("given", [{"kdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_what_is_not_split_over_heads_is_refused(given):
    with pytest.raises(ValueError, match="leave this attention whole"):
        ParallelMultiheadAttention(16, 4, **given)
