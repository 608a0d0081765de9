"""Layers of `nn.Transformer`, in stacks that torch makes of copies, split inside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slapo_rewrite.runtime.transformer_layers import (
    ParallelTransformer,
    ParallelTransformerDecoderLayer,
    ParallelTransformerEncoderLayer,
)
from tests.numbers import Case, compare, modules, prepare
from tests.processes import run
from tests.rewriting import changed_lines, refused, rewritten

SOURCE = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Linear(width, width)
        layer = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), False)
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, 4, 24, 0.0, "gelu", norm_first=True), num_layers=2
        )
        self.own = nn.TransformerEncoderLayer(width, 2, 32, 0.0, bias=False)

    def forward(self, x, padding):
        x = self.first(x)
        memory = self.encoder(x, src_key_padding_mask=padding).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        y = self.decoder(
            x.transpose(0, 1).tanh(),
            memory,
            tgt_mask=mask,
            tgt_is_causal=True,
            memory_key_padding_mask=padding,
        )
        return self.own(y, src_mask=mask).sum(0)
"""

SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return {"x": torch.randn(2, 5, 16), "padding": padding}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""
ENCODER = """\
    e = s["encoder.layers.*"]
    e["self_attn"].shard(["in_proj_weight", "in_proj_bias"], axis=0, parts=3)
    e["self_attn.out_proj"].shard("weight", axis=1)
    e["linear1"].shard(["weight", "bias"], axis=0)
    e["linear2"].shard("weight", axis=1)
"""
REST = """\
    d = s["decoder.layers.*"]
    d["{self_attn,multihead_attn}"].shard(["in_proj_weight", "in_proj_bias"], axis=0, parts=3)
    d["{self_attn,multihead_attn}.out_proj"].shard("weight", axis=1)
    d["linear1"].shard(["weight", "bias"], axis=0)
    d["linear2"].shard("weight", axis=1)
    s["own.self_attn"].shard("in_proj_weight", axis=0, parts=3)
    s["own.self_attn.out_proj"].shard("weight", axis=1)
    s["own.linear1"].shard("weight", axis=0)
    s["own.linear2"].shard("weight", axis=1)
    s.infer_sync()
"""
STATED = """\
    e["{self_attn,linear1}"].sync("bwd_post", "all_reduce")
    e["{self_attn.out_proj,linear2}"].sync("fwd_post", "all_reduce")
"""
TRANSFORMER = """\
from torch import nn


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.pair = nn.Transformer(width, 4, 2, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, x, padding):
        x = self.first(x)
        return self.pair(x, x.tanh(), memory_key_padding_mask=padding)
"""
WHOLE_TRANSFORMER = """\
    for layers in s["pair.{encoder,decoder}.layers.*"]:
        for attention in ("self_attn", "multihead_attn"):
            if attention in layers:
                own = layers[attention]
                own.shard(["in_proj_weight", "in_proj_bias"], axis=0, parts=3)
                own["out_proj"].shard("weight", axis=1)
        layers["linear1"].shard(["weight", "bias"], axis=0)
        layers["linear2"].shard("weight", axis=1)
    s.infer_sync()
"""
CASES = {
    "transformer": Case(TRANSFORMER, SCHEDULE + WHOLE_TRANSFORMER),
    "stated": Case(SOURCE, SCHEDULE + ENCODER + STATED),
    "all": Case(SOURCE, SCHEDULE + ENCODER + REST),
}


def check(folder) -> None:
    """As in training, and in eval mode without gradients, where torch has kernels of its own."""
    compare(folder, CASES)
    for name, case in CASES.items():
        whole, mine = (module.Model().double().eval() for module in modules(folder, name, case))
        mine.load_state_dict(whole.state_dict())
        x = torch.randn(2, 5, 16, dtype=torch.double)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        with torch.no_grad():
            torch.testing.assert_close(mine(x, padding), whole(x, padding))


@pytest.mark.long
@pytest.mark.processes
def test_numbers(tmp_path):
    prepare(tmp_path, CASES)
    for world in (1, 2):
        run(check, world, tmp_path)


@pytest.mark.long
def test_the_layer_that_torch_copies_is_made_parallel(tmp_path):
    changed = changed_lines(rewritten(tmp_path, SOURCE, CASES["all"].schedule))
    assert changed.count("ParallelTransformerEncoderLayer(") == 2
    assert changed.count("ParallelTransformerDecoderLayer(") == 1
    changed = changed_lines(rewritten(tmp_path, SOURCE, CASES["stated"].schedule))
    assert changed.count("Parallel") == 2


def test_a_transformer_is_split_with_all_of_its_layers(tmp_path):
    case = CASES["transformer"]
    changed = changed_lines(rewritten(tmp_path, case.source, case.schedule))
    assert "self.pair = ParallelTransformer(\n" in changed
    some = SCHEDULE + WHOLE_TRANSFORMER.replace("{encoder,decoder}", "decoder")
    words = refused(tmp_path, case.source, some, "SR307")
    assert "`pair` is split over heads as a whole, but `pair.encoder.layers.0" in words
    layer = "nn.TransformerEncoderLayer(width, 4, 32, batch_first=True)"
    own = f"0.0, custom_encoder=nn.TransformerEncoder({layer}, 2), "
    words = refused(tmp_path, case.source.replace("0.0, ", own), case.schedule, "SR305")
    assert "does not take the argument `custom_encoder`" in words


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        (
            ENCODER.replace('    e["linear1"].shard(["weight", "bias"], axis=0)\n', ""),
            "SR307",
            "`encoder.layers.0.linear1.weight` is not sharded along axis 0",
        ),
        (ENCODER.replace(', "in_proj_bias"', ""), "SR307", "in_proj_bias` is not sharded"),
        (ENCODER.replace(", parts=3", ""), "SR301", "packs 3 blocks"),
        (
            ENCODER + '    e["linear1"].sync("fwd_post", "all_gather", axis=-1)\n',
            "SR305",
            "which is split as a whole",
        ),
        (ENCODER.replace("layers.*", "layers.0"), "SR103", "scheduled differently"),
        (
            ENCODER + '    e.sync("bwd_post", "all_reduce")\n',
            "SR304",
            "is no partial sum",
        ),
    ],
)
def test_refusals(lines, code, words, tmp_path):
    assert words in refused(tmp_path, SOURCE, SCHEDULE + lines, code)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_it_draws_and_gives_what_torch_does(first, training):
    for whole, mine in (
        (nn.TransformerEncoderLayer, ParallelTransformerEncoderLayer),
        (nn.TransformerDecoderLayer, ParallelTransformerDecoderLayer),
        (nn.Transformer, ParallelTransformer),
    ):
        results = []
        for cls in (whole, mine):
            torch.manual_seed(0)
            given = (2, 1, 24) if whole is nn.Transformer else (24,)
            layer = cls(16, 4, *given, 0.3, nn.functional.silu, norm_first=first).double()
            layer.train(training)
            x = torch.randn(5, 3, 16, dtype=torch.double)
            memory = () if whole is nn.TransformerEncoderLayer else (x.tanh(),)
            results.append((layer.state_dict(), layer(x, *memory)))
        (before, want), (after, have) = results
        assert [*before] == [*after]
        assert all(torch.equal(before[name], after[name]) for name in before)
        torch.testing.assert_close(have, want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_stack_gives_nested_tensors_in_eval_mode():
    """Without gradients: padded places come out as zeros then."""
    results = []
    for cls in (nn.TransformerEncoderLayer, ParallelTransformerEncoderLayer):
        torch.manual_seed(0)
        stack = nn.TransformerEncoder(cls(16, 4, 24, batch_first=True), 2).double().eval()
        x = torch.randn(2, 5, 16, dtype=torch.double)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        with torch.no_grad():
            results.append(stack(x, src_key_padding_mask=padding))
    torch.testing.assert_close(results[1], results[0])
    assert not results[1][1, 3:].any()


def test_what_else_is_asked_of_a_layer_stays(tmp_path):
    schedule = (
        SCHEDULE + ENCODER + "    s.infer_sync()\n    s['own'].checkpoint()\n    e.checkpoint()\n"
    )
    words = changed_lines(rewritten(tmp_path, SOURCE, schedule))
    assert "ParallelTransformerEncoderLayer" in words and "Checkpointed" in words


INNER = """\
from torch import nn


class Inner(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        self.own = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.down(self.up(x).relu()) + self.own(x)


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.inner = nn.Linear(width, width), Inner()

    def forward(self, x, padding):
        return self.inner(self.first(x))
"""


def test_a_gradient_that_is_summed_around_a_layer_is_refused(tmp_path):
    """The layer gives the whole gradient of what goes in."""
    lines = ENCODER.replace("encoder.layers.*", "inner.own")
    lines += """\
    s["inner.up"].shard(["weight", "bias"], axis=0)
    s["inner.down"].shard("weight", axis=1)
    s["inner.down"].sync("fwd_post", "all_reduce")
    s["inner"].sync("bwd_post", "all_reduce")
"""
    words = refused(tmp_path, INNER, SCHEDULE + lines, "SR104")
    assert "summed over the ranks twice, for `inner.own` and for `inner`" in words
