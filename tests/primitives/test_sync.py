"""Slapo's `sync` and its reshard schemes, on source: what is written, its numbers, what is refused.

The reshard cases are those of Slapo's own tests: a two-layer MLP whose values are whole (RR) or
split along the last axis (RS) or the one before (SR) between the layers.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from tests.numbers import Case, compare, prepare
from tests.primitives.test_checkpoint import NAMED
from tests.processes import run
from tests.rewriting import SPLITTING, changed_lines, refused, rewritten

SOURCE = """\
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Output(dict):
    hidden: torch.Tensor
    loss: torch.Tensor = None

    def __post_init__(self):
        self.update(hidden=self.hidden, loss=self.loss)


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        x = self.norm(x)
        x = F.gelu(self.fc1(x))
        return self.fc2(x)


class Stem(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(11, width)

    def forward(self, ids):
        return self.table(ids), None


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = Stem(width)
        self.drop = nn.Dropout(0.0)
        self.mlp = MLP(width)
        self.head = nn.Linear(width, 5)

    def forward(self, ids):
        x, _ = self.stem(ids)
        x = x + self.mlp(self.drop(x))
        return Output(hidden=self.head(x))
"""

HEAD = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"ids": torch.arange(16).view(2, 8) % 11}


def loss(outputs):
    return outputs["hidden"].square().mean()


def schedule(s):
    fc1, fc2, mlp = s["mlp.fc1"], s["mlp.fc2"], s["mlp"]
"""

COLUMN = 'fc1.shard(["weight", "bias"], axis=0)\nfc1.sync("bwd_post", "all_reduce")\n'
ROW = 'fc2.shard("weight", axis=1)\nfc2.sync("fwd_post", "all_reduce")\n'

CASES = {
    "whole": 'fc1.sync("fwd_post", "RR->RR")\n',
    "to_rows": COLUMN + 'fc1.sync("fwd_post", "RS->SR")\nfc2.sync("fwd_post", "SR->RR")\n',
    "to_rows_and_back": COLUMN
    + 'fc1.sync("fwd_post", "RS->SR")\nfc1.sync("fwd_post", "SR->RS")\n'
    + ROW,
    "megatron": COLUMN + ROW,
    "columns_twice": COLUMN
    + 'fc1.sync("fwd_post", "RS->RR")\n'
    + COLUMN.replace("fc1", "fc2")
    + 'fc2.sync("fwd_post", "RS->RR")\n',
    "cut": 'fc1.sync("fwd_post", "RR->RS")\n' + ROW,
    "rows": 'fc1.sync("fwd_post", "RR->SR")\nfc2.sync("fwd_post", "SR->RR")\n',
    "rows_before": 'fc1.sync("fwd_pre", "RR->SR")\nfc2.sync("fwd_post", "SR->RR")\n',
    "kept": COLUMN + 'fc1.sync("fwd_post", "RS->RS")\n' + ROW,
    # Sequence parallelism, with the collectives at each kind of border.
    "at_modules": COLUMN.splitlines()[0]
    + """
s["stem.table"].shard("weight", axis=0)
s["stem.table"].sync("fwd_post", "reduce_scatter", axis=1)
mlp.sync("fwd_pre", "all_gather", axis=1)
fc2.shard("weight", axis=1)
mlp.sync("fwd_post", "reduce_scatter", axis=1)
s["head"].sync("fwd_post", "all_gather", axis=1)
""",
    "at_calls": COLUMN.splitlines()[0]
    + """
s["stem"].sync("fwd_post", "scatter", axis=1)
s["drop"].sync("fwd_pre", "all_gather", axis=1)
s["drop"].sync("fwd_post", "scatter", axis=1)
fc1.sync("fwd_pre", "all_gather", axis=1)
fc2.shard("weight", axis=1)
fc2.sync("fwd_post", "reduce_scatter", axis=1)
s.sync("fwd_post", "all_gather", axis=1)
""",
}


# Norms with whole weights on slices of the sequence, and one on this rank's heads.
NORMS = """\
import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.LayerNorm):
    pass


class Shifted(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


class Own(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.q_norm = nn.RMSNorm(width // heads)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        B, T, D = x.shape
        q = self.q_norm(self.q(x).view(B, T, self.heads, -1)).transpose(1, 2)
        k = self.k(x).tanh().view(B, T, self.heads, -1).transpose(1, 2)
        v = self.v(x).view(B, T, self.heads, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.first = nn.LayerNorm(width)
        self.norms = nn.Sequential(Norm(width), Shifted(width), Own(width))
        self.attention = Attention(width, 4)

    def forward(self, ids):
        x = self.first(self.table(ids))
        return {"hidden": x.sum(1) + self.attention(self.norms(x)).sum(1)}
"""

ON_SLICES = """\
s["norms"].sync("fwd_pre", "scatter", axis=1)
s["attention"].sync("fwd_pre", "all_gather", axis=1)
s["attention.{q,k,v}"].shard(["weight", "bias"], axis=0)
s["attention.o"].shard("weight", axis=1)
s["attention.o"].sync("fwd_post", "all_reduce")
"""


CROSS = """\
import torch
from torch import nn


class Cross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own, self.other = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x, scale=1.0, encoded=None):
        inner = self.own(x).sigmoid() * scale
        if encoded is not None:
            inner = inner * self.other(encoded)
        return self.down(inner)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.encoder = nn.Linear(width, width)
        self.layers = nn.ModuleList([Cross(width) for _ in range(3)])

    def forward(self, ids):
        x = self.table(ids)
        encoded = self.encoder(x)
        x = x + self.layers[0](x, 0.5, encoded)
        x = x + self.layers[1](x, encoded=encoded)
        return {"hidden": x + self.layers[2](x)}
"""
OF_AN_ARGUMENT = """\
s["layers.*.{own,other}"].shard(["weight", "bias"], axis=0)
s["layers.*.down"].shard("weight", axis=1)
s["layers.*.down"].sync("fwd_post", "all_reduce")
s["layers.*.own"].sync("bwd_post", "all_reduce")
s["layers"][:2].sync("bwd_post", "all_reduce", of="encoded")
"""
OF_ALL = OF_AN_ARGUMENT.replace("[:2]", '["*"]')


def case(lines: str) -> Case:
    return Case(SOURCE, HEAD + "".join(f"    {line}\n" for line in lines.strip().split("\n")))


def every_case() -> dict[str, Case]:
    head = HEAD.replace('    fc1, fc2, mlp = s["mlp.fc1"], s["mlp.fc2"], s["mlp"]\n', "")

    def other(source: str, lines: str) -> Case:
        return Case(source, head + "".join(f"    {line}\n" for line in lines.splitlines()))

    return {name: case(lines) for name, lines in CASES.items()} | {
        "norms": other(NORMS, ON_SLICES),
        "of an argument": other(CROSS, OF_ALL),
        "of an argument of some": other(CROSS, OF_AN_ARGUMENT),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sync")
    prepare(path, every_case())
    return path


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, 4])
def test_numbers(folder, world):
    run(compare, world, folder, every_case())


def test_norms_on_a_slice_sum_their_gradients(tmp_path):
    given = every_case()["norms"]
    added = changed_lines(rewritten(tmp_path, given.source, given.schedule))
    assert "+class Norm(ReplicatedLayerNorm):\n" in added
    assert "+class Shifted(ReplicatedLayerNorm):\n" in added
    assert "+            all_reduce_gradient(self.weight),\n" in added
    assert "+        self.q_norm = ReplicatedRMSNorm(width // heads)\n" in added
    assert "self.first" not in added


def changes(tmp_path, lines: str) -> str:
    given = case(lines)
    return changed_lines(rewritten(tmp_path, given.source, given.schedule))


SLICED = "reduce=ReduceScatter(axis=1)"
SUMMED = "axis=1, tensor_parallel_output_grad=True"
FC1 = "        self.fc1"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "to_rows",
            [
                "        x = F.gelu(all_to_all(self.fc1(x), gather_axis=-1, scatter_axis=-2))",
                "        self.fc2 = ReplicatedLinear(2 * width, width)",
                "        return all_gather(self.fc2(x), axis=-2)",
            ],
        ),
        ("columns_twice", [f"{FC1} = ColumnParallelLinear(width, 2 * width, gather_output=True)"]),
        ("cut", ["        x = F.gelu(scatter(self.fc1(x), axis=-1))"]),
        ("rows_before", ["        x = F.gelu(self.fc1(scatter(x, axis=-2)))"]),
        (
            "at_modules",
            [
                f"        self.table = VocabParallelEmbedding(11, width, {SLICED})",
                "        self.norm = ReplicatedLayerNorm(width)",
                f"        x = all_gather(x, {SUMMED})",
                "        return reduce_scatter(self.fc2(x), axis=1)",
                "        return Output(hidden=all_gather(self.head(x), axis=1))",
            ],
        ),
        (
            "at_calls",
            [
                "        return scatter(self.table(ids), axis=1), None",
                f"        x = F.gelu(self.fc1(all_gather(x, {SUMMED})))",
                f"        self.fc2 = RowParallelLinear(2 * width, width, {SLICED})",
                "        x = x + self.mlp(scatter(self.drop(all_gather(x, axis=1)), axis=1))",
                "        return Output(hidden=all_gather(self.head(x), axis=1))",
            ],
        ),
    ],
)
def test_what_is_written(name, lines, tmp_path):
    text = changes(tmp_path, CASES[name])
    for line in lines:
        assert f"+{line}\n" in text


def test_what_changes_nothing_leaves_nothing(tmp_path):
    assert changes(tmp_path, CASES["whole"]) == ""


SCATTER = 's["drop"].sync("fwd_post", "scatter", axis=1)\n'
SPLIT = 'fc1.shard(["weight", "bias"], axis=0)\nfc2.shard("weight", axis=1)\n'


def sync(module: str, operation: str, more: str = "", mode: str = "fwd_post") -> str:
    return f'{module}.sync("{mode}", "{operation}"{more})\n'


GATHER = sync("mlp", "all_gather", ", axis=1, tensor_parallel_output_grad=%s", "fwd_pre")

# What the layer gives, and what is done with it.
AT_LAYERS = [
    (COLUMN + sync("fc1", "reduce_scatter", ", axis=1"), "SR304", "would add up different"),
    (COLUMN + sync("fc1", "scatter", ", axis=1"), "SR304", "it is already scattered"),
    (COLUMN + sync("fc1", "RR->RS"), "SR304", "it is already scattered"),
    (COLUMN + sync("fc1", "SR->RR"), "SR104", "a part along axis 2, but is gathered along axis -2"),
    (COLUMN + sync("fc1", "RR->RR") + ROW, "SR104", "is a part along axis 2, not whole"),
    (ROW.replace("all_reduce", "RS->RR"), "SR304", "would concatenate the summands"),
    (ROW.replace('"all_reduce"', '"scatter", axis=1'), "SR304", "has to be added up first"),
    (sync("fc1", "reduce_scatter", ", axis=1"), "SR104", "is whole: a reduce-scatter would add up"),
    (
        COLUMN.replace("axis=0", "axis=0, parts=2") + sync("fc1", "RS->SR"),
        "SR104",
        "has 2 equal parts side by side",
    ),
    (sync("fc1", "RS->SR"), "SR104", "whole on every rank: there is nothing to gather"),
    (sync("fc1", "RS->RS"), "SR104", "whole on every rank: there is nothing to gather"),
    (
        COLUMN + 'fc2.shard("weight", axis=1)\n' + sync("mlp", "scatter", ", axis=1"),
        "SR104",
        "slice of its summand",
    ),
]
# A gather or a scatter that is missing, or in the wrong place.
OUT_OF_PLACE = [
    (SCATTER, "SR104", "combines a part of shape [2, 4, 8], of `drop`, with a whole value"),
    (SCATTER + COLUMN + ROW, "SR104", "its input is split along axis 1"),
    (SCATTER + sync("mlp", "all_gather", ", axis=0"), "SR104", "but is gathered along axis 0"),
    (SCATTER + sync("mlp", "all_gather", ", axis=3"), "SR104", "but is gathered along axis 3"),
    (SCATTER + sync("mlp", "RR->RS", mode="fwd_pre"), "SR104", "it is already scattered"),
    (SCATTER.replace("1", "3"), "SR104", "has 3 axes: there is no axis 3"),
    (
        SCATTER + 's["stem"].sync("fwd_post", "scatter", axis=2)\n',
        "SR104",
        "the output of `drop` is a part along axis 2: it is already scattered",
    ),
]
# What becomes of gradients.
GRADIENTS = [
    (
        SCATTER + sync("mlp", "all_gather", ", axis=1, tensor_parallel_output_grad=True"),
        "SR104",
        "combines a value gathered by `mlp`, whose gradient is summed over the ranks",
    ),
    (
        SCATTER + SPLIT + GATHER % False + sync("mlp", "all_reduce"),
        "SR104",
        "let the all-gather on `mlp` add it up",
    ),
    (
        sync("mlp", "all_reduce", mode="bwd_post") + sync("fc1", "scatter", ", axis=1"),
        "SR104",
        "is inside `mlp`",
    ),
]
ARGUMENTS = [
    (sync("fc1", "scatter"), "SR206", "`scatter` needs an axis"),
    (sync("fc1", "RS->SR", ", axis=1"), "SR206", "already names the axes"),
    (sync("fc1", "SS->RR"), "SR206", "did you mean"),
    (
        sync("fc1", "all_reduce", ", tensor_parallel_output_grad=True"),
        "SR206",
        "is only for an `all_gather`",
    ),
    (
        sync("fc1", "all_gather", ', axis=1, tensor_parallel_output_grad="yes"'),
        "SR206",
        "must be True or False",
    ),
    (sync("fc1", "reduce_scatter", ", axis=1", "bwd_post"), "SR305", "cannot be combined"),
    (sync("fc1", "RR->RS") + sync("fc1", "scatter", ", axis=-1"), "SR304", "already has this sync"),
    (sync("mlp", "all_reduce", ', of="y"', "bwd_post"), "SR206", "takes no argument 'y'"),
    (sync("mlp", "all_reduce", ', of="x"'), "SR206", "binds no name 'x' beside its arguments"),
]


DENSE = """\
from torch import nn


class Dense(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())
"""
DENSE_SCHEDULE = """\
import torch


def model(m):
    return m.Dense(8)


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""


@pytest.mark.parametrize(
    ("lines", "code", "words"), [*AT_LAYERS, *OUT_OF_PLACE, *GRADIENTS, *ARGUMENTS]
)
def test_what_is_refused(lines, code, words, tmp_path):
    given = case(lines)
    text = refused(tmp_path, given.source, given.schedule, code)
    assert words in text
    assert "s.py:" in text, "the schedule's line is shown"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "would be summed over the ranks for both"),
        (
            's["up"].shard(["weight", "bias"], axis=0)\n'
            's["down"].shard("weight", axis=1)\n'
            's["down"].sync("fwd_post", "all_reduce")\n'
            's.sync("bwd_post", "all_reduce")\n',
            "summed over the ranks twice, for `up` and for `s`",
        ),
    ],
)
def test_a_gradient_that_only_callers_ask_for_is_summed_once(lines, words, tmp_path):
    lines += sync('s["up"]', "all_reduce", mode="bwd_post")
    text = refused(tmp_path, DENSE, DENSE_SCHEDULE + indent(lines, "    "), "SR104")
    assert words in text
    shown = {line for line in lines.splitlines() if "bwd_post" in line and line in text}
    assert len(shown) == 1 + (words in lines or "twice" in words), "the schedule's lines are shown"


GATED = """\
import torch
from torch import nn
from torch.nn import functional as F


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, weights):
        return self.down(self.up(x).tanh()) * weights


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.route, self.gated = nn.Linear(8, 8), nn.Linear(8, 1), Gated()

    def forward(self, x):
        x = self.stem(x)
        return self.gated(x, self.route(x).sigmoid())
"""
GATED_LINES = [
    's["gated.up"].shard(["weight", "bias"], axis=0)',
    's["gated.down"].shard("weight", axis=1)',
    's["gated.down"].sync("fwd_post", "all_reduce")',
    's["gated.up"].sync("bwd_post", "all_reduce")',
]
BARE = GATED.replace(
    "self.down(self.up(x).tanh())", "F.linear(F.linear(x, self.up).tanh(), self.down)"
)
BARE = BARE.replace("nn.Linear(8, 8)\n", "nn.Parameter(torch.randn(8, 8))\n").replace(
    "self.up, self.down = nn.Linear(8, 8)", "self.up, self.down = nn.Parameter(torch.randn(8, 8))"
)
BARE_LINES = [
    's["gated"].shard("up", axis=0)',
    's["gated"].shard("down", axis=1)',
    's["gated"].sync("fwd_post", "all_reduce")',
    's["gated"].sync("bwd_post", "all_reduce")',
]


@pytest.mark.parametrize(
    ("source", "lines", "advised"),
    [
        (GATED, GATED_LINES[:3], GATED_LINES[3]),
        # The bias stays whole, and both axes have the size.
        (GATED, [GATED_LINES[0], GATED_LINES[3]], GATED_LINES[1]),
        # The sum that would make it one whole value is there already, and comes later.
        (BARE, BARE_LINES, 's["gated"].sync("bwd_post", "all_reduce", of="weights")'),
    ],
)
def test_the_line_that_is_advised_is_right(source, lines, advised, tmp_path):
    head = SPLITTING.partition("def split")[0] + "def schedule(s):\n"
    text = refused(tmp_path, source, head + indent("\n".join(lines), "    "), "SR104")
    assert advised in text.partition("= help: ")[2]
    completed = [*lines, advised, *(GATED_LINES[2:3] if advised == GATED_LINES[1] else ())]
    rewritten(tmp_path, source, head + indent("\n".join(completed), "    "))


def test_both_lines_of_the_schedule_are_shown(tmp_path):
    given = case(COLUMN + 'mlp.sync("fwd_post", "all_gather", axis=1)\nfc2.shard("weight", axis=1)')
    text = refused(tmp_path, given.source, given.schedule, "SR104")
    assert "the output of `mlp` is a partial sum" in text
    assert "s.py:20:5" in text and "s.py:21:5" in text


def test_a_border_without_a_tensor(tmp_path):
    source = SOURCE.replace("return self.table(ids), None", "return None, self.table(ids)")
    source = source.replace("x, _ = self.stem", "_, x = self.stem")
    given = case('s["stem"].sync("fwd_post", "scatter", axis=1)')
    text = refused(tmp_path, source, given.schedule, "SR104")
    assert "the first value that `stem` returns is no tensor" in text


def test_a_first_tensor_that_is_not_written_out(tmp_path):
    source = SOURCE.replace(
        "return self.table(ids), None", "both = self.table(ids), None\n        return both"
    )
    given = case(
        's["stem"].sync("fwd_post", "scatter", axis=1)\ns.sync("fwd_post", "all_gather", axis=1)'
    )
    text = refused(tmp_path, source, given.schedule, "SR305")
    assert "returns its first tensor inside of an object that is not written out here" in text


@pytest.mark.parametrize("name", ["norm", "again"])
def test_calls_by_two_names(name, tmp_path):
    source = """\
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.again = self.norm

    def forward(self, x):
        return self.norm(self.up(x)) + self.again(self.up(x + 1))
"""
    schedule = f"""\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {{"x": torch.randn(2, 8)}}


def schedule(s):
    s["up"].shard(["weight", "bias"], 0)
    s["up"].sync("bwd_post", "all_reduce")
    s["{name}"].sync("fwd_pre", "all_gather", axis=-1)
"""
    words = refused(tmp_path, source, schedule, "SR305")
    assert "`norm` is also `again`, and the change goes to the calls of `self.norm` only" in words


STACKED = """\
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_the_input_of_a_later_layer_needs_its_gradient(tmp_path):
    """The first layer's input needs none, and only one layer is followed."""
    schedule = """\
import torch


def model(m):
    return m.Stack()


def inputs(model):
    return {"x": torch.randn(2, 8)}


def schedule(s):
    s["layers.*.up"].shard(["weight", "bias"], axis=0)
    s["layers.*.down"].shard("weight", axis=1)
    s["layers.*.down"].sync("fwd_post", "all_reduce")
"""
    assert "nothing adds it up" in refused(tmp_path, STACKED, schedule, "SR104")


def test_one_of_two_forwards_gets_its_collective_where_it_is_called(tmp_path):
    """The text of the class would be changed at the last, and Python took the first."""
    one = NAMED[NAMED.index("    def forward") : NAMED.index("class Model")].rstrip() + "\n"
    ways = [indent(way, "    ") for way in (one, one.replace("tanh", "relu"))]
    source = NAMED.replace(one, "    if torch:\n\n{}\n    else:\n\n{}".format(*ways))
    head, _, _ = SPLITTING.partition("def split")
    schedule = f"""{head}def schedule(s):
    s["block.up"].shard(["weight", "bias"], axis=0)
    s["block.down"].shard("weight", axis=1)
    s["block.down"].sync("fwd_post", "all_reduce")
    s["block"].sync("bwd_post", "all_reduce")
"""
    lines = changed_lines(rewritten(tmp_path, source, schedule))
    assert "+        return self.block(all_reduce_gradient(x))" in lines
