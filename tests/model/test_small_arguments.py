"""Small models of the user's own classes: the numbers that their constructors get."""

import importlib.util
import sys

import pytest
import torch

from slapo_rewrite.emit.write import write
from slapo_rewrite.model.meta_build import on_meta
from slapo_rewrite.model.rehearsal import MOST_PARAMETERS
from slapo_rewrite.model.small_arguments import small_build, small_heads, small_number
from slapo_rewrite.verify.run import verify
from tests.rewriting import refused, rewritten

BODY = """
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.qkv)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + h + self.down(torch.relu(self.up(x)))
"""
HEAD = """\
from dataclasses import dataclass
from types import SimpleNamespace
import torch
from torch import nn
from torch.nn import functional as F
"""
NUMBERS = "vocab_size={v}, n_embd={d}, n_head={h}, n_layer={n}"
LARGE = NUMBERS.format(v=50257, d=768, h=12, n=12)
# How the constructor of a model is told its numbers: its arguments, what it reads, and the call.
STYLES = {
    "plainly": (LARGE, "", "m.Net()"),
    "by position": ("vocab_size, n_embd, n_head, n_layer", "", "m.Net(50257, 768, 12, 12)"),
    "by a dataclass": ("config", "config.", "m.Net(m.Config())"),
    "by a frozen one": ("config", "config.", "m.Net(m.Frozen())"),
    "by one in another": ("outer", "outer.inner.", "m.Net(m.Outer(m.Config()))"),
    "by a namespace": ("config", "config.", f"m.Net(m.SimpleNamespace({LARGE}))"),
    "by a dictionary": ("config", "config", f"m.Net(dict({LARGE}))"),
}
CONFIGS = """
@dataclass
class Config:
    vocab_size: int = 50257
    n_embd: int = 768
    n_head: int = 12
    n_layer: int = 12

@dataclass(frozen=True)
class Frozen(Config):
    pass

@dataclass
class Outer:
    inner: Config
"""
NET = """
class Net(nn.Module):
    def __init__(self, {takes}):
        super().__init__()
        self.embed = nn.Embedding({vocab_size}, {n_embd})
        self.blocks = nn.ModuleList(Block({n_embd}, {n_head}) for _ in range({n_layer}))
        self.head = nn.Linear({n_embd}, {vocab_size})
        self.apply(self.start)

    def start(self, module):
        if {asks}(module{how} nn.Linear{end}:
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""


def source(style: str, exact: bool = False) -> str:
    takes, reads, _ = STYLES[style]
    names = ("vocab_size", "n_embd", "n_head", "n_layer")
    read = {n: f'{reads}["{n}"]' if reads == "config" else f"{reads}{n}" for n in names}
    asks = ("type", ") is", "") if exact else ("isinstance", ",", ")")
    net = NET.format(takes=takes, asks=asks[0], how=asks[1], end=asks[2], **read)
    frozen = CONFIGS.replace("class Frozen(Config):\n    pass", "class Frozen:\n    pass")
    fields = CONFIGS[CONFIGS.index("    vocab_size") : CONFIGS.index("\n@dataclass(frozen")]
    return HEAD + frozen.replace("    pass\n", fields) + BODY + net


def schedule(style: str, ids: str = "torch.arange(8).view(2, 4)") -> str:
    return (
        f"import torch\ndef model(m):\n    return {STYLES[style][2]}\n"
        f"def inputs(model):\n    return {{'ids': {ids}}}\n"
        "def loss(outputs):\n    return outputs.square().mean()\n"
        "def schedule(s):\n"
        "    s['blocks.*.up'].shard(['weight', 'bias'], axis=0)\n"
        "    s['blocks.*.down'].shard('weight', axis=1)\n    s.infer_sync()\n"
    )


def module(tmp_path, name, text):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def found(tmp_path, text, plan):
    own, told = module(tmp_path, "own_net", text), module(tmp_path, "own_schedule", plan)
    with on_meta():
        full = told.model(own)
    return small_build(told, own, full, MOST_PARAMETERS), own


def small(tmp_path, text, plan):
    build, own = found(tmp_path, text, plan)
    return None if build is None else build(own)


@pytest.mark.parametrize("style", STYLES)
def test_a_small_model_is_made_however_its_numbers_are_told(tmp_path, style):
    made = small(tmp_path, source(style), schedule(style))
    assert (made.embed.num_embeddings, made.embed.embedding_dim) == (203, 64)
    assert (len(made.blocks), made.blocks[0].heads) == (12, 4)


def test_all_layers_are_there_where_stages_are_cut_between_them(tmp_path):
    plan = schedule("plainly").replace("m.Net()", "m.Net(n_layer=30)")
    build, own = found(tmp_path, source("plainly"), plan)
    deep = build(own, deep=True)
    assert (len(build(own).blocks), len(deep.blocks)) == (12, 30)
    assert deep.embed.embedding_dim == 64


def test_inputs_that_are_made_for_the_vocabulary_keep_it(tmp_path):
    ids = "torch.tensor([[50256, 3]])"
    made = small(tmp_path, source("plainly"), schedule("plainly", ids))
    assert (made.embed.num_embeddings, made.embed.embedding_dim) == (50257, 16)


BLOCKS = HEAD + (
    "class Net(nn.Module):\n    def __init__(self, dim, hidden_dim, depth=24):\n"
    "        super().__init__()\n"
    "        self.layers = nn.ModuleList(\n            nn.Sequential(nn.Linear(dim, hidden_dim),"
    " nn.Linear(hidden_dim, dim)) for _ in range(depth)\n        )\n"
    "    def forward(self, x):\n        for layer in self.layers:\n            x = layer(x)\n"
    "        return x\n"
)
OF_BLOCKS = (
    "import torch\ndef model(m):\n    return m.Net(256, 1024)\n"
    "def inputs(model):\n    return {'x': torch.randn(2, 256)}\n"
)


def test_inputs_of_a_width_keep_it(tmp_path):
    made = small(tmp_path, BLOCKS, OF_BLOCKS)
    assert (len(made.layers), made.layers[0][0].weight.shape) == (4, (128, 256))


def test_classes_may_be_defined_anew_for_each_model(tmp_path):
    text = BLOCKS.replace(
        "class Net",
        "def layer(*sizes):\n    class Layer(nn.Linear):\n        pass\n"
        "    return Layer(*sizes)\n\n"
        "class Net",
    ).replace("nn.Linear(hidden_dim, dim)", "layer(hidden_dim, dim)")
    assert len(small(tmp_path, text, OF_BLOCKS).layers) == 4


@pytest.mark.parametrize(
    "text, plan",
    [
        (BLOCKS.replace("        super", "        assert depth == 24\n        super"), OF_BLOCKS),
        (BLOCKS, OF_BLOCKS.replace("m.Net(256, 1024)", "torch.nn.Linear(4096, 4096)")),
        (BLOCKS.replace("dim, dim))", "dim, dim), *[nn.GELU()] * (depth > 20))"), OF_BLOCKS),
    ],
    ids=["asked for", "not of the file", "of other classes"],
)
def test_what_cannot_be_made_smaller_is_left(tmp_path, text, plan):
    assert small(tmp_path, text, plan) is None


@pytest.mark.parametrize(
    "counts, heads",
    [
        ({"n_head": 32, "n_kv_head": 8, "head_dim": 128}, {"n_head": 8, "n_kv_head": 2}),
        ({"heads": 12, "kv_heads": 1}, {}),
        ({"heads": 16, "dim": 4096}, {}),
    ],
)
def test_heads_keep_their_ratio(counts, heads):
    assert small_heads(counts) == heads


@pytest.mark.parametrize(
    "name, default, number",
    [("n_kv_heads", 8, 2), ("head_dim", 128, 16), ("num_heads", 4, None), ("theta", 10000, None)],
)
def test_numbers_go_by_what_names_say(name, default, number):
    assert small_number(name, default) == number


def test_a_large_model_of_ones_own_is_run_before_it_is_written(tmp_path):
    right = rewritten(tmp_path, source("plainly"), schedule("plainly"))
    assert not right.warnings
    text = refused(tmp_path, source("plainly", exact=True), schedule("plainly"), "SR106")
    assert "it starts otherwise" in text


def test_what_is_too_large_to_be_verified_is_verified_small(tmp_path):
    plan = schedule("plainly").replace("m.Net()", "m.Net(n_embd=4096, n_head=32)")
    output = rewritten(tmp_path, source("plainly"), plan)
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", [2])
    assert report.ok and any("a small one was compared" in note for note in report.notes)


def test_other_random_numbers_are_not_drawn(tmp_path):
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    build, _ = found(tmp_path, source("plainly"), schedule("plainly"))
    assert build is not None
    assert torch.equal(torch.rand(2), want)
