"""Attention as people write it: what a rank's share of the heads changes, and what not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marks import long
from tests.rewriting import changed_lines, refused, rewritten

SOURCE = """\
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.dim = dim
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.norm = Norm(self.head_dim)
        self.out = nn.Linear(dim, dim)

    def heads(self, x):
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x):
        B, T, C = x.shape
        BODY
        y = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1) @ v
        y = y.transpose(1, 2)MERGED
        return self.out(y)


class Model(nn.Module):
    def __init__(self, dim=16, num_heads=4):
        super().__init__()
        self.attention = Attention(dim, num_heads)

    def forward(self, x):
        return x + self.attention(x)
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 5, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    layers = s["attention"]
"""
ROW = """\
    layers["out"].shard("weight", axis=1)
    layers["out"].sync("fwd_post", "all_reduce")
"""
THREE = """\
    layers["{q,k,v}"].shard(["weight", "bias"], axis=0)
    layers["{q,k,v}"].sync("bwd_post", "all_reduce")
"""
PACKED = """\
    layers["qkv"].shard(["weight", "bias"], axis=0, parts=PARTS)
    layers["qkv"].sync("bwd_post", "all_reduce")
"""
VIEWS = """\
q = self.q(x).view(SHAPE).transpose(1, 2)
        k = self.k(x).view(SHAPE).transpose(1, 2)
        v = self.v(x).view(SHAPE).transpose(1, 2)"""
HALF = "+        self.num_heads = part_size(self.num_heads)\n"


def lines_changed(folder: Path, body: str, schedule: str, merged: str) -> str:
    """The changed lines of the attention, but for its layers and imports."""
    source = SOURCE.replace("BODY", body).replace("MERGED", merged)
    text = changed_lines(rewritten(folder, source, SCHEDULE + schedule + ROW))
    ours = ("import", "ParallelLinear(", "nn.Linear(")
    return "".join(
        line for line in text.splitlines(keepends=True) if not any(word in line for word in ours)
    )


@pytest.mark.parametrize(
    "merged", [".flatten(2)", ".reshape(B, T, self.num_heads * self.head_dim)"]
)
@pytest.mark.parametrize(
    "shape",
    [
        "B, T, self.num_heads, self.head_dim",
        long("B, T, self.num_heads, -1"),
        long("(B, T, self.num_heads, self.head_dim)"),
        long("*(B, T, self.num_heads, self.head_dim)"),
        "x.shape[:-1] + (self.num_heads, self.head_dim)",
    ],
)
def test_the_number_of_heads_is_halved_and_not_their_size(shape, merged, tmp_path):
    assert lines_changed(tmp_path, VIEWS.replace("SHAPE", shape), THREE, merged) == HALF


def test_nothing_changes_where_the_number_of_heads_is_inferred(tmp_path):
    body = VIEWS.replace("SHAPE", "B, T, -1, self.head_dim")
    assert lines_changed(tmp_path, body, THREE, ".reshape(B, T, -1)") == ""


def test_a_width_that_is_no_attribute_is_inferred(tmp_path):
    body = VIEWS.replace("SHAPE", "B, T, 4, 4")
    text = lines_changed(tmp_path, body, THREE, ".reshape(B, T, C)")
    assert "+        q = self.q(x).view(B, T, -1, 4).transpose(1, 2)\n" in text
    assert "+        y = y.transpose(1, 2).reshape(B, T, -1)\n" in text


@pytest.mark.parametrize(
    ("parts", "body", "changed"),
    [
        (3, "q, k, v = (self.heads(t) for t in self.qkv(x).chunk(3, dim=-1))", HALF),
        (
            3,
            "q, k, v = (self.heads(t) for t in self.qkv(x).split(C, dim=-1))",
            "+ (self.heads(t) for t in self.qkv(x).split(part_size(C), dim=-1))",
        ),
        (
            3,
            "q, k, v = map(self.heads, torch.split(self.qkv(x), [C, C, C], dim=-1))",
            "self.qkv(x), [part_size(C), part_size(C), part_size(C)], dim=-1",
        ),
        (
            3,
            "t = self.qkv(x)\n        q, k = t[..., :C], t[..., C : 2 * C]\n"
            "        q, k, v = map(self.heads, (q, k, t[..., 2 * C :]))",
            "t[..., :part_size(C)]@@t[..., part_size(C) : part_size(2 * C)]@@2 * C) :]",
        ),
        (
            3,
            "t = self.qkv(x).view(B, T, 3, self.num_heads, self.head_dim)\n"
            "        q, k, v = t.permute(2, 0, 3, 1, 4)",
            HALF,
        ),
        (
            1,
            "t = self.qkv(x).view(B, T, self.num_heads, 3, self.head_dim)\n"
            "        q, k, v = t.permute(3, 0, 2, 1, 4)",
            HALF,
        ),
    ],
)
def test_packed_projections(parts, body, changed, tmp_path):
    text = lines_changed(tmp_path, body, PACKED.replace("PARTS", str(parts)), ".flatten(2)")
    assert HALF in text and all(piece in text for piece in changed.strip("+ ").split("@@"))


@pytest.mark.parametrize(
    ("parts", "body", "words"),
    [
        (1, "q, k, v = map(self.heads, self.qkv(x).chunk(3, dim=-1))", "shard it with parts=3"),
        (
            1,
            "t = self.qkv(x).view(B, T, 3, self.num_heads, self.head_dim)\n"
            "        q, k, v = t.permute(2, 0, 3, 1, 4)",
            "shard with parts=3",
        ),
        (
            3,
            "t = self.qkv(x).view(B, T, self.num_heads, 3, self.head_dim)\n"
            "        q, k, v = t.permute(3, 0, 2, 1, 4)",
            "packed in 3 equal parts",
        ),
    ],
)
def test_parts_that_are_not_the_models_are_refused(parts, body, words, tmp_path):
    source = SOURCE.replace("BODY", body).replace("MERGED", ".flatten(2)")
    schedule = SCHEDULE + PACKED.replace("PARTS", str(parts)) + ROW
    assert words in refused(tmp_path, source, schedule, "SR104")


def test_a_whole_parameter_that_meets_parts_has_its_gradients_added_up(tmp_path):
    body = (
        "q, k, v = self.norm(self.heads(self.q(x))), self.heads(self.k(x)), self.heads(self.v(x))"
    )
    text = lines_changed(tmp_path, body, THREE, ".flatten(2)")
    assert "+        return all_reduce_gradient(self.weight) * x\n" in text


def test_a_number_of_heads_that_is_a_value_too_stays_whole(tmp_path):
    shape = "B, T, self.num_heads, self.head_dim"
    body = VIEWS.replace("SHAPE", shape) + "\n        q = q * (C // self.num_heads) ** -0.5"
    text = lines_changed(tmp_path, body, THREE, ".flatten(2)")
    assert HALF not in text
    assert "+        q = self.q(x).view(B, T, -1, self.head_dim).transpose(1, 2)\n" in text


def test_a_scale_that_depends_on_a_rank_is_refused(tmp_path):
    shape = "B, T, self.num_heads, self.head_dim"
    merged_width = "k.transpose(1, 2).flatten(2).shape[-1]"
    body = VIEWS.replace("SHAPE", shape) + f"\n        q = q * {merged_width} ** -0.5"
    source = SOURCE.replace("BODY", body).replace("MERGED", ".flatten(2)")
    text = refused(tmp_path, source, SCHEDULE + THREE + ROW, "SR104")
    assert "computes with 0.353553 on a rank, and with 0.25 without sharding" in text


def test_an_operand_that_is_not_split_with_the_heads_is_named(tmp_path):
    shape = "B, T, self.num_heads, self.head_dim"
    body = VIEWS.replace("SHAPE", shape) + "\n        q = q + self.dim_per_head.view(1, -1, 1, 1)"
    source = SOURCE.replace("BODY", body).replace("MERGED", ".flatten(2)")
    source = source.replace(
        "        self.dim = dim\n",
        "        self.register_buffer('dim_per_head', torch.arange(num_heads))\n",
    )
    text = refused(tmp_path, source, SCHEDULE + THREE + ROW, "SR104")
    assert "combines a part of shape [2, 2, 5, 4], of `attention.q`, with a whole value" in text


@pytest.mark.parametrize(
    ("made", "used", "advised"),
    [
        (
            "self.bias_u = nn.Parameter(torch.ones(num_heads, 1))",
            "q = q + self.bias_u.view(1, self.num_heads, 1, 1)",
            's["attention"].shard("bias_u", axis=0)',
        ),
        (
            "self.table = nn.Parameter(torch.ones(9, num_heads))",
            "q = q * self.table[torch.arange(T)].permute(1, 0).unsqueeze(-1)",
            's["attention"].shard("table", axis=1)',
        ),
        (
            "self.near = nn.Embedding(9, num_heads)",
            "q = q * self.near(torch.arange(T)).permute(1, 0).unsqueeze(-1)",
            's["attention.near"].shard("weight", axis=1)',
        ),
        (
            "self.shift = nn.Linear(3, dim)",
            "q = q * self.shift(torch.ones(T, 3)).view(T, -1, self.head_dim).transpose(0, 1)",
            's["attention.shift"].shard(["weight", "bias"], axis=0)',
        ),
    ],
)
def test_what_has_to_be_split_with_the_heads_is_said_and_enough(tmp_path, made, used, advised):
    shape = "B, T, self.num_heads, self.head_dim"
    body = f"{VIEWS.replace('SHAPE', shape)}\n        {used}"
    source = SOURCE.replace("BODY", body).replace("MERGED", ".flatten(2)")
    source = source.replace("        self.dim = dim\n", f"        self.dim = dim\n        {made}\n")
    schedule = SCHEDULE + THREE + ROW
    assert f"that compute the whole value, {advised}, or gather" in refused(
        tmp_path, source, schedule, "SR104"
    )
    assert rewritten(tmp_path, source, f"{schedule}    {advised}\n")


def test_a_layer_that_is_given_a_part_is_split_over_what_it_is_given(tmp_path):
    body = f"{VIEWS.replace('SHAPE', 'B, T, -1, self.head_dim')}\n        "
    body += "q = q * self.gate(v.transpose(1, 2).flatten(2)).view(B, 1, T, 3).sum(-1, keepdim=True)"
    source = SOURCE.replace("BODY", body).replace("MERGED", ".flatten(2)")
    source = source.replace(
        "        self.dim = dim\n",
        "        self.dim = dim\n        self.gate = nn.Linear(dim, 3, bias=False)\n",
    )
    text = refused(tmp_path, source, SCHEDULE + THREE + ROW, "SR104")
    assert 's["attention.gate"].shard("weight", axis=1), or' in text


# A bias of each head (ALiBi, arXiv 2108.12409), made of numbers alone: (heads, 1, T).
ALIBI = """\
slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        bias = (slopes[:, None, None] * torch.arange(T))"""
SCORES = "(q @ k.transpose(-2, -1) * self.head_dim**-0.5)"
INFERRED = """\
    layers["{q,k,v}"].shard(["weight", "bias"], axis=0)
    layers["out"].shard("weight", axis=1)
    s.infer_sync()
"""


def with_bias(used: str, then: str = "") -> str:
    """Attention with a bias of each head, made and then used so by its scores."""
    body = f"{VIEWS.replace('SHAPE', 'B, T, self.num_heads, self.head_dim')}\n        {ALIBI}{then}"
    source = SOURCE.replace("BODY", body).replace("MERGED", ".flatten(2)")
    return source.replace("HEADS", "4").replace(SCORES, used.replace("SCORES", SCORES))


@pytest.mark.parametrize(
    "used", ["(SCORES + bias)", "(SCORES.float() - bias)", "torch.add(SCORES, bias)"]
)
def test_of_a_bias_of_each_head_a_rank_takes_its_slice(tmp_path, used):
    """It is a slice of what every rank has, and needs no gradient: nothing is sent."""
    changed = changed_lines(rewritten(tmp_path, with_bias(used), SCHEDULE + INFERRED))
    assert "+        bias = scatter(bias, axis=0)\n" in changed


def test_of_two_ways_the_one_that_comes_further_is_mended(tmp_path):
    """A rank's heads in the attribute make the scale wrong; without, a bias is not sliced yet."""
    source = with_bias("(q @ k.transpose(-2, -1) * (C // self.num_heads) ** -0.5 + bias)")
    source = source.replace(
        "view(B, T, self.num_heads, self.head_dim)", "view(B, T, self.num_heads, -1)"
    )
    changed = changed_lines(rewritten(tmp_path, source, SCHEDULE + INFERRED))
    assert "+        bias = scatter(bias, axis=0)\n" in changed
    assert "part_size(self.num_heads), -1)" in changed


def test_heads_that_lie_in_the_batch_are_no_slice(tmp_path):
    used = "(SCORES.reshape(-1, T, T) + bias).view(B, -1, T, T)"
    source = with_bias(used, ".expand(B, HEADS, 1, T).reshape(-1, 1, T)")
    assert "combines a part of shape [4, 5, 5]" in refused(
        tmp_path, source, SCHEDULE + INFERRED, "SR104"
    )
    stated = '    layers.sync("fwd_post", "scatter", axis=0, of="bias")\n'
    assert "combines 2 equal parts with one block" in refused(
        tmp_path, source, SCHEDULE + stated + INFERRED, "SR104"
    )


def test_a_buffer_that_has_to_be_split_with_the_heads_is_named(tmp_path):
    source = with_bias("(SCORES + self.slopes[:, None, None])").replace(
        "        self.dim = dim\n",
        "        self.dim = dim\n        self.register_buffer('slopes', torch.ones(num_heads))\n",
    )
    advised = 's["attention"].shard("slopes", axis=0)'
    assert f"compute the whole value, {advised}, or" in refused(
        tmp_path, source, SCHEDULE + INFERRED, "SR104"
    )
    assert rewritten(tmp_path, source, f"{SCHEDULE}{INFERRED}    {advised}\n")


def test_bounds_that_are_half_shares_are_not_taken_for_whole_ones(tmp_path):
    """Of `C + h` with half the heads in `h`, twice is `3 * C`, which is a border as well."""
    body = (
        "t = self.qkv(x)\n        h = self.num_heads * self.head_dim\n"
        "        q, k, v = t[..., :C], t[..., C : C + h], t[..., C + h :]\n"
        "        q, k, v = (y.view(B, T, -1, self.head_dim).transpose(1, 2) for y in (q, k, v))"
    )
    text = lines_changed(tmp_path, body, PACKED.replace("PARTS", "3"), ".flatten(2)")
    for cut in ("[...,:part_size(C)]", "[...,part_size(C):part_size(C+h)]"):
        assert cut in text.replace(" ", "")


EACH = "q, k, v = (TAKEN for t in (self.q(x), self.k(x), self.v(x)))"


@pytest.mark.parametrize(
    "taken",
    [
        "torch.reshape(t, (B, T, self.num_heads, -1)).transpose(1, 2)",
        "torch.unflatten(t, -1, (self.num_heads, -1)).transpose(1, 2)",
    ],
)
def test_functions_of_torch_regroup_as_methods_do(taken, tmp_path):
    body = EACH.replace("TAKEN", taken)
    assert lines_changed(tmp_path, body, THREE, ".flatten(2)") == HALF


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        ("torch.stack(t.chunk(self.num_heads, -1), 1)", "pieces are heads"),
        ("torch.stack(torch.split(t, self.head_dim, -1), 1)", "pieces are heads"),
        ("torch.stack(t.tensor_split(self.num_heads, -1), 1)", "pieces are heads"),
        ("torch.stack(t.tensor_split((4, 8, 12), -1), 1)", "pieces are heads"),
        (
            "torch.stack([t.narrow(-1, 4 * i, 4) for i in range(4)], 1)",
            "`narrow` needs the whole axis",
        ),
        (
            "(t + t.select(-1, 0)[..., None]).view(B, T, self.num_heads, -1).transpose(1, 2)",
            "`select` needs the whole axis",
        ),
    ],
)
def test_what_takes_a_part_apart_otherwise_is_refused(taken, words, tmp_path):
    """The first elements of a rank's part are not those of the whole."""
    source = SOURCE.replace("BODY", EACH.replace("TAKEN", taken)).replace("MERGED", ".flatten(2)")
    text = refused(tmp_path, source, SCHEDULE + THREE + ROW, "SR104")
    assert words in text and "q, k, v = (" in text


SLID = """\
    def slid(self, t):
        B, H, T, D = t.shape
        t = nn.functional.pad(t.reshape(B * H, T, D), (0, 0, 1, 10))
        t = t.view(B * H, torch.div(16, 8, rounding_mode="trunc"), 8, D).flatten(1, 2)
        head, token, feature = t.stride()
        pairs = t.as_strided((B * H, T, 2, D), (head, token, TOKEN, feature))
        return pairs.sum(2).view(B, H, T, D)

"""


def slid(token: str) -> str:
    """The source with each token's query, key and value the sum of two tokens'."""
    body = "q, k, v = (self.slid(self.heads(t)) for t in (self.q(x), self.k(x), self.v(x)))"
    text = SOURCE.replace("BODY", body).replace("MERGED", ".flatten(2)")
    before = "    def forward(self, x):\n        B, T, C"
    return text.replace(before, SLID.replace("TOKEN", token) + before)


def test_heads_that_are_merged_with_the_batch_are_strided_over(tmp_path):
    """Heads and tokens in a chunk are as many: the size does not decide which axis is split."""
    text = changed_lines(rewritten(tmp_path, slid("token"), SCHEDULE + THREE + ROW))
    assert HALF in text and "strided" not in text and ".view(" not in text


@pytest.mark.parametrize("token", ["head", "head + token", "head - token"])
def test_strides_from_one_head_into_another_are_refused(token, tmp_path):
    text = refused(tmp_path, slid(token), SCHEDULE + THREE + ROW, "SR104")
    assert "`as_strided` reads the memory of a value of which a rank has 4 of 8" in text


@pytest.mark.parametrize("written", ["3 * self.head_dim", "self.head_dim * 3"])
def test_heads_that_pack_three_are_split_as_the_class_writes_their_size(written, tmp_path):
    body = f"""qkv = self.qkv(x).view(B, T, -1, {written}).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)"""
    source = SOURCE.replace("BODY", body).replace("MERGED", ".reshape(B, T, -1)")
    schedule = SCHEDULE + PACKED.replace(", parts=PARTS", "") + ROW
    text = changed_lines(rewritten(tmp_path, source, schedule))
    assert f"multiple_of={written})" in text


def test_a_batch_that_is_as_many_is_no_unit(tmp_path):
    body = """qkv = self.qkv(x).view(B, T, -1, (B + 1) * self.head_dim).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)"""
    source = SOURCE.replace("BODY", body).replace("MERGED", ".reshape(B, T, -1)")
    schedule = SCHEDULE + PACKED.replace(", parts=PARTS", "") + ROW
    text = changed_lines(rewritten(tmp_path, source, schedule))
    assert "multiple_of=12)" in text
