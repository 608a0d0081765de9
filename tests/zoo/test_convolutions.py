"""Convolutions and the norms between them, split over channels."""

from __future__ import annotations

import pytest

from tests.numbers import Case, compare, modules, prepare
from tests.processes import run
from tests.rewriting import changed_lines, refused, rewritten

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn


"""
RESNET = (
    HEAD
    + """\
class Block(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, channels, 3, padding=1, padding_mode="reflect")

    def forward(self, x):
        y = self.conv1(F.relu(self.bn1(x)))
        return x + self.conv2(F.relu(self.bn2(y)))


class Model(nn.Module):
    def __init__(self, channels=4, width=10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2)
        self.blocks = nn.ModuleList(Block(channels, width) for _ in range(2))
        self.head = nn.Linear(channels * 4, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.avg_pool2d(x, 2).flatten(1))
"""
)
# One function makes both convolutions of a block, by another one.
HELPERS = """\
def conv(inner, outer, size, bias=True, mode="zeros"):
    return nn.Conv2d(inner, outer, size, padding=(size - 1) // 2, bias=bias, padding_mode=mode)


def conv3x3(inner, outer, bias=False, mode="zeros"):
    \"\"\"As wide residual networks have it.\"\"\"
    return conv(inner, outer, 3, mode=mode, bias=bias)


"""
MADE_BY_HELPERS = (
    RESNET.replace(
        "nn.Conv2d(channels, width, 3, padding=1, bias=False)", "conv3x3(channels, width)"
    )
    .replace("nn.Conv2d(width, channels, 3, padding=1, ", "conv3x3(width, channels, True, ")
    .replace('padding_mode="reflect"', 'mode="reflect"')
    .replace("class Block", HELPERS + "class Block")
)
SEQUENCE = (
    HEAD
    + """\
class Model(nn.Module):
    def __init__(self, channels=8, width=16):
        super().__init__()
        self.expand = nn.Conv1d(channels, width, 1)
        self.norm = nn.GroupNorm(4, width)
        self.mix = nn.Conv1d(width, width, 3, 1, 1, 1, 4)
        self.depthwise = nn.Conv1d(width, width, 3, padding="same", groups=width, bias=False)
        self.bn = nn.BatchNorm1d(width, affine=False)
        self.reduce = nn.Conv1d(width, channels, kernel_size=1)
        self.head = nn.Linear(width * 6, 3)

    def forward(self, x):
        y = self.bn(self.depthwise(self.mix(F.relu(self.norm(self.expand(x))))))
        return x + self.reduce(y) + self.head(y.flatten(1)).mean()
"""
)
# Queries, keys and values packed through one convolution, as gated delta nets have them.
PACKED = (
    HEAD
    + """\
class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.conv = nn.Conv1d(4 * width, 4 * width, 3, groups=4 * width, padding=2)
        self.out = nn.Linear(2 * width, width)
        self.width = width

    def forward(self, x):
        h = self.inner(x).transpose(1, 2)
        h = F.conv1d(h, self.conv.weight, self.conv.bias, padding=2, groups=h.shape[1])
        h = (h + self.conv(h)[..., 2:])[..., : x.shape[1]].transpose(1, 2)
        query, key, value = h.split([self.width, self.width, 2 * self.width], dim=-1)
        value = value.unflatten(-1, (-1, 2)) * (query * key).unsqueeze(-1)
        return self.out(value.flatten(-2))
"""
)
GATHERED = SEQUENCE.replace("self.head(y.flatten(1)).mean()", "y.mean()")
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, SHAPE)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""
IMAGES = SCHEDULE.replace("SHAPE", "3, 9, 9")
SIGNALS = SCHEDULE.replace("SHAPE", "8, 6")
WIDE = """\
    b = s["blocks.*"]
    b["conv1"].shard("weight", axis=0)
    b["conv1"].sync("bwd_post", "all_reduce")
    b["bn2"].shard(["weight", "bias"], axis=0)
    b["conv2"].shard("weight", axis=1)
    b["conv2"].sync("fwd_post", "all_reduce")
    s["stem"].shard(["weight", "bias"], axis=0)
    s["stem"].sync("fwd_post", "all_gather", axis=1)
"""
GROUPS = """\
    s["{expand,norm,mix}"].shard(["weight", "bias"], axis=0)
    s["expand"].sync("bwd_post", "all_reduce")
    s["depthwise"].shard("weight", axis=0)
    s["bn"].shard(["running_mean", "running_var"], axis=0)
"""
REDUCED = """\
    s["{reduce,head}"].shard("weight", axis=1)
    s["{reduce,head}"].sync("fwd_post", "all_reduce")
"""
CASES = {
    "wide": Case(RESNET, IMAGES + WIDE),
    "helpers": Case(MADE_BY_HELPERS, IMAGES + WIDE),
    "groups": Case(SEQUENCE, SIGNALS + GROUPS + REDUCED),
    # Of layers that are scheduled alike, one has groups.
    "inferred": Case(
        SEQUENCE,
        SIGNALS
        + "".join(line + "\n" for line in (GROUPS + REDUCED).splitlines() if "sync" not in line)
        + "    s.infer_sync()\n",
    ),
    "packed": Case(
        PACKED,
        SCHEDULE.replace("SHAPE", "6, 8")
        + """\
    s["{inner,conv}"].shard(["weight", "bias"], axis=0, parts=[8, 8, 16])
    s["out"].shard("weight", axis=1)
    s.infer_sync()
""",
    ),
    "gathered": Case(
        GATHERED, SIGNALS + GROUPS + '    s["bn"].sync("fwd_post", "all_gather", axis=1)\n'
    ),
}


def test_layers_take_the_place_of_their_like(tmp_path):
    text = changed_lines(rewritten(tmp_path, RESNET, IMAGES + WIDE))
    assert "+        self.bn2 = ParallelBatchNorm2d(width)\n" in text
    assert "ColumnParallelConv2d(channels, width, 3, padding=1, bias=False)" in text
    text = changed_lines(rewritten(tmp_path, MADE_BY_HELPERS, IMAGES + WIDE))
    assert "-        self.conv1 = conv3x3(channels, width)\n" in text and "def" not in text
    made = "channels, width, 3, padding=(3 - 1) // 2, bias=False, padding_mode="
    assert f"ColumnParallelConv2d(\n+            {made}" in text
    text = changed_lines(rewritten(tmp_path, SEQUENCE, SIGNALS + GROUPS + REDUCED))
    assert "+        self.mix = GroupParallelConv1d(width, width, 3, 1, 1, 1, 4)\n" in text
    assert "+        self.norm = ParallelGroupNorm(4, width)\n" in text


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        ('b["conv1"].shard("weight", axis=2)', "SR301", "can be sharded as `weight` axis 0"),
        ('b["bn2"].shard("weight", axis=0)', "SR307", "`blocks.0.bn2.bias` is not sharded"),
        ('b["bn2"].shard(["weight", "bias"], axis=0)', "SR104", "input is whole on every rank"),
        (
            'b["conv1"].shard("weight", axis=0)\n    b["conv1"].sync("bwd_post", "all_reduce")\n'
            '    b["conv1"].sync("fwd_post", "all_gather", axis=-1)',
            "SR104",
            "is a part along axis 1, but is gathered along axis -1",
        ),
        (
            'b["conv1"].shard("weight", axis=0)\n    b["conv1"].sync("bwd_post", "all_reduce")\n'
            '    b["conv2"].shard("weight", axis=1)\n'
            '    b["conv2"].sync("fwd_post", "all_reduce")',
            "SR104",
            "with a whole value of shape [10]",
        ),
    ],
)
def test_refusals(lines, code, words, tmp_path):
    schedule = IMAGES + '    b = s["blocks.*"]\n    ' + lines + "\n"
    assert words in refused(tmp_path, RESNET, schedule, code)


def refusal(folder) -> str:
    """What is said of three groups on four ranks, and of groups where there were none."""
    _, module = modules(folder, "groups", CASES["groups"])
    words = []
    for make in (
        lambda: module.ParallelGroupNorm(3, 6),
        lambda: module.ColumnParallelConv1d(8, 8, 1, groups=2),
    ):
        try:
            make()
        except ValueError as error:
            words.append(str(error))
    return "; ".join(words)


def check(folder) -> str:
    compare(folder, CASES)
    return refusal(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case rewritten."""
    path = tmp_path_factory.mktemp("convolutions")
    prepare(path, CASES)
    return path


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, 4])
def test_numbers(folder, world):
    for words in run(check, world, folder):
        assert world < 4 or "3 does not divide over 4 ranks" in words
        assert world == 1 or "this convolution has 2 groups" in words


def test_channels_that_are_flattened_with_their_places_are_split_evenly(tmp_path):
    source = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Conv1d(8, 10, 3, padding=1)
        self.down = nn.Linear(60, 8)

    def forward(self, x):
        return self.down(self.up(x).relu().flatten(1))
"""
    schedule = (
        's["up"].shard(["weight", "bias"], 0); s["down"].shard("weight", 1); s.infer_sync()\n'
    )
    output = rewritten(tmp_path, HEAD + source, SIGNALS + f"    {schedule}")
    assert "ColumnParallelConv1d(8, 10, 3, padding=1, multiple_of=1)" in changed_lines(output)
