"""Mixtures of experts, whose routing the static check follows without values."""

from __future__ import annotations

import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify
from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.rewriting import changed_lines, refused, rewritten

MIXTRAL = "transformers.models.mixtral.modeling_mixtral"

SCHEDULE = """\
from transformers import MixtralConfig


def model(m):
    return m.MixtralForCausalLM(MixtralConfig(num_hidden_layers=2))


def verify_model(m):
    return m.MixtralForCausalLM(
        MixtralConfig(
            vocab_size=203,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_local_experts=4,
            max_position_embeddings=64,
        )
    )


def schedule(s, entered: str = "mlp"):
    layers = s["model.layers"]
    columns = layers["*.self_attn.{q_proj,k_proj,v_proj}"]
    columns.shard("weight", axis=0)
    layers["*.self_attn"].sync("bwd_post", "all_reduce")
    layers["*.self_attn.o_proj"].shard("weight", axis=1)
    layers["*.self_attn.o_proj"].sync("fwd_post", "all_reduce")
    layers["*.mlp.experts"].shard("gate_up_proj", axis=1, parts=2)
    layers["*.mlp.experts"].shard("down_proj", axis=2)
    layers[f"*.{entered}"].sync("bwd_post", "all_reduce")
    layers["*.mlp"].sync("fwd_post", "all_reduce")
"""

INFERRED = "".join(line for line in SCHEDULE.splitlines(True) if ".sync(" not in line)
INFERRED += "    s.infer_sync()\n"


def test_a_sync_in_a_forward_that_a_decorator_passes_over(tmp_path):
    """Which function computes the experts is chosen by the configuration."""
    path = tmp_path / "s.py"
    path.write_text(SCHEDULE)
    with pytest.raises(errors.UnfollowableSize) as caught:
        rewrite(MIXTRAL, str(path), ["entered=mlp.experts"])
    words = caught.value.render()
    assert "`MixtralExperts.forward` does not run" in words
    assert "    def forward(" in words and 'layers[f"*.{entered}"].sync("bwd_post"' in words


def test_inferred_syncs_go_around_a_forward_that_a_decorator_passes_over(tmp_path):
    """The sum at the block; those of gradients behind the router, whose own loss is whole."""
    (tmp_path / "inferred.py").write_text(INFERRED)
    output = rewrite(MIXTRAL, str(tmp_path / "inferred.py"))
    assert not output.warnings
    diff = changed_lines(output)
    assert "+        return all_reduce(hidden_states)" in diff
    assert "+        top_k_weights = all_reduce_gradient(top_k_weights)" in diff
    assert "all_reduce_gradient(self.weight)" not in diff


def test_a_sync_in_a_forward_that_a_decorator_calls(tmp_path):
    source = """
import functools

from torch import nn


def traced(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    @traced
    def forward(self, x):
        return self.b(self.a(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = Head()

    def forward(self, x):
        return self.head(x)
"""
    schedule = """
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(3, 8)}


def schedule(s):
    s["head.a"].shard(["weight", "bias"], axis=0)
    s["head.b"].shard("weight", axis=1)
    s["head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")
"""
    assert "+        return all_reduce(self.b(self.a(x).relu()))" in changed_lines(
        rewritten(tmp_path, source, schedule)
    )


@pytest.mark.processes
def test_mixtral(tmp_path):
    path = tmp_path / "s.py"
    path.write_text(SCHEDULE)
    output = rewrite(MIXTRAL, str(path))
    (warning,) = output.warnings
    assert "with `output_router_logits=True` the output would be wrong" in warning
    diff = output.diff(0)
    assert '+        shard_parameter(self, "gate_up_proj", axis=1, parts=Packed(2))' in diff
    assert "F.linear(hidden_states, all_reduce_gradient(self.weight))" in diff
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", [2, 4])
    assert report.ok, report.render()


@pytest.mark.long
@pytest.mark.processes
def test_a_loss_of_the_routers_logits(tmp_path):
    """The logits' own gradient is whole: what is added up comes after the router."""
    path = tmp_path / "s.py"
    path.write_text(
        INFERRED.replace(
            "num_local_experts=4,", "num_local_experts=4, output_router_logits=True,"
        ).replace("MixtralConfig(num_hidden_layers=2)", "MixtralConfig(output_router_logits=True)")
    )
    output = rewrite(MIXTRAL, str(path))
    assert "+        top_k_weights = all_reduce_gradient(top_k_weights)\n" in changed_lines(output)
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", [2])
    assert report.ok, report.render()


DEEPSEEK = """\
from transformers import DeepseekV3Config


def model(m):
    return m.DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=203,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            q_lora_rank=24,
            kv_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
        )
    )


verify_model = model


def schedule(s):
    attention = s["model.layers.*.self_attn"]
    attention["{q_b_proj,kv_b_proj}"].shard("weight", axis=0)
    attention["o_proj"].shard("weight", axis=1)
    s["**.{gate_proj,up_proj}"].shard("weight", axis=0)
    s["**.down_proj"].shard("weight", axis=1)
    s["**.experts"].shard("gate_up_proj", axis=1, parts=2)
    s["**.experts"].shard("down_proj", axis=2)
    s.infer_sync()
"""


@pytest.mark.long
@pytest.mark.processes
def test_latent_attention_and_shared_experts_are_inferred(tmp_path):
    """At the keys that all heads share, and before and after the experts."""
    path = tmp_path / "s.py"
    path.write_text(DEEPSEEK)
    output = rewrite("transformers.models.deepseek_v3.modeling_deepseek_v3", str(path))
    assert not output.warnings
    changed = changed_lines(output)
    for line in (
        "k_rot = all_reduce_gradient(k_rot)",
        "hidden_states = all_reduce_gradient(hidden_states)",
        "topk_weights = all_reduce_gradient(topk_weights)",
        "hidden_states = all_reduce(hidden_states)",
    ):
        assert f"+        {line}\n" in changed
    assert "multiple_of=self.qk_nope_head_dim + self.v_head_dim" in changed
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", [2, 4])
    assert report.ok, report.render()


WEIGHTED = """import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    def __init__(self, n=4, w=8):
        super().__init__()
        self.up = nn.Parameter(torch.randn(n, w, 4 * w) * 0.1)
        self.down = nn.Parameter(torch.randn(n, 4 * w, w) * 0.1)

    def forward(self, x):
        h = torch.einsum("td,adi->tai", x, self.up).relu()
        return torch.einsum("tah,ahi->tai", h, self.down)


class Model(nn.Module):
    def __init__(self, w=8, n=4):
        super().__init__()
        self.first = nn.Linear(w, w)
        self.gate, self.experts = nn.Linear(w, n), Experts(n, w)

    def forward(self, x):
        x = self.first(x)
        weights = self.gate(x).softmax(-1)
        return x + torch.einsum("tai,ta->ti", self.experts(x), weights)
"""


# Gates and what they let through lie side by side, and each expert has biases.
INTERLEAVED = """import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, n=4, w=8):
        super().__init__()
        self.up = nn.Parameter(torch.randn(n, w, 4 * w) * 0.1)
        self.up_bias = nn.Parameter(torch.randn(n, 4 * w))
        self.down = nn.Parameter(torch.randn(n, 2 * w, w) * 0.1)
        self.down_bias = nn.Parameter(torch.randn(n, w))

    def forward(self, x, chosen):
        h = torch.einsum("td,tdi->ti", x, self.up[chosen]) + self.up_bias[chosen]
        gate, up = h[..., ::2], h[..., 1::2]
        h = gate.sigmoid() * (up + 1)
        return torch.einsum("th,thi->ti", h, self.down[chosen]) + self.down_bias[chosen]


class Block(nn.Module):
    def __init__(self, w=8, n=4):
        super().__init__()
        self.gate, self.experts = nn.Linear(w, n), Experts(n, w)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        return self.experts(x, chosen) * weight[:, None]


class Model(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.first, self.block = nn.Linear(w, w), Block(w)

    def forward(self, x):
        x = self.first(x)
        return x + self.block(x)
"""

STEP = """import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(6, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""
SPLIT_INSIDE = (
    STEP
    + """\
    s["experts"].shard("up", axis=2)
    s["experts"].shard("down", axis=1)
    s.infer_sync()
"""
)
SPLIT_IN_PAIRS = (
    STEP
    + """\
    s["block.experts"].shard("up", axis=2)
    s["block.experts"].shard("up_bias", axis=1)
    s["block.experts"].shard("down", axis=1)
    s["block"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")
"""
)


def test_gates_beside_what_they_let_through_and_biases_of_partial_sums(tmp_path):
    """A rank has whole pairs, and one rank adds the biases."""
    changed = changed_lines(rewritten(tmp_path, INTERLEAVED, SPLIT_IN_PAIRS))
    for line in (
        'shard_parameter(self, "up", axis=2, multiple_of=2)',
        'shard_parameter(self, "up_bias", axis=1, multiple_of=2)',
        'shard_parameter(self, "down", axis=1)',
        'add_once(self, "down_bias")',
    ):
        assert f"+        {line}\n" in changed


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("h[..., ::2]", "h[..., :-1:2]", "this indexes a split axis"),
        # One of them is not read while the module that holds it runs.
        (
            "self.experts(x, chosen) * weight",
            "(self.experts(x, chosen) + self.experts.down_bias[chosen]) * weight",
            "`add` needs the whole value",
        ),
        ("self.down_bias[chosen]", "self.down_bias[chosen].relu()", "`add` needs the whole value"),
        ("self.down_bias[chosen]", "x", "`add` needs the whole value"),
    ],
)
def test_what_is_neither_a_pair_nor_a_bias(tmp_path, before, after, words):
    source = INTERLEAVED.replace(before, after)
    assert source != INTERLEAVED
    assert words in refused(tmp_path, source, SPLIT_IN_PAIRS, "SR104")


def test_the_sum_that_experts_want_is_inferred(tmp_path):
    """What weighs their outputs is whole, so these have to be as well."""
    schedule = SPLIT_INSIDE
    cases = {
        "weighted": Case(WEIGHTED, schedule),
        "interleaved": Case(INTERLEAVED, SPLIT_IN_PAIRS),
    }
    prepare(tmp_path, cases)
    run(compare, 2, tmp_path, cases)
    words = refused(tmp_path, WEIGHTED, schedule.replace("    s.infer_sync()\n", ""), "SR104")
    assert "nothing adds it up" in words
    synced = schedule.replace("s.infer_sync()", 's["experts"].sync("bwd_post", "all_reduce")')
    words = refused(tmp_path, WEIGHTED, synced, "SR104")
    assert 's["experts"].sync("fwd_post", "all_reduce")' in words


# An expert that no word chose gets a gradient of zeros, as data parallel training asks for.
UNUSED = """import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.up, self.down = nn.Linear(w, 2 * w), nn.Linear(2 * w, w, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, w=8, n=2):
        super().__init__()
        self.first, self.gate = nn.Linear(w, w), nn.Linear(w, n)
        self.experts = nn.ModuleList([Expert(w) for _ in range(n + 1)])

    def forward(self, x):
        x = self.first(x)
        chosen = self.gate(x).softmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if i < len(self.experts) - 1:
                y = y + expert(x) * chosen[:, i : i + 1]
            else:
                y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        return x + y
"""
SPLIT_EACH = (
    STEP
    + """\
    s["experts.*.up"].shard(["weight", "bias"], axis=0)
    s["experts.*.down"].shard("weight", axis=1)
    s.infer_sync()
"""
)


def test_experts_that_are_not_chosen_may_be_read_for_a_gradient_of_zeros(tmp_path):
    cases = {"unused": Case(UNUSED, SPLIT_EACH)}
    prepare(tmp_path, cases)
    run(compare, 2, tmp_path, cases)


@pytest.mark.parametrize("number", ["1e-3", "chosen[0, 0]"])
def test_what_is_read_of_them_otherwise_is_a_summand(number, tmp_path):
    source = UNUSED.replace("+= 0 *", f"+= {number} *")
    assert "add" in refused(tmp_path, source, SPLIT_EACH, "SR104")
