"""Grouped-query attention on more ranks than there are heads of keys and values."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from slapo_rewrite.runtime import tensor_parallel as tp
from slapo_rewrite.runtime.grouped_query import KeyValueParallelLinear
from slapo_rewrite.runtime.loading import build, full_state_dict, load_pretrained, to_full, to_local
from tests.marks import long
from tests.numbers import Case, compare, modules, prepare
from tests.processes import run
from tests.rewriting import changed_lines, rewritten

SOURCE = """\
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.n_rep = n_heads // n_kv_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        k = REPEATED_K
        v = REPEATED_V
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, self.n_heads * self.head_dim))


class Model(nn.Module):
    def __init__(self, dim=32, n_heads=HEADS):
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.attention = Attention(dim, *n_heads)

    def forward(self, x):
        x = self.first(x)
        return x + self.attention(x)
"""
REPEATS = {
    "REPEATED_K": "k.repeat_interleave(self.n_rep, dim=1)",
    "REPEATED_V": "v[:, :, None].expand(B, self.n_kv_heads, self.n_rep, T, self.head_dim)"
    ".reshape(B, self.n_heads, T, self.head_dim)",
}
SCHEDULE = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 5, 32)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    a = s["attention"]
    a["wq"].shard("weight", axis=0)
    a["{wk,wv}"].shard(["weight", "bias"], axis=0)
    a["{wq,wk,wv}"].sync("bwd_post", "all_reduce")
    a["wo"].shard("weight", axis=1)
    a["wo"].sync("fwd_post", "all_reduce")
"""
LLAMA = """\
from transformers import LlamaConfig

from rules.schedules.llama import model, schedule


def verify_model(m):
    return m.LlamaForCausalLM(
        LlamaConfig(
            vocab_size=203,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
"""


def source(heads: int, few: int, **repeats: str) -> str:
    text = SOURCE.replace("HEADS", f"({heads}, {few})", 1)
    for name, value in {**REPEATS, **repeats}.items():
        text = text.replace(name, value)
    return text


CASES = {
    "two": Case(source(8, 2), SCHEDULE),
    "one": Case(source(4, 1), SCHEDULE),
    # The loss is computed in float32.
    "llama": Case("transformers.models.llama.modeling_llama", LLAMA, 1e-6),
}


def lines_added(output) -> list[str]:
    return [line[1:].strip() for line in changed_lines(output).splitlines() if line[0] == "+"]


def test_what_counts_heads_is_right_on_any_number_of_ranks(tmp_path):
    added = lines_added(rewritten(tmp_path, source(8, 2), SCHEDULE))
    layer = "KeyValueParallelLinear(dim, n_kv_heads * self.head_dim, multiple_of=self.head_dim)"
    assert f"self.wk = {layer}" in added and f"self.wv = {layer}" in added
    assert added[-3:] == [
        "self.n_heads = part_size(self.n_heads)",
        "self.n_kv_heads = part_size(self.n_kv_heads * self.wk.replicas)",
        "self.n_rep //= self.wk.replicas",
    ]


def layers(text: str) -> str:
    """A source with two layers, whose heads differ in size, made by one line."""
    head, _, _ = text.partition("class Model")
    return f"""{head}class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(dim, 8, 2) for dim in (32, 64)])

    def forward(self, x):
        x = self.layers[0](x)
        return self.layers[1](torch.cat([x, x], -1))
"""


def test_heads_of_different_sizes_are_one_text(tmp_path):
    schedule = SCHEDULE.replace('"attention"', '"layers.*"')
    added = lines_added(rewritten(tmp_path, layers(source(8, 2)), schedule))
    assert added.count("self.n_rep //= self.wk.replicas") == 1
    assert not any(line.startswith("class") for line in added)


def test_heads_are_counted_where_the_layer_that_has_them_is_made(tmp_path):
    """If subclasses construct the layers, they are whole at the end of the base's constructor."""
    schedule = SCHEDULE.replace('"attention"', '"layers.*"').replace(
        '    a["{wq,wk,wv}"].sync("bwd_post", "all_reduce")\n',
        '    s["layers"][0]["{wq,wk,wv}"].sync("bwd_post", "all_reduce")\n'
        '    s["layers"][1].sync("bwd_post", "all_reduce")\n',
    )
    output = rewritten(tmp_path, layers(source(8, 2)), schedule)
    added = "\n".join(lines_added(output))
    _, *subclasses = added.split("class TensorParallelAttention")
    assert len(subclasses) == 2
    assert all("self.n_rep //= self.wk.replicas" in each for each in subclasses)
    assert added.count("//=") == 2


def test_as_many_key_heads_as_query_heads_are_not_replicated(tmp_path):
    added = lines_added(rewritten(tmp_path, source(8, 8), SCHEDULE))
    assert not any("KeyValueParallelLinear" in line or "replicas" in line for line in added)


def test_what_cannot_be_repeated_less_often_is_not_replicated(tmp_path):
    """A number in `forward` cannot be adapted to a rank, so more ranks than heads do not fit."""
    added = lines_added(
        rewritten(tmp_path, source(8, 2, REPEATED_K="k.repeat_interleave(4, dim=1)"), SCHEDULE)
    )
    assert not any("KeyValueParallelLinear" in line for line in added)


OF_ONE_FEATURE = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.kv, self.size = 24, 4, 1
        self.q, self.k, self.v = nn.Linear(32, 24), nn.Linear(32, 4), nn.Linear(32, 4)
        self.o = nn.Linear(24, 32)

    def forward(self, x):
        b, t = x.shape[:2]
        n = self.heads // self.kv
        BODY
        return self.o(y)
"""
OF_ONE_SCHEDULE = (
    SCHEDULE[: SCHEDULE.index("def schedule")]
    + """\
def schedule(s):
    s["{q,k,v}"].shard(["weight", "bias"], axis=0)
    s["o"].shard("weight", axis=1)
    s.infer_sync()
"""
)
ATTENTION = """\
q, k, v = (f(x).view(b, t, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = REPEATED
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)"""
OF_ALL = "(z{} for z in (k, v))"


@pytest.mark.parametrize(
    "body",
    [
        ATTENTION.replace("REPEATED", OF_ALL.format(".repeat_interleave(n, dim=1)")),
        ATTENTION.replace(
            "REPEATED",
            OF_ALL.format(
                "[:, :, None].expand(b, z.size(1), n, t, self.size).reshape(b, -1, t, 1)"
            ),
        ),
        ATTENTION.replace(
            "REPEATED", OF_ALL.format(".unsqueeze(2).repeat(1, 1, n, 1, 1).flatten(1, 2)")
        ),
        ATTENTION.replace("REPEATED", "k, v").replace("(q, k, v)", "(q, k, v, enable_gqa=True)"),
        "y = self.q(x) * (self.k(x) + self.v(x)).repeat_interleave(n, -1)",
        "y = self.q(x) * torch.stack([self.k(x) + self.v(x)] * n, -1).flatten(-2)",
    ],
)
def test_what_is_repeated_is_split_evenly_or_not_at_all(tmp_path, body):
    """Shares of 2, 1 and 1 heads, repeated, would meet shares of 8 query heads."""
    case = Case(OF_ONE_FEATURE.replace("BODY", body), OF_ONE_SCHEDULE)
    prepare(tmp_path, {"few": case})
    module = modules(tmp_path, "few", case)[1]
    shards = importlib.import_module("few_out.shards")
    words = (
        "4 does not divide over 3 ranks; the largest tensor-parallel size below 3 that fits is 2"
    )
    with shards.world_of(3), pytest.raises(ValueError, match=words):
        module.Model()


def check_layer():
    world = tp.world_size()
    torch.manual_seed(0)
    whole = nn.Linear(6, 8).double()
    layer = KeyValueParallelLinear(6, 8, multiple_of=4).double()
    layer.load_state_dict(whole.state_dict())
    replicas = max(1, world // 2)
    assert (layer.replicas, layer.out_features) == (replicas, 8 // min(world, 2))
    x, own = (torch.randn(3, 6).double().requires_grad_() for _ in range(2))
    own.data.copy_(x.data)
    # What is made of the heads differs from rank to rank, as their query heads do.
    weights = torch.randn(world, 3, 8 // min(world, 2)).double()
    first = tp.rank() // replicas * layer.out_features
    (layer(own) * weights[tp.rank()]).sum().backward()
    y = whole(x)
    for r in range(world):
        start = r // replicas * layer.out_features
        (y[:, start : start + layer.out_features] * weights[r]).sum().backward(retain_graph=True)
    torch.testing.assert_close(layer(own), y[:, first : first + layer.out_features])
    torch.testing.assert_close(own.grad, x.grad)
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    full = to_full(layer, gradients)
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    for name, gradient in wanted.items():
        torch.testing.assert_close(full[name], gradient)
        torch.testing.assert_close(to_local(layer, wanted)[name], gradients[name])
    # A gradient norm that counts every part once.
    assert layer.weight.model_parallel == (tp.rank() % replicas == 0)
    torch.manual_seed(0)
    built = build(lambda: KeyValueParallelLinear(6, 8, multiple_of=4))
    assert torch.equal(full_state_dict(built)["weight"], whole.weight.float())


def refusal(folder) -> str:
    _, module = modules(folder, "two", CASES["two"])
    try:
        module.Model(24, (6, 3))
    except ValueError as error:
        return str(error)
    return ""


def check(folder):
    check_layer()
    compare(folder, CASES)
    _, module = modules(folder, "llama", CASES["llama"])
    load_checkpoint(folder, module)
    return refusal(folder) if tp.world_size() == 4 else ""


def load_checkpoint(folder, module):
    schedule = importlib.import_module("llama_schedule")
    model = schedule.verify_model(module)
    load_pretrained(model, folder / "checkpoint")
    state = torch.load(folder / "checkpoint.pt")
    full = full_state_dict(model)
    assert all(torch.equal(full[name], tensor) for name, tensor in state.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case rewritten, and a checkpoint of the Llama."""
    path = tmp_path_factory.mktemp("grouped")
    prepare(path, CASES)
    original, _ = modules(path, "llama", CASES["llama"])
    model = importlib.import_module("llama_schedule").verify_model(original)
    model.save_pretrained(path / "checkpoint")
    torch.save(model.state_dict(), path / "checkpoint.pt")
    return path


@pytest.mark.processes
@pytest.mark.parametrize("world", [long(1), 2, long(4)])
def test_numbers(folder, world):
    for words in run(check, world, folder):
        assert world < 4 or "12 = 3 heads of 4 does not divide over 4 ranks" in words
