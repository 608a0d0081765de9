"""Slapo's `shard` on every kind of layer, on source: the cases of its own tests, and norms.

A BatchNorm2d's `bwd_post` sync, which Slapo's test of convolutions has, is refused: every rank has
the gradient of its own channels, and there is nothing to add up.
"""

from __future__ import annotations

import pytest

from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.rewriting import SPLITTING, changed_lines, refused, rewritten

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D


class Model(nn.Module):
    def __init__(self):
        super().__init__()
"""
MLP = (
    HEAD
    + """\
        self.fc_in = nn.Linear(10, 12)
        self.norm = nn.Identity()
        self.fc_out = nn.Linear(12, 10)

    def forward(self, x):
        return x + self.fc_out(self.norm(F.gelu(self.fc_in(x))))
"""
)
CONV1D = MLP.replace("nn.Linear(10, 12)", "Conv1D(12, 10)").replace(
    "nn.Linear(12, 10)", "Conv1D(10, 12)"
)
LAYER_NORM = MLP.replace("nn.Identity()", "nn.LayerNorm(12)")
RMS_NORM = MLP.replace("nn.Identity()", "nn.RMSNorm((12,), eps=1e-3)")
BOTTLENECK = (
    HEAD
    + """\
        self.conv1 = nn.Conv2d(6, 8, kernel_size=1, stride=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(
            8, 8, kernel_size=3, stride=1, padding=1, groups=1, bias=False, dilation=1
        )
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 10, kernel_size=1, stride=1, bias=False)
        self.bn3 = nn.BatchNorm2d(10)

    def forward(self, x):
        x = self.bn1(self.conv1(x))
        x = self.bn2(self.conv2(x))
        return self.bn3(self.conv3(x))
"""
)
TIED = (
    HEAD
    + """\
        self.wte = nn.Embedding(10, 10)
        self.second = nn.Linear(10, 10, bias=False)
        self.third = nn.Linear(10, 10, bias=False)
        self.second.weight = self.wte.weight
        self.third.weight = self.wte.weight

    def forward(self, x):
        return self.third(self.second(self.wte(x)))
"""
)
# A size that only a test of it uses, beside one that a module is not asked for.
CHECKED = (
    HEAD.replace("Model", "Block")
    + """\
        self.features = 12
        self.fc_in = nn.Linear(10, self.features)
        self.scale = nn.Parameter(torch.rand(self.features))
        self.fc_out = nn.Linear(12, 10)

    def forward(self, x):
        x = F.gelu(self.fc_in(x))
        if x.size(-1) != self.features:
            raise ValueError(f"{x.size(-1)} features")
        return self.fc_out(self.scale * x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return x + self.second(self.first(x))
"""
)
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": INPUT}


def loss(outputs):
    return outputs.square().mean()


def column(layer, axis=0):
    layer.shard("weight", axis=axis)
    layer.shard("bias", axis=0)
    layer.sync(mode="bwd_post", sync_op_or_fn="all_reduce")


def row(layer, axis=1):
    layer.shard("weight", axis=axis)
    layer.sync(mode="fwd_post", sync_op_or_fn="all_reduce")


def schedule(s):
"""
FLOATS = SCHEDULE.replace("INPUT", "torch.randn(2, 3, 10)")
IDS = SCHEDULE.replace("INPUT", "torch.randint(1, 9, (2, 4))")
IMAGES = SCHEDULE.replace("INPUT", "torch.randn(2, 6, 5, 5)")
# The second instance's number comes of the first one's weight.
TWO_OF_A_CLASS = (
    MLP.replace("class Model", "class Heads")
    .replace("__init__(self)", "__init__(self, heads)")
    .replace("__init__()\n", "__init__()\n        self.heads = heads\n")
    .replace("F.gelu(self.fc_in(x))", "heads(self.fc_in(x), self.heads)")
    + """

def heads(x, count):
    return x.unflatten(-1, (count, -1)).softmax(-1).flatten(-2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Heads(4)
        self.other = Heads(len(self.one.fc_in.weight) // 3)

    def forward(self, x):
        return self.other(self.one(x))
"""
)
# Sizes that are taken of a tensor which every rank has whole.
SIZED_AS = (
    HEAD
    + """\
        self.fc_in, self.fc_out = nn.Linear(10, 40), nn.Linear(40, 10)

    def forward(self, x):
        like = x.unsqueeze(-2).expand(-1, -1, 4, -1)
        heads = self.fc_in(x).view_as(like)
        heads = heads.cumsum(-1).reshape_as(x.repeat(1, 1, 4))
        return x + self.fc_out(heads)
"""
)
PAIR = '    column(s["fc_in"])\n    row(s["fc_out"])\n'
CHANNELS = """\
    channels = ["weight", "bias", "running_mean", "running_var"]
    s["conv1"].shard("weight", axis=0)
    s["conv1"].sync(mode="bwd_post", sync_op_or_fn="all_reduce")
    for name in channels:
        s["bn1"].shard(name, axis=0)
    row(s["conv2"])
    s["conv3"].shard("weight", axis=0)
    s["conv3"].sync(mode="bwd_post", sync_op_or_fn="all_reduce")
    s["bn3"].shard(channels, axis=0)
    s["bn3"].sync(
        mode="fwd_post", sync_op_or_fn="all_gather", axis=1, tensor_parallel_output_grad=False
    )
"""
BLOCK = """\
    column(s["first.fc_in"])
    s["first"].shard(["scale", "features"], axis=0)
    row(s["first.fc_out"])
"""
EMBEDDING = '    s["wte"].shard("weight", axis=0)\n    s["wte"].sync("fwd_post", "all_reduce")\n'
WITH_HEADS = """\
    for head in s["{second,third}"]:
        head.shard("weight", axis=0)
        head.sync(mode="bwd_post", sync_op_or_fn="all_reduce")
        head.sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=-1)
"""
UNTIED = "".join(line for line in TIED.splitlines(keepends=True) if ".weight" not in line)
WRITTEN = MLP.replace(
    "nn.Linear(12, 10)\n",
    """nn.Linear(12, 10)
        self.scale = nn.Parameter(torch.ones(12))
        with torch.no_grad():
            self.fc_in.bias.copy_(torch.arange(12.0))
            eye = torch.eye(12, 10)
            self.fc_in.weight.data.copy_(eye)
            self.fc_out.bias.copy_(torch.arange(10.0))
            self.scale.copy_(torch.arange(12.0).cos())
""",
).replace("self.norm(F", "self.scale * self.norm(F")
SCALED = PAIR + '    s.shard("scale", axis=0)\n'


CASES = {
    "written": Case(WRITTEN, FLOATS + SCALED),
    "mlp": Case(MLP, FLOATS + PAIR),
    "conv1d": Case(CONV1D, FLOATS + '    column(s["fc_in"], 1)\n    row(s["fc_out"], 0)\n'),
    "conv": Case(BOTTLENECK, IMAGES + CHANNELS),
    "embedding": Case(UNTIED, IDS + EMBEDDING),
    "embedding_features": Case(
        UNTIED,
        IDS
        + '    s["wte"].shard("weight", axis=1)\n'
        + '    s["wte"].sync("fwd_post", "all_gather", axis=-1)\n',
    ),
    "tied": Case(TIED, IDS + EMBEDDING + WITH_HEADS),
    "tied_one": Case(TIED, IDS + EMBEDDING),
    "layer_norm": Case(
        LAYER_NORM, FLOATS + PAIR + '    s["norm"].shard(["weight", "bias"], axis=0)\n'
    ),
    "rms_norm": Case(RMS_NORM, FLOATS + PAIR + '    s["norm"].shard("weight", axis=0)\n'),
    "attribute": Case(CHECKED, FLOATS + BLOCK),
    "sized_as": Case(SIZED_AS, FLOATS + PAIR),
}


def test_sizes_of_another_tensor_but_for_one(tmp_path):
    text = changed_lines(rewritten(tmp_path, SIZED_AS, FLOATS + PAIR))
    assert "self.fc_in(x).view(*like.shape[:-2], -1, *like.shape[-1:])\n" in text
    assert "heads.cumsum(-1).reshape(*x.repeat(1, 1, 4).shape[:-1], -1)\n" in text
    both = SIZED_AS.replace("_as(like)", "_as(self.fc_in(x).view(2, 3, -1, 10))")
    text = changed_lines(rewritten(tmp_path, both, FLOATS + PAIR))
    assert "view(*like" not in text and ".reshape(*x" in text


def test_every_layer_gets_its_like(tmp_path):
    text = changed_lines(rewritten(tmp_path, BOTTLENECK, IMAGES + CHANNELS))
    for line in (
        "self.conv1 = ColumnParallelConv2d(6, 8, kernel_size=1, stride=1, bias=False)",
        "self.bn1 = ParallelBatchNorm2d(8)",
        "self.bn3 = ParallelBatchNorm2d(10, gather_output=True)",
    ):
        assert f"+        {line}\n" in text
    norm = '    s["norm"].shard(["weight", "bias"], axis=0)\n'
    text = changed_lines(rewritten(tmp_path, LAYER_NORM, FLOATS + PAIR + norm))
    assert "+        self.norm = ParallelLayerNorm(12)\n" in text


def test_an_attribute_is_split_where_it_is_asked_for(tmp_path):
    text = changed_lines(rewritten(tmp_path, CHECKED, FLOATS + BLOCK))
    assert "+        self.features = part_size(self.features)\n" in text
    assert text.count("part_size(") == 1 and "+class " in text, "the second block stays whole"


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        (BLOCK.replace(', "features"', ""), "SR104", 'shard the attribute: .shard("its_name"'),
        (BLOCK.replace('["scale", "features"]', '"features"'), "SR104", "combines a part"),
        ('    s["second"].shard("features", axis=0)\n', "SR104", 's["second"].shard("features"'),
        ('    s["first"].shard("featurs", axis=0)\n', "SR203", "did you mean `features`?"),
        ('    s["first.fc_in"].shard("in_features", axis=0)\n', "SR305", "shard the weight"),
        ('    s["first"].shard("features", axis=1)\n', "SR301", "there is no axis 1"),
        ('    s["first"].shard("features", axis=0, parts=3)\n', "SR206", "it has no parts"),
        (BLOCK + '    s["first"].shard("features", axis=0)\n', "SR303", "already sharded"),
    ],
)
def test_attributes_that_are_refused(lines, code, words, tmp_path):
    assert words in refused(tmp_path, CHECKED, FLOATS + lines, code)


@pytest.mark.parametrize(
    ("source", "lines", "code", "words"),
    [
        (
            BOTTLENECK,
            CHANNELS + '    s["bn3"].sync("bwd_post", "all_reduce")\n',
            "SR304",
            "no part",
        ),
        (LAYER_NORM, PAIR, "SR104", "combines a part of shape [2, 3, 6]"),
        (
            MLP.replace("F.gelu(", "gelu(")
            + "\n@torch.jit.script\ndef gelu(x):\n    return x * torch.sigmoid(1.702 * x)\n",
            PAIR,
            "SR104",
            "a TorchScript function gets a part and cannot be followed",
        ),
        (MLP, PAIR + '    s["fc_in"].shard("weight", axis=1)\n', "SR303", "already sharded"),
        (
            MLP.replace(
                "= nn.Identity()\n", "= nn.Identity()\n        self.fc_in.__class__ = Scaled\n"
            )
            + "\n\nclass Scaled(nn.Linear):\n    pass\n",
            PAIR,
            "SR103",
            "is constructed as a `Linear`, but later becomes a `Scaled`",
        ),
        (
            MLP.replace("F.gelu(", "self.scale * F.gelu(").replace(
                "= nn.Identity()\n",
                "= nn.Identity()\n        self.scale = len(self.fc_in.weight) ** -0.5\n",
            ),
            PAIR,
            "SR305",
            "`scale` is 0.408248290463863 on a rank of two, and 0.2886",
        ),
        (
            MLP.replace(
                "= nn.Identity()\n",
                "= nn.Identity()\n        self.gathers = torch.distributed.is_initialized()\n",
            ),
            PAIR,
            "SR305",
            "something that is split, or from torch.distributed",
        ),
        (
            MLP.replace(
                "= nn.Identity()\n",
                "= nn.Identity()\n        ranks = 1 + torch.distributed.is_initialized()\n"
                "        self.own = nn.Parameter(torch.zeros(12 // ranks))\n",
            ),
            PAIR,
            "SR305",
            "or depends on torch.distributed: its shape is (6,) on a rank of two, and (12,)",
        ),
        (
            TWO_OF_A_CLASS,
            PAIR.replace('["', '["one.'),
            "SR305",
            "`other.heads` is 2 on a rank of two, and 4 in the whole model",
        ),
    ],
)
def test_refusals(source, lines, code, words, tmp_path):
    schedule = (IMAGES if source is BOTTLENECK else FLOATS) + lines
    assert words in refused(tmp_path, source, schedule, code)


def test_a_layer_of_a_class_that_replaces_another_is_split(tmp_path):
    """It was constructed as another class, but by no code that the output still has."""
    scaled = "class Scaled(torch.nn.Linear):\n    pass\n\n\ndef schedule("
    schedule = FLOATS.replace("def schedule(", scaled) + '    s["fc_in"].replace(Scaled)\n'
    output = rewritten(tmp_path, MLP, schedule + PAIR)
    assert "self.fc_in = Scaled(" in changed_lines(output)
    assert "class Scaled(ColumnParallelLinear)" in output.files["modules.py"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case rewritten."""
    path = tmp_path_factory.mktemp("shard")
    prepare(path, CASES)
    return path


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, 4])
def test_numbers(folder, world):
    run(compare, world, folder, CASES)


def test_of_what_a_constructor_writes_a_rank_takes_its_part(tmp_path):
    changed = changed_lines(rewritten(tmp_path, WRITTEN, FLOATS + SCALED))
    for line in (
        'self.fc_in.bias.copy_(own_part(self.fc_in, "bias", torch.arange(12.0)))',
        'self.fc_in.weight.data.copy_(own_part(self.fc_in, "weight", eye))',
        'self.scale.copy_(own_part(self, "scale", torch.arange(12.0).cos()))',
    ):
        assert f"+            {line}\n" in changed
    assert "fc_out.bias" not in changed


@pytest.mark.parametrize(
    ("normed", "names"),
    [
        (
            "torch.nn.utils.parametrizations.weight_norm",
            "`parametrizations.weight.original0` and `parametrizations.weight.original1`",
        ),
        ("torch.nn.utils.parametrizations.orthogonal", "`parametrizations.weight.original`"),
        ("torch.nn.utils.spectral_norm", "`weight_orig`"),
    ],
)
def test_a_weight_that_is_worked_out_of_others_is_refused_in_words(normed, names, tmp_path):
    source = MLP.replace("nn.Linear(10, 12)", f"{normed}(nn.Linear(10, 12))")
    schedule = (
        'def model(m):\n    return m.Model()\n\n\ndef schedule(s):\n    s["fc_in"].shard("weight"'
    )
    words = refused(tmp_path, source, schedule + ", axis=0)\n", "SR203")
    assert f"is not a parameter: a parametrization or a hook computes it from {names}" in words


OWN_LAYERS = """\
import torch
from torch import nn
from torch.nn import functional as F


class Linear(BASE):
    def __init__(self, fan_in, fan_out):
        MADE

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.out = Linear(width, width), Linear(width, width)

    def forward(self, x):
        q = self.query(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        return self.out(((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(16, 4)

    def forward(self, x):
        return x + self.attention(x)


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.attention = nn.Embedding(32, 16), Attention(16, 4)

    def forward(self, ids, x):
        return x + self.attention(self.table(ids))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.reader, self.writer = Reader(), Writer()

    def forward(self, x, ids):
        return self.writer(ids, self.reader(x))
"""
BOTH_SIDES = (
    SPLITTING.replace("(2, 8)", "(2, 5, 16), 'ids': torch.randint(32, (2, 5))")
    + "    for side in ('reader', 'writer'):\n"
    "        s[side]['attention.query'].shard('weight', axis=0)\n"
    "        s[side]['attention.out'].shard('weight', axis=1)\n"
    "    s['writer.table'].shard('weight', axis=0)\n"
    "    s.infer_sync()\n"
)


@pytest.mark.parametrize(
    ("base", "made"),
    [
        ("nn.Linear", "super().__init__(fan_in, fan_out, bias=False)"),
        (
            "nn.Module",
            "super().__init__(); self.weight = nn.Parameter(torch.randn(fan_out, fan_in) / 4)",
        ),
    ],
)
def test_heads_are_cut_once_where_a_module_around_holds_what_is_split(tmp_path, base, made):
    """Layers of one's own hold what is split themselves, which is no reason to look further out."""
    source = OWN_LAYERS.replace("BASE", base).replace("MADE", made)
    text = changed_lines(rewritten(tmp_path, source, BOTH_SIDES))
    assert text.count("part_size(self.heads)") == 1
    assert "+        self.heads = part_size(self.heads)\n" in text


WRAPPED = """\
class Linear(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out, bias=False)

    def forward(self, x):
        return self.linear(x) * 0.5


"""


def test_heads_are_cut_once_where_layers_are_wrapped(tmp_path):
    """In the text where nothing around is split, and as an attribute in the other."""
    start, end = OWN_LAYERS.index("class Linear"), OWN_LAYERS.index("class Attention")
    source = OWN_LAYERS[:start] + WRAPPED + OWN_LAYERS[end:]
    schedule = BOTH_SIDES.replace(".query'", ".query.linear'").replace(".out'", ".out.linear'")
    text = changed_lines(rewritten(tmp_path, source, schedule))
    assert text.count("part_size(self.heads)") == 2
    assert "+        self.heads = part_size(self.heads)\n" in text
