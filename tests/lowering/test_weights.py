"""Replacements with other weights than the original's: loading, saving, and misfits."""

from __future__ import annotations

import pytest

from slapo_rewrite.emit.explanation import explain
from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify
from tests.rewriting import changed_lines, refused, rewritten

MODEL = '''\
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Grouped-query attention: several query heads share a key and value head."""

    def __init__(self, width, heads, shared):
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, heads * self.size)
        self.key = nn.Linear(width, shared * self.size)
        self.value = nn.Linear(width, shared * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        x = self.norm(x)
        B, T, _ = x.shape
        q = self.query(x).view(B, T, self.heads, self.size).transpose(1, 2)
        k = self.key(x).view(B, T, self.shared, self.size).transpose(1, 2)
        v = self.value(x).view(B, T, self.shared, self.size).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.shared, 1)
        v = v.repeat_interleave(self.heads // self.shared, 1)
        y = F.scaled_dot_product_attention(q, k.tanh(), v)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.both = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Parameter(torch.randn(inner, width) / inner)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down


class Block(nn.Module):
    def __init__(self, width, heads, shared):
        super().__init__()
        self.attention = Attention(width, heads, shared)
        self.mlp = MLP(width, 2 * width)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, width=16, heads=8, shared=4, depth=2):
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width, heads, shared) for _ in range(depth)])
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
'''

SCHEDULE = '''\
import torch
import torch.nn.functional as F
from torch import nn

from slapo_rewrite import concat, split, transpose


class PackedAttention(nn.Module):
    """Attention whose query, key and value are one projection."""

    def __init__(self, width, heads, shared):
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * shared) * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        B, T, _ = x.shape
        sizes = [self.heads * self.size, self.shared * self.size, self.shared * self.size]
        q, k, v = self.qkv(self.before(x)).split(sizes, -1)
        q = q.view(B, T, self.heads, self.size).transpose(1, 2)
        k = k.view(B, T, self.shared, self.size).transpose(1, 2)
        v = v.view(B, T, self.shared, self.size).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.shared, 1)
        v = v.repeat_interleave(self.heads // self.shared, 1)
        y = F.scaled_dot_product_attention(q, k.tanh(), v)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class PlainMLP(nn.Module):
    """A gated MLP of three layers."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def model(m):
    return m.Net()


def inputs(model):
    return {"ids": torch.randint(0, 11, (2, 5))}


def loss(outputs):
    return outputs


ATTENTION = {
    "qkv.weight": concat("query.weight", "key.weight", "value.weight"),
    "qkv.bias": concat("query.bias", "key.bias", "value.bias"),
    "before.weight": "norm.weight",
    "before.bias": "norm.bias",
}
MLP = {
    "gate.weight": split("both.weight", parts=2, index=0),
    "up.weight": split("both.weight", parts=2, index=1),
    "down.weight": transpose("down"),
}


def schedule(s):
'''

REPLACED = """\
    s["blocks.*.attention"].replace(PackedAttention, weights=ATTENTION)
    s["blocks.*.mlp"].replace(PlainMLP, weights=MLP)
"""


def test_what_is_written(tmp_path):
    output = rewritten(tmp_path, MODEL, SCHEDULE + REPLACED)
    assert "slapo_rewrite" not in output.files["modules.py"]
    assert changed_lines(output) == (
        "+from .modules import PackedAttention, PlainMLP\n"
        "+from .weights import concat, map_weights, split, transpose\n"
        "-        self.attention = Attention(width, heads, shared)\n"
        "-        self.mlp = MLP(width, 2 * width)\n"
        "+        self.attention = map_weights(\n"
        "+            lambda: PackedAttention(width, heads, shared),\n"
        "+            original=lambda: Attention(width, heads, shared),\n"
        "+            weights={\n"
        '+                "qkv.weight": concat("query.weight", "key.weight", "value.weight"),\n'
        '+                "qkv.bias": concat("query.bias", "key.bias", "value.bias"),\n'
        '+                "before.weight": "norm.weight",\n'
        '+                "before.bias": "norm.bias",\n'
        "+            },\n"
        "+        )\n"
        "+        self.mlp = map_weights(\n"
        "+            lambda: PlainMLP(width, 2 * width),\n"
        "+            original=lambda: MLP(width, 2 * width),\n"
        "+            weights={\n"
        '+                "gate.weight": split("both.weight", parts=2, index=0),\n'
        '+                "up.weight": split("both.weight", parts=2, index=1),\n'
        '+                "down.weight": transpose("down"),\n'
        "+            },\n"
        "+        )\n"
    )


SHARDED = """\
    blocks = s["blocks.*"]
    blocks["attention.qkv"].shard(["weight", "bias"], axis=0, parts=[16, 8, 8])
    blocks["attention.qkv"].sync("bwd_post", "all_reduce")
    blocks["attention.out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    blocks["mlp.{gate,up}"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    blocks["mlp.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    s["blocks"][:1].checkpoint()
"""


def test_what_the_new_modules_hold_is_sharded(tmp_path):
    output = rewritten(tmp_path, MODEL, SCHEDULE + REPLACED + SHARDED)
    text = output.files["modules.py"]
    assert "from .tensor_parallel import ColumnParallelLinear, RowParallelLinear, part_size" in text
    assert "self.heads = part_size(self.heads)" in text
    assert "self.gate = ColumnParallelLinear(width, inner, bias=False)" in text
    assert "part_size" not in output.files["source_0.py"]


@pytest.mark.processes
def test_numbers_and_weights(tmp_path):
    output = rewritten(tmp_path, MODEL, SCHEDULE + REPLACED + SHARDED)
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", (1, 2, 4))
    assert report.ok, report.render()


def test_a_layer_in_anothers_place_is_sharded(tmp_path):
    lines = """\
    s["blocks.*.attention.out"].replace(
        nn.Linear, args="width, width, bias=False", weights={"weight": transpose("weight")}
    ).shard("weight", axis=1).sync("fwd_post", "all_reduce")
    s["blocks.*.attention.{query,key,value}"].shard(["weight", "bias"], axis=0)
    s["blocks.*.attention.{query,key,value}"].sync("bwd_post", "all_reduce")
"""
    source = MODEL.replace(
        "self.out = nn.Linear(width, width)", "self.out = nn.Linear(width, width, bias=False)"
    )
    output = rewritten(tmp_path, source, SCHEDULE + lines)
    assert "            lambda: RowParallelLinear(width, width, bias=False),\n" in changed_lines(
        output
    )


@pytest.mark.processes
def test_instances_of_a_class_of_the_schedule_may_differ(tmp_path):
    lines = '    s["blocks.0.mlp.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")\n'
    lines += (
        '    s["blocks.0.mlp.{gate,up}"].shard("weight", axis=0).sync("bwd_post", "all_reduce")\n'
    )
    output = rewritten(tmp_path, MODEL, SCHEDULE + REPLACED + lines)
    assert "class TensorParallelPlainMLP(PlainMLP):" in output.files["modules.py"]
    assert "lambda: TensorParallelPlainMLP(width, 2 * width)," in changed_lines(output)
    write(tmp_path / "out", output.files)
    number = (
        output.files["modules.py"].splitlines().index("class TensorParallelPlainMLP(PlainMLP):")
    )
    shown = explain(tmp_path / "out", f"modules.py:{number + 1}")
    assert 's["blocks.0.mlp.down"].shard' in shown and "replace" not in shown
    assert verify(tmp_path / "out", (2,)).ok


def test_a_sync_that_a_class_of_the_schedule_lacks(tmp_path):
    lines = SHARDED.replace('.sync("fwd_post", "all_reduce")', "", 1)
    text = refused(tmp_path, MODEL, SCHEDULE + REPLACED + lines, "SR104")
    assert "blocks" in text


WRONG = {
    'MLP = {"gat.weight": "both.weight"}': "the new module has no `gat.weight`",
    'MLP = {"gate.weight": "bot.weight"}': "the original has no `bot.weight`",
    "del MLP['up.weight']": "the new module's `up.weight` is made of",
    "MLP['up.weight'] = MLP['gate.weight']": "`both.weight` goes to two places",
    "MLP['down.weight'] = 'down'": "`down.weight` has shape [16, 32], but `down",
    "MLP['up.weight'] = split('both.weight', parts=3, index=1)": "64 does not divide into blocks",
    "MLP['up.weight'] = split('both.weight', parts=2, index=2)": "`up.weight` cannot be made from",
    "MLP['gate.weight'] = concat('both.weight', 'down')": "gives [96, 16]",
    "MLP['gate.weight'] = concat('both.weight', axis=2)": "`gate.weight` cannot be made from",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_map_that_does_not_fit(tmp_path, line):
    schedule = SCHEDULE.replace("def schedule(s):\n", f"{line}\n\n\ndef schedule(s):\n")
    text = refused(tmp_path, MODEL, schedule + REPLACED, "SR308")
    assert WRONG[line] in text, text


def test_weights_that_are_left_out(tmp_path):
    text = refused(tmp_path, MODEL, SCHEDULE + '    s["blocks.*.mlp"].replace(PlainMLP)\n', "SR308")
    assert "`gate.weight`, `up.weight`" in text and "weights={" in text
    short = SCHEDULE + '    s["head"].replace(nn.Identity)\n'
    assert "the original's `weight` is not taken over" in refused(tmp_path, MODEL, short, "SR308")


def test_a_tied_weight_keeps_its_name(tmp_path):
    schedule = '    s["head"].replace(nn.Linear, args="11, width, bias=False", weights='
    text = refused(
        tmp_path, MODEL, SCHEDULE + schedule + '{"weight": transpose("weight")})\n', "SR308"
    )
    assert "`head.weight` is tied to `table.weight`" in text


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("PlainMLP, weights=MLP, args='width'", "SR206", "missing a required argument: 'inner'"),
        ("PlainMLP, weights=MLP, args='wdith, 2'", "SR206", "name 'wdith' is not defined"),
        ("PlainMLP, weights={'gate.weight': 3}", "SR206", "`weights` maps names"),
        ("PlainMLP, weights='gate.weight'", "SR206", "`weights` must be a dictionary"),
        ("lambda a, b: nn.Identity(), weights=MLP", "SR206", "with a name, at the top level"),
        ("dict, weights=MLP, args=''", "SR206", "cannot be imported"),
    ],
)
def test_a_replacement_that_cannot_be_made(tmp_path, call, code, words):
    text = refused(tmp_path, MODEL, SCHEDULE + f'    s["blocks.*.mlp"].replace({call})\n', code)
    assert words in text and "s.py" in text


def test_what_the_new_module_holds_can_be_selected(tmp_path):
    more = '    assert s["blocks.0.mlp.gate"].paths == ["blocks.0.mlp.gate"]\n'
    more += '    assert "blocks.*.mlp.both" not in s and len(s["blocks.*.attention.qkv"]) == 2\n'
    rewritten(tmp_path, MODEL, SCHEDULE + REPLACED + more)


def test_what_was_selected_before_is_gone(tmp_path):
    lines = f'    old = s["blocks.0.mlp.both"]\n{REPLACED}    old.shard("weight", axis=0)\n'
    text = refused(tmp_path, MODEL, SCHEDULE + lines, "SR202")
    assert "was part of a module that has been replaced" in text


def test_what_goes_cannot_have_been_scheduled(tmp_path):
    lines = f'    s["blocks.0.mlp.both"].shard("weight", axis=0)\n{REPLACED}'
    text = refused(tmp_path, MODEL, SCHEDULE + lines, "SR306")
    assert "`blocks.0.mlp` cannot be replaced after `blocks.0.mlp.both` in it was changed" in text
