"""Models whose modules are made by functions and passed to classes."""

from __future__ import annotations

import pytest

from tests.rewriting import changed_lines, imported, refused, rewritten, written

# What the classes are, as `modules.py` of a package may have them.
CLASSES = """\
import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self, dim, heads, q, o):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.q, self.o = q, o

    def forward(self, x):
        q = self.q(x).view(*x.shape[:2], -1, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, *, layers, norm):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)
"""
BUILDERS = """\


def mlp(dim, hidden):
    return MLP(up=nn.Linear(dim, hidden), down=nn.Linear(hidden, dim))


def decoder(num_layers, dim=16, heads=4):
    layers = []
    for _ in range(num_layers):
        attention = Attention(dim, heads, q=nn.Linear(dim, dim), o=nn.Linear(dim, dim))
        layers.append(Layer(attention, mlp(dim, 2 * dim)))
    return Decoder(layers=layers, norm=nn.LayerNorm(dim))


class Model(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.decoder = decoder(num_layers)

    def forward(self, x):
        return self.decoder(x)
"""
BUILT = CLASSES + BUILDERS
HEAD = """\
import torch


def model(m):
    return m.{}


def inputs(model):
    return {{"x": torch.rand(2, 5, {})}}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
"""
SPLIT = """\
    s["**.q"].shard(["weight", "bias"], axis=0)
    s["**.o"].shard("weight", axis=1)
    s["**.mlp.up"].shard(["weight", "bias"], axis=0)
    s["**.mlp.down"].shard("weight", axis=1)
    s.infer_sync()
"""
HALF = '    s["**.layers"][:0.4].checkpoint()\n    s["**.layers"][1:]["attention"].checkpoint()\n'
SCHEDULE = HEAD.format("Model()", 16) + SPLIT + HALF


@pytest.mark.parametrize("model", ["Model()", "decoder(3)"])
def test_what_builders_make_changes_there(model, tmp_path):
    """Be the model a class or what a builder returns; a loop's counter tells its elements apart."""
    head = HEAD.format(model, 16)
    changed = changed_lines(rewritten(tmp_path, BUILT, head + SPLIT + HALF))
    assert "ColumnParallelLinear(dim, dim, multiple_of=dim // heads)" in changed
    assert "up=ColumnParallelLinear(dim, hidden), down=RowParallelLinear(" in " ".join(
        changed.split()
    )
    assert "+    for i in range(num_layers):\n" in changed
    assert "CheckpointedLayer(attention, mlp(dim, 2 * dim))\n" in changed
    assert "if i < 2 * num_layers // 5\n" in changed
    assert "if i >= 1\n" in changed


def test_builders_in_another_file(tmp_path, monkeypatch):
    """The file of the builders comes into the output, that of the classes stays where it is."""
    package = tmp_path / f"built_{tmp_path.name}"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    builders, model = BUILDERS.split("class Model")
    (package / "__init__.py").write_text("")
    (package / "modules.py").write_text(CLASSES)
    names = "MLP, Attention, Decoder, Layer"
    head = f"from torch import nn\n\nfrom {package.name}.modules import {names}\n"
    (package / "builders.py").write_text(head + builders.rstrip() + "\n")
    source = f"from torch import nn\n\nfrom {package.name}.builders import decoder\n\n\nclass Model"
    output = rewritten(tmp_path, source + model, SCHEDULE)
    assert output.files.keys() >= {"builders.py"} and "modules.py" not in output.files
    text = output.files["builders.py"]
    assert "class CheckpointedLayer(Layer):\n" in text and f"from {package.name}.modules" in text
    assert text.index("class CheckpointedLayer") < text.index("def decoder")
    assert "from .builders import decoder\n" in output.files["source_0.py"]
    made = imported(written(tmp_path, output)).Model()
    kinds = [type(layer).__name__ for layer in made.decoder.layers]
    assert kinds == ["CheckpointedLayer", "Layer", "Layer"]


GROUPED = """\


class Grouped(nn.Module):
    def __init__(self, *, heads, groups, size, q, k, o):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, size
        self.q, self.k, self.o = q, k, o

    def forward(self, x):
        q = self.q(x).view(*x.shape[:2], self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(*x.shape[:2], self.groups, self.size).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.groups, 1)
        return self.o(F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2))


def build(dim=16, heads=4, groups=2):
    size = dim // heads
    return Decoder(
        layers=[
            Grouped(
                heads=heads,
                groups=groups,
                size=size,
                q=nn.Linear(dim, heads * size),
                k=nn.Linear(dim, groups * size),
                o=nn.Linear(dim, dim),
            )
        ],
        norm=nn.LayerNorm(dim),
    )
"""


def test_ranks_that_share_heads_of_a_layer_that_is_given(tmp_path):
    lines = SPLIT.partition('    s["**.mlp')[0].replace('"**.q"', '"**.{q,k}"')
    schedule = HEAD.format("build()", 16) + lines + "    s.infer_sync()\n"
    changed = " ".join(changed_lines(rewritten(tmp_path, CLASSES + GROUPED, schedule)).split())
    assert "k=KeyValueParallelLinear( + dim, groups * size, reduce_input_gradient=False" in changed


LOOKALIKES = """\
import functools

import torch
from torch import nn


class Two(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Wrap(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Stack(nn.Sequential):
    pass


def two(a, b):
    return Two(nn.Linear(a, b), nn.Linear(b, a))


def either(plain):
    return Wrap(nn.Linear(8, 8)) if plain else two(8, 16)


@functools.cache
def cached(a):
    return nn.Linear(a, a)


def nested(depth):
    return Wrap(nested(depth - 1)) if depth else two(8, 16)


class Block(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList([])
        pair = lambda: Wrap(make(8, 8))
        for _ in range(2):
            self.layers.append(nn.ModuleList([pair(), pair()]))
        self.one, self.two = (nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for first, second in self.layers:
            x = second(first(x))
        return self.two(self.one(x))


"""
# Defined in the schedule.
FAST = """\
import torch


class Fast(torch.nn.Linear):
    def __init__(self, a, b, scale=1):
        super().__init__(a, b)
        self.scale = scale

    def forward(self, x):
        return super().forward(x) * self.scale
"""
# What makes the model; what is asked; the lines of the output, or words of the refusal.
CASES = {
    "called twice, alike": (
        "Stack(Stack(*[two(8, 8) for i in range(2)]), Stack(*[two(8, 16) for i in range(2)]))",
        '["**.up"].checkpoint()',
        "+    return Two(CheckpointedLinear(a, b), nn.Linear(b, a))\n",
    ),
    "called twice, not alike": (
        "Stack(Stack(*[two(8, 8) for i in range(2)]), Stack(*[two(8, 16) for i in range(2)]))",
        '["0.*.up"].checkpoint()',
        "`two` constructs `0.0.up` and `1.0.up`, which are scheduled differently",
    ),
    "returns another thing": (
        "Stack(*[either(i % 2 == 0) for i in range(4)])",
        '["{1,3}"].checkpoint()',
        "+    return CheckpointedTwo(nn.Linear(a, b), nn.Linear(b, a))\n",
    ),
    "recursion": (
        "Stack(*[nested(i) for i in range(3)])",
        '["2.inner"].checkpoint()',
        "`nested` constructs `1` and `2.inner`, which are scheduled differently",
    ),
    "one for two classes": (
        "(lambda one: Stack(Wrap(one), Two(one, nn.Linear(8, 8))))(nn.Linear(8, 8))",
        '["1.up"].checkpoint()',
        "+        CheckpointedLinear(8, 8)\n",
    ),
    "cached": (
        "Stack(Wrap(cached(8)), Wrap(cached(8)))",
        '["1.inner"].checkpoint()',
        "+    return CheckpointedLinear(a, a)\n",
    ),
    "counted from the end": (
        "Stack(*[two(8, 16) for i in range(3)][::-1])",
        '["0"].checkpoint()',
        "`two` constructs `0` and `1`, which are scheduled differently",
    ),
    "counted otherwise than it stands": (
        "Stack(*[Wrap(nn.Linear(8, 8)) for i in range(4) if i != 1])",
        '["{1,2}"].checkpoint()',
        "`*` differ, and nothing counts them where they are constructed",
    ),
    "a variable that is another one by then": (
        "Stack(*[f() for f in [lambda: two(8, 8 * (i + 1)) for i in range(3)]])",
        "[:1].checkpoint()",
        "`two` constructs `0` and `1`, which are scheduled differently",
    ),
    "a lambda, alike": (
        "Block(lambda a, b: nn.Linear(a, b))",
        '["layers.*.*"].checkpoint()',
        "+        pair = lambda: CheckpointedWrap(make(8, 8))\n",
    ),
    "a lambda, not alike": (
        "Block(lambda a, b: nn.Linear(a, b))",
        '["layers.*.0"].checkpoint()',
        "`layers.0.0` and `layers.0.1` are constructed by one line, but scheduled differently",
    ),
    "a lambda that a class is given": (
        "Block(lambda a, b: nn.Linear(a, b))",
        '["layers.*.*.inner"].checkpoint()',
        "+    return Block(lambda a, b: CheckpointedLinear(a, b))\n",
    ),
    "unpacked": (
        "Block(lambda a, b: nn.Linear(a, b))",
        '["{one,two}"].checkpoint()',
        "+        self.one, self.two = (CheckpointedLinear(8, 8) for _ in range(2))\n",
    ),
    "by a class that came in": (
        "Block(nn.Linear)",
        '["layers.*.*.inner"].checkpoint()',
        "+            CheckpointedLinear(8, 8) if make is nn.Linear else make(8, 8)\n",
    ),
    "replaced": (
        "Stack(*[Two(nn.Linear(8, 4 * n), nn.Linear(4 * n, 8)) for n in (1, 2)])",
        '["*.up"].replace(Fast, args="8, 4 * n, 1")',
        "[Two(Fast(8, 4 * n, 1), nn.Linear(4 * n, 8)) for n in (1, 2)]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_where_builders_are_called(name, tmp_path):
    built, asked, expected = CASES[name]
    source = f"{LOOKALIKES}def build():\n    return {built}\n"
    schedule = HEAD.format("build()", 8) + f"    s{asked}\n"
    if "Fast" in asked:
        schedule = schedule.replace("import torch\n", FAST)
    if expected.startswith("`") or expected.startswith("needs"):
        assert expected in refused(tmp_path, source, schedule, "SR103")
    else:
        assert expected in changed_lines(rewritten(tmp_path, source, schedule))


VALUES = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.width = width
        self.v = nn.Linear(8, heads * width)
        self.out = nn.Linear(heads * width, 8)

    def forward(self, x, values):
        shape = (*x.shape[:-1], -1, self.width)
        return self.out((self.v(x).view(shape) + values.view(shape)).flatten(-2))


class Model(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.values = nn.Embedding(30, SIZE)
        self.embedding = nn.Embedding(30, 8)
        self.attention = Attention(sizes.heads, sizes.width)

    def forward(self, ids):
        return self.attention(self.embedding(ids), self.values(ids))
"""
VALUES_SCHEDULE = """\
from types import SimpleNamespace

import torch


def model(m):
    return m.Model(SimpleNamespace(heads=4, width=6, more=24))


def inputs(model):
    return {"ids": torch.randint(30, (2, 5))}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["attention.v"].shard(["weight", "bias"], axis=0)
    s["attention.out"].shard("weight", axis=1)
    s["values"].shard("weight", axis=1)
    s.infer_sync()
"""


@pytest.mark.parametrize(
    ("size", "unit"), [("sizes.heads * sizes.width", "sizes.width"), ("sizes.more", "6")]
)
def test_a_unit_is_named_as_a_factor_of_the_size_is(size, unit, tmp_path):
    """A small model has heads of another width."""
    text = changed_lines(rewritten(tmp_path, VALUES.replace("SIZE", size), VALUES_SCHEDULE))
    assert f"30, {size}, multiple_of={unit}" in text
