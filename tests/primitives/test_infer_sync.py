"""`infer_sync` adds the syncs that one would write by hand, and none that exist already."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from slapo_rewrite.emit.explanation import explain
from slapo_rewrite.emit.rewrite import Output, rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.lowering import lower
from slapo_rewrite.sharding.placements import Flow, PlacementError, State
from tests.marks import long
from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.rewriting import SPLITTING, refused, rewritten
from tests.zoo.test_flow import BACKWARD, FORWARD, SCHEDULE, SOURCE

ROOT = Path(__file__).resolve().parents[2]
INFER = "    s.infer_sync()\n"
BOTH = "    up" + BACKWARD + "    down" + FORWARD
CHANNELS = """\
    s["up"].shard(["weight", "bias"], axis=0)
    s["down"].shard("weight", axis=1)
    s.infer_sync()
"""


def texts(output: Output) -> dict[str, str]:
    """The model file and its helpers, without the line that says what they were written for."""
    helpers = {n: t.partition("\n")[2] for n, t in output.files.items() if n.endswith(".py")}
    del helpers[output.model_file]
    return {"model": output.files[output.model_file], **helpers}


@pytest.mark.parametrize(
    ("stated", "open_"),
    [
        (BOTH, ""),
        (BOTH, BOTH),
        ("    mlp" + BACKWARD + "    down" + FORWARD, "    mlp" + BACKWARD),
        ("    mlp" + BACKWARD + "    mlp" + FORWARD, "    mlp" + BACKWARD + "    mlp" + FORWARD),
        ("    up" + BACKWARD + "    mlp" + FORWARD, "    mlp" + FORWARD),
        *[("    up" + BACKWARD + '    down.sync("fwd_post", added_up)\n',) * 2],
    ],
)
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_what_is_missing_is_added_and_nothing_else(stated, open_, before, tmp_path):
    head, body = SCHEDULE.split("def schedule(s):\n")
    lines = INFER + body + open_ if before else body + open_ + INFER
    wanted = rewritten(tmp_path, SOURCE, SCHEDULE + stated)
    assert texts(rewritten(tmp_path, SOURCE, f"{head}def schedule(s):\n{lines}")) == texts(wanted)


def test_the_nearest_call_is_about_a_module_and_no_other(tmp_path):
    open_ = '    s["block"].infer_sync()\n'
    assert texts(rewritten(tmp_path, SOURCE, SCHEDULE + open_)) == texts(
        rewritten(tmp_path, SOURCE, SCHEDULE + BOTH)
    )
    text = refused(tmp_path, SOURCE, SCHEDULE + "    up.infer_sync()\n", "SR104")
    assert "`block.mlp.down` gives a partial sum" in text


def test_a_reduction_over_a_partition_has_it_gathered(tmp_path):
    source = SOURCE.replace(
        "return self.down(torch.relu(self.up(x)))", "return self.down(self.up(x).softmax(-1))"
    )
    schedule = SCHEDULE.replace('    down.shard("weight", axis=1)\n', "")
    stated = "    up" + BACKWARD + '    up.sync("fwd_post", "all_gather", axis=-1)\n'
    assert texts(rewritten(tmp_path, source, schedule + INFER)) == texts(
        rewritten(tmp_path, source, schedule + stated)
    )


def test_partial_sums_that_are_added_up_later_stay_partial(tmp_path):
    source = (
        SOURCE.replace(
            "        self.down = nn.Linear(4 * width, width)\n",
            "        self.down = nn.Linear(4 * width, width)\n        self.join = nn.Identity()\n",
        )
        .replace("return self.down(", "return self.join(2 * self.down(")
        .replace("(x)))", "(x))))")
    )
    join = '    mlp["join"]' + FORWARD
    assert texts(rewritten(tmp_path, source, SCHEDULE + join + INFER)) == texts(
        rewritten(tmp_path, source, SCHEDULE + join + "    up" + BACKWARD)
    )


def test_what_cannot_be_mended_is_refused_as_ever(tmp_path):
    schedule = SCHEDULE.replace('    up.shard(["weight", "bias"], axis=0)\n', "")
    text = refused(tmp_path, SOURCE, schedule + INFER, "SR104")
    assert "its input is whole on every rank" in text and "down.shard(" in text


def test_a_model_that_does_not_run_is_refused(tmp_path):
    source = SOURCE.replace("return self.block(", "raise ValueError\n        return self.block(")
    assert "cannot be inferred" in refused(tmp_path, source, SCHEDULE + INFER, "SR305")


@pytest.mark.long
def test_what_the_schedule_of_t5_states_would_be_inferred(tmp_path):
    text = (ROOT / "rules/schedules/t5.py").read_text()
    # All but where queries, keys and values add up their input's gradients together.
    left, count = re.subn(
        r"^( +)(?!.*Attention|.*of=).*\.sync\(.*\n", r"\1pass\n", text, flags=re.M
    )
    assert count == 5
    path = tmp_path / "s.py"
    path.write_text(left.replace("    stacks[:", INFER + "    stacks[:"))
    source = "transformers.models.t5.modeling_t5"
    # What the model returns is inferred to stay whole; that it need not is for the schedule to say.
    whole = ("parallel_loss=false",)
    assert texts(rewrite(source, str(path), whole)) == texts(rewrite(source, "t5", whole))


@pytest.mark.parametrize("settings", [(), ("ckpt_ratio=0.5",)])
def test_the_number_of_checks_does_not_grow_with_depth(settings, monkeypatch, tmp_path):
    schedule = (ROOT / "tests/models/gpt_schedule.py").read_text()
    checks = []
    propagate = lower.propagate
    monkeypatch.setattr(lower, "propagate", lambda *a: checks.append(1) or propagate(*a))
    counts = []
    for depth in (2, 6):
        (tmp_path / "s.py").write_text(
            schedule.replace("m.GPTConfig()", f"m.GPTConfig(n_layer={depth})")
        )
        checks.clear()
        rewrite("tests/models/gpt.py", str(tmp_path / "s.py"), settings)
        counts.append(len(checks))
    assert counts[0] == counts[1] <= 2


def test_explain_says_what_was_inferred(tmp_path):
    output = rewritten(tmp_path, SOURCE, SCHEDULE + INFER)
    write(tmp_path / "out", output.files)
    lines = output.files[output.model_file].splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "RowParallelLinear(" in line)
    text = explain(tmp_path / "out", f"{output.model_file}:{number}")
    assert "s.infer_sync()  (inferred: fwd_post all_reduce on block.mlp.down)" in text
    assert "block.mlp.up" not in text
    directives = json.loads(output.files["rewrite.json"])["directives"]
    assert [d.get("inferred") for d in directives[-2:]] == [
        "bwd_post all_reduce",
        "fwd_post all_reduce",
    ]


LOOKED_UP = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, vocabulary=24, width=8):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.up = nn.Linear(width, width)
        HEAD

    def forward(self, ids):
        x = self.up(self.emb(ids)).tanh()
        return LOGITS
"""
OF_IDS = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"ids": torch.arange(12).view(3, 4)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["emb"].shard("weight", axis=0)
    s.infer_sync()
"""


def looked_up(logits: str, head: str = "") -> str:
    return LOOKED_UP.replace("HEAD", head).replace("LOGITS", logits)


def test_the_hint_at_a_table_that_is_multiplied_by_is_right(tmp_path):
    """Written in a way of which it does not show that it is a head."""
    logits = 'torch.einsum("vd,btd->btv", self.emb.weight, x)'
    text = refused(tmp_path, looked_up(logits), OF_IDS, "SR104")
    assert (
        "a linear layer without bias, followed by `self.head.weight = self.embedding.weight`"
        in text
    )
    head = "self.head = nn.Linear(width, vocabulary, bias=False)"
    tied = f"{head}\n        self.head.weight = self.emb.weight"
    model = texts(rewritten(tmp_path, looked_up("self.head(x)", tied), OF_IDS))["model"]
    assert "width, vocabulary, bias=False, gather_output=True" in model
    assert "self.emb = VocabParallelEmbedding(vocabulary, width)" in model


OF_ANOTHER = (
    looked_up("self.head(x, self.emb)", "self.head = Head()")
    + """

class Head(nn.Module):
    def forward(self, x, emb):
        return x @ emb.weight.T
"""
)
# A vocabulary that 3 and 4 ranks do not divide.
TIED = {
    name: Case(source.replace("vocabulary=24", "vocabulary=26"), OF_IDS)
    for name, source in {
        "product": looked_up("x @ self.emb.weight.T"),
        "linear": looked_up("F.linear(x, self.emb.weight) * 0.5"),
        "matmul": looked_up("torch.matmul(x * 2, self.emb.weight.t()).softmax(-1)"),
        "transposed": looked_up("(x + 1) @ self.emb.weight.transpose(0, 1)"),
        "cast": looked_up("(x @ torch.transpose(self.emb.weight.to(x.dtype), 0, 1)).float()"),
        "einsum": looked_up('torch.einsum("...d, vd -> ...v", x, self.emb.weight.type_as(x))'),
        "twice": looked_up("x @ self.emb.weight.T + F.linear(x.square(), self.emb.weight)"),
        "another": OF_ANOTHER,
        "split": looked_up("x @ self.emb.weight.T"),
    }.items()
}
TIED["split"] = Case(
    TIED["split"].source,
    OF_IDS.replace("    s.infer", '    s["up"].shard(["weight", "bias"], axis=0)\n    s.infer'),
)


def check_tied(folder: Path) -> None:
    compare(folder, TIED)


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, long(3)])
def test_a_table_that_is_the_head_as_well(tmp_path, world):
    prepare(tmp_path, TIED)
    run(check_tied, world, tmp_path)


def test_what_is_written_for_a_table_that_is_the_head(tmp_path):
    model = texts(rewritten(tmp_path, TIED["matmul"].source, OF_IDS))["model"]
    assert "return tied_head(x * 2, self.emb).softmax(-1)" in model
    model = texts(rewritten(tmp_path, OF_ANOTHER, OF_IDS))["model"]
    assert "return tied_head(x, emb)" in model
    mixed = rewritten(tmp_path, TIED["product"].source, OF_IDS + "    s.autocast()\n")
    assert "return tied_head(x, self.emb)" in texts(mixed)["model"]  # of what `up` rounded


@pytest.mark.parametrize(
    "logits",
    [
        "F.linear(x, self.emb.weight.T.T)",
        "x @ self.emb.weight.to(torch.float64).to(x.dtype).T",
        "x @ self.emb.weight.reshape(self.emb.weight.shape[::-1])",
    ],
)
def test_what_may_be_no_product_with_the_table(tmp_path, logits):
    refused(tmp_path, looked_up(logits), OF_IDS, "SR104")


def test_a_head_below_what_a_rule_changed(tmp_path):
    """The rule has moved its line."""
    source = looked_up("x @ self.emb.weight.T").replace(
        "        x = self.up(self.emb(ids)).tanh()\n",
        "        x = self.emb(ids)\n        gated = F.silu(self.up(x))\n        x = gated * x\n",
    )
    schedule = OF_IDS.replace("    s[", '    s.apply("swiglu")\n    s[')
    model = texts(rewritten(tmp_path, source, schedule))["model"]
    assert "x = swiglu(self.up(x), x)" in model and "return tied_head(x, self.emb)" in model


@pytest.mark.parametrize("rows", ["", "[:12]"])
def test_a_table_that_something_else_holds(tmp_path, rows):
    """What has it as `weight` is not the embedding, and may have only some of its rows."""
    source = looked_up(f"x @ types.SimpleNamespace(weight=self.emb.weight{rows}).weight.T")
    refused(tmp_path, f"import types\n{source}", OF_IDS, "SR104")


def test_a_table_whose_product_is_summed_already(tmp_path):
    """The module around it adds its input's gradient up, and would do so a second time."""
    syncs = '.sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)'
    model = texts(rewritten(tmp_path, OF_ANOTHER, OF_IDS + f'    s["head"]{syncs}\n'))["model"]
    assert "tied_head" not in model and "all_gather(x @ emb.weight.T)" in model


def test_a_table_that_is_multiplied_by_with_its_collectives_stated(tmp_path):
    text = refused(
        tmp_path,
        looked_up("x @ self.emb.weight.T"),
        OF_IDS.replace("    s.infer_sync()", '    s["emb"].sync("fwd_post", "all_reduce")'),
        "SR104",
    )
    assert "nothing adds it up" in text


def test_a_module_that_is_given_the_table_may_say_where_its_parts_are_joined(tmp_path):
    line = '.sync("fwd_post", "all_gather", axis=-1)'
    model = texts(rewritten(tmp_path, OF_ANOTHER, OF_IDS + f'    s["head"]{line}\n'))["model"]
    assert "x = all_reduce_gradient(x)\n        return all_gather(x @ emb.weight.T)" in model


def test_a_refusal_behind_a_gather_says_what_made_it_necessary(tmp_path):
    top = (
        "class Act(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        return x.relu()\n\n    @staticmethod\n    def backward(_, g):\n"
        "        return g.flip(-1)\n"
    )
    source = SOURCE.replace("class MLP", f"{top}\n\nclass MLP").replace("torch.relu(", "Act.apply(")
    text = refused(tmp_path, source, SCHEDULE + INFER, "SR104")
    assert "`block.mlp.down` is split over its inputs, but its input is whole" in text
    assert "the output of `block.mlp.up` was gathered because `Act` works on a part" in text
    assert "^ gathered for this\n" in text and "Act.apply(" in text


IN_TWO_WAYS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    if TAKEN:

        def forward(self, x):
            B, T, C = x.shape
            q, k = (m(x).view(B, T, self.heads, C // self.heads) for m in (self.q, self.k))
            return self.out((q * k).reshape(B, T, C))

    else:

        def forward(self, x):
            return self.out(self.q(x) * self.k(x))
"""
OF_TWO_WAYS = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.randn(2, 4, 8)}


def schedule(s):
    s["{q,k}"].shard(["weight", "bias"], axis=0)
    s["out"].shard("weight", axis=1)
    s.infer_sync()
"""


def test_a_method_that_the_text_has_in_two_ways(tmp_path):
    text = refused(tmp_path, IN_TWO_WAYS.replace("TAKEN", "True"), OF_TWO_WAYS, "SR104")
    assert "is in `Net`, which defines a method several times" in text
    assert "move the definition that runs to the end" in text
    assert rewritten(tmp_path, IN_TWO_WAYS.replace("TAKEN", "False"), OF_TWO_WAYS).diff()


READING_ONE_VALUE = """\
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        BODY


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.one = Gated(width)
        self.two = Gated(width)

    def forward(self, x):
        AROUND


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x
"""
SPLIT_GATED = """\
import torch


def model(m):
    return m.Net()


def inputs(model):
    return {"x": torch.randn(3, 5, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    block = s["blocks.*"]
    block["{one,two}.{gate,up}"].shard(["weight", "bias"], axis=0)
    block["{one,two}.down"].shard("weight", axis=1)
"""
GATED = "return self.down(self.gate(x).relu() * self.up(x))"
NORMED = "y = self.norm(x)\n        return self.down(self.gate(y).relu() * self.up(y))"
ON_TOP = "return x + self.two(self.one(x))"
BESIDE = "y = self.norm(x)\n        return x + self.one(y) + self.two(y)"


def reading_one_value(body: str, around: str) -> str:
    source = READING_ONE_VALUE.replace("BODY", body).replace("AROUND", around)
    return source if "self.two(" in around else source.replace("self.two = Gated(width)", "pass")


def split_gated(around: str, lines: str) -> str:
    schedule = SPLIT_GATED + lines
    return schedule if "self.two(" in around else schedule.replace("{one,two}", "one")


SUMMED_ONCE = {
    "around": (GATED, ON_TOP, '    block["{one,two}"].sync("bwd_post", "all_reduce")\n'),
    "at a value": (
        NORMED,
        "return x + self.one(x)",
        '    block["one"].sync("bwd_post", "all_reduce", of="y")\n',
    ),
    "at a value around": (GATED, BESIDE, '    block.sync("bwd_post", "all_reduce", of="y")\n'),
    "not of a value read beside": (
        "return x + self.down(self.gate(x).relu() * self.up(x))",
        ON_TOP,
        '    block["**.{gate,up}"].sync("bwd_post", "all_reduce")\n',
    ),
    "not of two values": (
        "return self.down(self.gate(x).relu() * self.up(x * 2))",
        ON_TOP,
        '    block["**.{gate,up}"].sync("bwd_post", "all_reduce")\n',
    ),
}
OF_ONE_VALUE = {
    name: Case(reading_one_value(body, around), split_gated(around, INFER))
    for name, (body, around, _) in SUMMED_ONCE.items()
}


@pytest.mark.parametrize("name", SUMMED_ONCE)
def test_layers_that_read_one_value_have_its_gradient_added_up_once(name, tmp_path):
    body, around, stated = SUMMED_ONCE[name]
    source = reading_one_value(body, around)
    down = '    block["**.down"].sync("fwd_post", "all_reduce")\n'
    inferred = rewritten(tmp_path, source, split_gated(around, INFER))
    wanted = rewritten(tmp_path, source, split_gated(around, stated + down))
    assert texts(inferred) == texts(wanted)


def test_a_border_at_which_nothing_can_be_written_is_left_alone(tmp_path):
    body = "(x,) = xs\n        " + GATED
    source = reading_one_value(body, ON_TOP).replace(
        "(self, x):\n        (x,", "(self, *xs):\n        (x,"
    )
    stated = '    block["**.{gate,up}"].sync("bwd_post", "all_reduce")\n'
    stated += '    block["**.down"].sync("fwd_post", "all_reduce")\n'
    wanted = texts(rewritten(tmp_path, source, SPLIT_GATED + stated))
    assert texts(rewritten(tmp_path, source, SPLIT_GATED + INFER)) == wanted


def test_what_one_of_several_readers_states_is_left_to_it(tmp_path):
    source = reading_one_value(GATED, ON_TOP)
    stated = '    block["**.up"].sync("bwd_post", "all_reduce")\n'
    model = texts(rewritten(tmp_path, source, SPLIT_GATED + stated + INFER))["model"]
    assert "reduce_input_gradient=False" not in model and "all_reduce_gradient" not in model


def check_one_value(folder: Path) -> None:
    compare(folder, OF_ONE_VALUE)


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, long(4)])
def test_numbers_of_a_gradient_that_is_added_up_once(tmp_path, world):
    prepare(tmp_path, OF_ONE_VALUE)
    run(check_one_value, world, tmp_path)


RESIDUAL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.a(self.norm(x)).relu()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x
"""
SPLIT_BLOCKS = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 4, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    layers = s["blocks.*.a"]
    layers.shard(["weight", "bias"], axis=0)
"""


@pytest.mark.processes
def test_a_part_that_meets_a_whole_residual_is_gathered(tmp_path):
    model = texts(rewritten(tmp_path, RESIDUAL, SPLIT_BLOCKS + INFER))["model"]
    assert "self.a = ColumnParallelLinear(8, 8, gather_output=True)" in model
    assert "self.stem = nn.Linear(8, 8)" in model
    # What is added to each of the batch.
    rows = RESIDUAL.replace("self.norm(x)", "self.norm(x[0])")
    assert rows != RESIDUAL
    cases = {n: Case(m, SPLIT_BLOCKS + INFER) for n, m in (("residual", RESIDUAL), ("rows", rows))}
    prepare(tmp_path, cases)
    run(compare, 2, tmp_path, cases)


def test_what_no_gather_mends_is_refused_where_it_began(tmp_path):
    """Behind a gather the layer that is split over its inputs would be refused instead."""
    source = SOURCE.replace("torch.relu(self.up(x))", "self.up(x) * self.gate(x)").replace(
        "        self.up =", "        self.gate = nn.Linear(8, 32)\n        self.up =", 1
    )
    text = refused(tmp_path, source, SCHEDULE + INFER, "SR104")
    assert "`mul` combines a part of shape" in text and 's["block.mlp.gate"].shard(' in text


UNIT = """\
import torch
from torch import nn


def unit(x):
    return x / x.pow(2).sum(-1, keepdim=True).pow(0.5)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 12)

    def forward(self, x):
        return unit(self.head(x))
"""


def test_a_layer_is_gathered_where_a_function_sums_its_parts(tmp_path):
    """No collective fits in there, and none that adds up fits the layer."""
    lines = SPLIT_BLOCKS.replace("blocks.*.a", "head")
    text = refused(tmp_path, UNIT, lines, "SR104")
    advised = '.sync("fwd_post", "all_gather", axis=-1)'
    assert f"{advised} on `head`" in text and "all_reduce" not in text
    stated = f'{lines}    layers{advised}\n    layers.sync("bwd_post", "all_reduce")\n'
    inferred = texts(rewritten(tmp_path, UNIT, lines + INFER))
    assert inferred == texts(rewritten(tmp_path, UNIT, stated))
    assert "self.head = ColumnParallelLinear(8, 12, gather_output=True)" in inferred["model"]


CALLED_INSIDE = """\
import torch
from torch import nn
from torch.nn import functional as F


def heads_first(x, heads):
    return x.reshape(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)


class Projections(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.packed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)


class Model(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.image, self.text = Projections(width), Projections(width)

    def forward(self, image, text):
        q, k, v = heads_first(self.image.packed(image), self.heads)
        more = heads_first(self.text.packed(text), self.heads)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(more, (q, k, v)))
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        text, image = x[:, : text.shape[1]], x[:, text.shape[1] :]
        return torch.cat((self.text.out(text), self.image.out(image)), dim=1)
"""
OF_TWO = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"image": torch.randn(2, 4, 16), "text": torch.randn(2, 3, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["{image,text}.packed"].shard(["weight", "bias"], axis=0, parts=3)
    s["{image,text}.out"].shard("weight", axis=1)
    s.infer_sync()
"""


def test_a_size_follows_in_what_calls_layers_that_another_module_holds(tmp_path):
    output = rewritten(tmp_path, CALLED_INSIDE, OF_TWO)
    text = output.files[output.model_file]
    assert "self.heads = part_size(self.heads)" in text
    assert text.count("gather") == 0


AVERAGED = """\
import torch
from torch import nn


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Attention(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(2, 3)).softmax(-1)
        average = weights.mean(dim=1)
        INSIDE
        return self.out((weights @ v).transpose(1, 2).flatten(2)), average


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            new, average = layer(x)
            x = x + new
            BEHIND
        return x
"""
OF_HEADS = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 5, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["layers.*.{query,key,value}"].shard(["weight", "bias"], axis=0)
    s["layers.*.out"].shard("weight", axis=1)
    s.infer_sync()
"""


def test_what_runs_over_all_parts_may_be_dropped_unread(tmp_path):
    source = AVERAGED.replace("INSIDE", "pass").replace("BEHIND", "pass")
    output = rewritten(tmp_path, source, OF_HEADS)
    assert "RowParallelLinear(" in output.files[output.model_file]
    assert "gather" not in output.files[output.model_file]


@pytest.mark.parametrize(
    ("inside", "behind"),
    [
        ("self.average = average", "pass"),
        ("average = Doubled.apply(average)", "pass"),
        ("pass", "x = x + Doubled.apply(average).sum()"),
        ("pass", "x = x if self.training else x + average.sum()"),
        ("pass", "x = x if layer is not self.layers[-1] else x + average.sum()"),
    ],
)
def test_what_runs_over_all_parts_may_not_be_kept_or_read(inside, behind, tmp_path):
    source = AVERAGED.replace("INSIDE", inside).replace("BEHIND", behind)
    refused(tmp_path, source, OF_HEADS, "SR104")


def test_what_was_dropped_unread_may_not_be_read_on_a_rank():
    flow, average = Flow(), torch.zeros(2)
    flow.set(average, State(wrong=PlacementError("`mean` runs over all parts")))
    with pytest.raises(PlacementError, match="runs over all parts"):
        flow.of(average)
    assert flow.knows(average)


def test_channels_are_gathered_along_their_own_axis(tmp_path):
    source = """import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(2, 12, 1), nn.Linear(48, 8)

    def forward(self, x):
        return self.down(F.unfold(self.up(x), 2, stride=2).mT)
"""
    schedule = SPLITTING.replace("torch.randn(2, 8)", "torch.randn(2, 2, 4, 4)")
    text = refused(tmp_path, source, schedule + CHANNELS, "SR104")
    assert (
        "its input is whole on every rank" in text
        and "`functional.unfold` is not known to be right" in text
    )


MIXTURE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8))

    def forward(self, x):
        logits = F.linear(x, self.weight)
        return logits, logits.softmax(-1)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.up = nn.Parameter(torch.randn(2, 8, 12))
        self.down = nn.Parameter(torch.randn(2, 12, 8))

    def forward(self, x):
        logits, weights = self.router(x)
        y = torch.einsum("bd,edf->bef", x, self.up).relu()
        y = torch.einsum("bef,efd->bed", y, self.down)
        return (y * weights.unsqueeze(-1)).sum(1), logits


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mixture = nn.Linear(8, 8), Mixture()

    def forward(self, x, add_router_loss: bool | None = None):
        y, logits = self.mixture(self.stem(x))
        y = y.square().mean()
        if add_router_loss:
            y += logits.logsumexp(-1).square().mean()
        return y
"""
OF_EXPERTS = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(4, 8)}


def loss(outputs):
    return outputs


def schedule(s):
    s["mixture"].shard("up", axis=2)
    s["mixture"].shard("down", axis=1)
    s.infer_sync()
"""
TOLD = OF_EXPERTS.replace("(4, 8)}", '(4, 8), "add_router_loss": True}')


def test_gradients_are_summed_where_they_fit_with_an_argument_as_well(tmp_path):
    """A router's loss has its whole gradient on every rank; what goes through experts has not."""
    with_loss, without = (
        rewritten(tmp_path, MIXTURE, TOLD),
        rewritten(tmp_path, MIXTURE, OF_EXPERTS),
    )
    assert not with_loss.warnings
    for output in (with_loss, without):
        assert "weights = all_reduce_gradient(weights)" in output.files[output.model_file]
        assert "all_reduce_gradient(self.weight)" not in output.files[output.model_file]
    assert not any("the output would be wrong" in each for each in without.warnings)


def test_a_way_that_stated_collectives_do_not_fit_is_told(tmp_path):
    stated = OF_EXPERTS.replace(
        "    s.infer_sync()\n",
        '    s["mixture"].sync("bwd_post", "all_reduce")\n'
        '    s["mixture"].sync("fwd_post", "all_reduce")\n',
    )
    told = "with `add_router_loss=True` the output would be wrong"
    assert any(told in each for each in rewritten(tmp_path, MIXTURE, stated).warnings)
