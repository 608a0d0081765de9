"""Instances of one class that are treated differently, for each way that models make them."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.lowering import test_builders
from tests.marks import long
from tests.numbers import Case, compare, prepare
from tests.processes import run
from tests.rewriting import changed_lines, imported, refused, rewritten, written

ATTENTION = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def split(self, x):
        return x.view(x.shape[0], -1, self.heads, self.head_dim).transpose(1, 2)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        y = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class CausalAttention(Attention):
    def forward(self, x, memory=None):  # its constructor is the one above
        return super().forward(x.cumsum(1), memory)


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(self.up(x).tanh())
"""

CROSS = (
    ATTENTION
    + """

class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention = CausalAttention(dim, heads)
        self.cross = Attention(dim, heads)
        self.mlp = MLP(dim)

    def forward(self, x, memory):
        x = x + self.attention(x)
        x = x + self.cross(x, memory)
        return x + self.mlp(x)


class Gate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mlp = MLP(dim)

    def forward(self, x):
        return x * self.mlp(x).sigmoid()


class Model(nn.Module):
    def __init__(self, dim=16, heads=4, depth=3):
        super().__init__()
        layers = []
        for _ in range(depth):
            layers.append(Layer(dim, heads))
        self.layers = nn.ModuleList(layers)
        self.encoder = nn.ModuleList()
        for _ in range(depth):
            self.encoder.append(Attention(dim, heads))
        self.gate = Gate(dim)

    def forward(self, x, memory):
        for block in self.encoder:
            memory = memory + block(memory)
        for layer in self.layers:
            x = layer(x, memory)
        return self.gate(x)
"""
)

HEIRS = (
    ATTENTION
    + """

class HalvedMLP(MLP):
    def forward(self, x):
        return 0.5 * super().forward(x)


class Model(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.first = MLP(dim)
        self.second = HalvedMLP(dim)

    def forward(self, x, memory):
        return self.second(self.first(x) + memory.mean(1, keepdim=True))
"""
)

PLAIN = """\
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, dim=8, depth=10):
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""

ENDS = """\
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, crossed):
        super().__init__()
        self.steps = nn.ModuleList()
        self.steps.append(nn.Linear(dim, dim))
        if crossed:
            self.steps.append(nn.LayerNorm(dim))
        self.steps.append(nn.Linear(dim, dim, bias=False))

    def forward(self, x):
        for step in self.steps:
            x = x + step(x).tanh()
        return x


class Stack(nn.Module):
    def __init__(self, dim, crossed):
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, crossed) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.one, self.two = Stack(dim, False), Stack(dim, True)

    def forward(self, x):
        return self.two(self.one(x))
"""

HANDED = """\
from torch import nn


class Residual(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x):
        for each in self.inner:
            x = x + each(x)
        return x


class Two(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.one = Residual(Two(dim), nn.Linear(dim, dim))
        named = Two(dim)
        self.named = Residual(named)

    def forward(self, x):
        return self.named(self.one(x))


class Model(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim) for _ in range(3)])
        self.plain = nn.ModuleList([Residual(Two(dim)) for _ in range(3)])
        self.last = Residual(*[nn.Linear(dim, dim) for _ in range(2)])

    def forward(self, x):
        for each in [*self.blocks, *self.plain]:
            x = each(x)
        return self.last(x)
"""

HEAD = """\
import torch


def model(m):
    return m.Model()


def inputs(model):
    return {given}


def loss(outputs):
    return outputs.square().mean()


"""
BOTH = HEAD.format(given='{"x": torch.rand(2, 5, 16), "memory": torch.rand(2, 6, 16)}')
ONE = HEAD.format(given='{"x": torch.rand(2, 5, 8)}')

SPLIT = """\
def split(attention):
    attention["{q,k,v}"].shard(["weight", "bias"], axis=0)
    attention["{q,k,v}"].sync("bwd_post", "all_reduce")
    attention["o"].shard("weight", axis=1)
    attention["o"].sync("fwd_post", "all_reduce")


def split_mlp(mlp):
    mlp["up"].shard(["weight", "bias"], axis=0)
    mlp["up"].sync("bwd_post", "all_reduce")
    mlp["down"].shard("weight", axis=1)
    mlp["down"].sync("fwd_post", "all_reduce")


"""

CASES = {
    "cross_only": Case(
        CROSS,
        BOTH
        + SPLIT
        + """\
def schedule(s):
    split(s["layers.*.cross"])
    s["layers.*.attention"].checkpoint()
    s["encoder.1"].checkpoint()
""",
    ),
    "heir_only": Case(
        CROSS, BOTH + SPLIT + 'def schedule(s):\n    split(s["layers.*.attention"])\n'
    ),
    "parent_only": Case(
        HEIRS,
        BOTH
        + """\
def schedule(s):
    s["first.up"].shard(["weight", "bias"], axis=0)
    s["first.down"].shard("weight", axis=1)
    s["first"].sync("bwd_post", "all_reduce")
    s["first"].sync("fwd_post", "all_reduce")
""",
    ),
    "one_parent": Case(CROSS, BOTH + SPLIT + 'def schedule(s):\n    split_mlp(s["gate.mlp"])\n'),
    "appended": Case(
        CROSS,
        BOTH
        + SPLIT
        + """\
def schedule(s):
    split(s["encoder"][1:])
    split_mlp(s["layers"][:2]["mlp"])
    s["layers"][1:].checkpoint()
""",
    ),
    "overlapping": Case(
        PLAIN,
        ONE
        + SPLIT
        + """\
def schedule(s):
    split_mlp(s["blocks"][0:6])
    s["blocks"][3:9].checkpoint()
""",
    ),
    "from_the_end": Case(
        ENDS,
        ONE
        + """\
def schedule(s):
    s["one.blocks.0.steps.1"].checkpoint()
    s["two.blocks.1.steps.2"].checkpoint()
""",
    ),
    "built": Case(test_builders.BUILT, test_builders.SCHEDULE),
    "given": Case(
        HANDED,
        ONE
        + SPLIT
        + """\
def schedule(s):
    split_mlp(s["{blocks.*.one,plain.*}.inner.0"])
    s["blocks.*.named.inner.0"].checkpoint()
    s["last.inner.0"].shard(["weight", "bias"], axis=0)
    s["last.inner.0"].sync("bwd_post", "all_reduce")
    s["last.inner.0"].sync("fwd_post", "all_gather", axis=-1)
""",
    ),
    "hooks": Case(
        CROSS,
        BOTH
        + """\
def scaled(module, args, output):
    return output * 1.0


def schedule(s):
    s["gate.mlp"].sync("fwd_post", scaled)
    s["layers.*.cross"].sync("fwd_pre", scaled_input)


def scaled_input(module, args):
    return (args[0] * 1.0, *args[1:])
""",
    ),
}


def check(folder) -> None:
    compare(folder, CASES)


@pytest.mark.parametrize("world", [long(1), pytest.param(2, marks=pytest.mark.processes)])
def test_numbers(tmp_path, world):
    prepare(tmp_path, CASES)
    run(check, world, tmp_path)


def test_each_kind_of_instance_has_a_class_of_its_own(tmp_path):
    """Six split, six checkpointed, three of them both: four kinds, chosen by the layer's number."""
    case = CASES["overlapping"]
    changed = changed_lines(rewritten(tmp_path, case.source, case.schedule))
    for name, base in (
        ("TensorParallelBlock", "Block"),
        ("CheckpointedTensorParallelBlock", "TensorParallelBlock"),
        ("CheckpointedBlock", "Block"),
    ):
        assert f"+class {name}({base}):\n" in changed
    assert "if i < 3\n" in changed and "if 3 <= i < 6\n" in changed
    assert (
        "+                        else CheckpointedBlock(dim) if 6 <= i < 9 else Block(dim)\n"
        in changed
    )
    assert changed.count("\n-") + changed.startswith("-") == 1


def test_what_stands_at_different_numbers_is_counted_from_the_end(tmp_path):
    """The last module is the second of some blocks and the third of the others."""
    case = CASES["from_the_end"]
    changed = changed_lines(rewritten(tmp_path, case.source, case.schedule))
    assert "+            self.steps[-1] = CheckpointedLinear(dim, dim, bias=False)\n" in changed
    last = "        self.steps.append(nn.Linear(dim, dim, bias=False))\n"
    more = "        if not crossed:\n            self.steps.append(nn.LayerNorm(dim))\n"
    source = case.source.replace(last, last + more)  # nor from the end
    words = refused(tmp_path, source, case.schedule, "SR103")
    assert (
        "`two.blocks.1.steps.2` is constructed here, and so is `steps.1` of another `Block`"
        in words
    )


def test_one_parent_s_instance_changes_and_the_other_s_does_not(tmp_path):
    case = CASES["one_parent"]
    changed = changed_lines(rewritten(tmp_path, case.source, case.schedule))
    assert changed.endswith(
        "-        self.mlp = MLP(dim)\n+        self.mlp = TensorParallelMLP(dim)\n"
    )
    assert changed.count("TensorParallelMLP") == 2


def test_a_constructor_that_others_inherit_stays_as_it_is(tmp_path):
    case = CASES["heir_only"]
    changed = changed_lines(rewritten(tmp_path, case.source, case.schedule))
    assert "+class TensorParallelCausalAttention(CausalAttention):\n" in changed
    assert changed.count("\n-") == 1  # where it is made


def test_what_an_heir_would_inherit_becomes_a_class_of_its_own(tmp_path):
    case = CASES["parent_only"]
    changed = changed_lines(rewritten(tmp_path, case.source, case.schedule))
    assert "+class TensorParallelMLP(MLP):\n" in changed
    assert "+        return all_reduce(super().forward(all_reduce_gradient(x)))\n" in changed
    assert (
        "-        self.first = MLP(dim)\n+        self.first = TensorParallelMLP(dim)\n" in changed
    )


def test_a_hook_on_some_elements_of_a_loop_is_refused(tmp_path):
    schedule = (
        ONE
        + """\
def scaled(module, args, output):
    return output * 1.0


def schedule(s):
    s["blocks"][::3].sync("fwd_post", scaled)
"""
    )
    words = refused(tmp_path, PLAIN, schedule, "SR103")
    assert "one element cannot get a hook" in words


def test_a_call_in_a_method_that_another_class_inherits_too(tmp_path):
    """One of two derived classes changes in a method of their base: it gets an override."""
    source = ATTENTION + (
        "\n\nclass First(MLP):\n    pass\n\n\nclass Second(MLP):\n    pass\n\n\n"
        "class Pair(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.second = First(4), Second(4)\n\n"
        "    def forward(self, x):\n"
        "        return self.second(self.first(x))\n"
    )
    schedule = "def model(m):\n    return m.Pair()\n\n\n"
    schedule += 'def schedule(s):\n    s["first.up"].decompose()\n'
    changed = changed_lines(rewritten(tmp_path, source, schedule))
    assert "-        return self.down(self.up(x).tanh())" not in changed
    assert "+class DecomposedFirst(First):\n" in changed


GIVEN = """from functools import partial

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, act=torch.relu):
        super().__init__()
        self.up, self.act = nn.Linear(dim, dim), act

    def forward(self, x):
        return x + self.act(self.up(x))

    @classmethod
    def make(cls, dim):
        return cls(dim)


class Net(nn.Module):
    def __init__(self, block_fn=Block, dim=8):
        super().__init__()
        self.blocks = nn.ModuleList(block_fn(dim) for _ in range(4))
        layer = partial(Block, act=torch.tanh)
        self.one, self.two = layer(dim), Block.make(dim)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.two(self.one(x))
"""


@pytest.mark.parametrize(
    "model, path, made",
    [
        ("m.Net()", "blocks.0", "CheckpointedBlock(dim) if block_fn is Block and i == 0 else"),
        (
            "m.Net(m.partial(m.Block, act=torch.tanh))",
            "blocks.0",
            "with_class(block_fn, Block, CheckpointedBlock)(dim) if i == 0 else block_fn(dim)",
        ),
        ("m.Net(Own)", "blocks.0", None),
        (
            "m.Net(nn.Linear)",
            "blocks.0",
            "as_subclass(block_fn(dim), nn.Linear, CheckpointedLinear) if i == 0 else block_fn(dim",
        ),
        ("m.Net()", "one", "layer = partial(CheckpointedBlock, act=torch.tanh)"),
        ("m.Net()", "two", "CheckpointedBlock.make(dim)"),
    ],
)
def test_a_class_that_comes_in_as_a_value(model, path, made, tmp_path):
    """What it is given in the model's call is kept, or nothing is written."""
    schedule = "import torch\nfrom torch import nn\n\n\nclass Own(nn.Linear):\n"
    schedule += "    def __init__(self, dim):\n        super().__init__(dim, dim)\n\n\n"
    model = model.replace("nn.Linear)", "lambda dim: nn.Linear(dim, dim))")
    schedule += f"def model(m):\n    return {model}\n\n\n"
    schedule += f'def schedule(s):\n    s["{path}"].checkpoint()\n'
    if made is None:
        refused(tmp_path, GIVEN, schedule, "SR103")
    else:
        assert made in " ".join(rewritten(tmp_path, GIVEN, schedule).files["source_0.py"].split())


def test_a_partial_may_be_the_class_itself_in_another_model(tmp_path):
    schedule = "import torch\n\n\ndef model(m):\n"
    schedule += "    return m.Net(m.partial(m.Block, act=torch.tanh))\n\n\n"
    schedule += "def verify_model(m):\n    return m.Net()\n\n\n"
    schedule += 'def inputs(model):\n    return {"x": torch.randn(2, 8)}\n\n\n'
    schedule += 'def schedule(s):\n    s["blocks"][:2].checkpoint()\n'
    output = rewritten(tmp_path, GIVEN, schedule)
    assert not output.warnings
    module = imported(written(tmp_path, output))

    class Other(module.Block):
        pass

    for given, made in (
        (module.Block, "CheckpointedBlock"),
        (functools.partial(functools.partial(module.Block), act=torch.tanh), "CheckpointedBlock"),
        (functools.partial(Other, act=torch.tanh), "Other"),
        (lambda dim: Other(dim, act=torch.tanh), "Other"),
    ):
        first = module.Net(given).blocks[0]
        assert type(first).__name__ == made
        assert (first.act is torch.tanh) == (given is not module.Block)


GIVEN_LAYERS = """from functools import partial

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, dim=8, up=None, down=nn.Linear):
        super().__init__()
        up = up or partial(nn.Linear, bias=False)
        self.up, self.down = up(dim, 4 * dim), down(4 * dim, dim)

    def forward(self, x):
        return self.down(self.up(x).relu())


def small():
    return Net(down=partial(nn.Linear, device=None, bias=False))
"""


GIVEN_LAYERS_SCHEDULE = """import torch


def model(m):
    return m.small()


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["up"].shard("weight", axis=0)
    s["down"].shard("weight", axis=1)
    s.infer_sync()
"""


def test_a_layer_that_comes_in_as_a_partial_of_its_class(tmp_path):
    """It is split with what the `partial` gives it, as far as a split layer takes that by name."""
    case = {"given": Case(GIVEN_LAYERS, GIVEN_LAYERS_SCHEDULE)}
    prepare(tmp_path, case)
    run(compare, 2, tmp_path, case)
    text = "".join((tmp_path / "given_out/given_original.py").read_text().split())
    assert "with_class(up,nn.Linear,ColumnParallelLinear,single_rank_only)(" in text
    assert "with_class(down,nn.Linear,RowParallelLinear,single_rank_only)(4*dim,dim" in text


def test_a_class_of_another_file_that_comes_in_as_a_partial(tmp_path):
    source = GIVEN_LAYERS.replace("partial(nn.Linear, device=None, bias=False)", "layer")
    source = source.replace("down(4 * dim, dim)", "nn.ModuleList(down(4 * dim) for _ in range(2))")
    source = source.replace("self.down(self.up(x)", "self.down[1](self.down[0](self.up(x))")
    source += "\n\nlayer = partial(nn.TransformerEncoderLayer, nhead=2, dim_feedforward=8)\n"
    schedule = GIVEN_LAYERS_SCHEDULE.partition("def schedule")[0]
    schedule += 'def schedule(s):\n    s["down"][:1].checkpoint()\n'
    made = rewritten(tmp_path, source, schedule).files["source_0.py"]
    assert "class CheckpointedTransformerEncoderLayer(nn.TransformerEncoderLayer):" in made
    made = " ".join(made.split())
    assert "with_class(down, nn.TransformerEncoderLayer, CheckpointedTrans" in made
    assert "else down(4 * dim)" in made


def test_a_partial_that_gives_by_place_says_another_size_where_it_is_called(tmp_path):
    source = GIVEN_LAYERS.replace("down(4 * dim, dim)", "down(dim)")
    source = source.replace("partial(nn.Linear, device=None", "partial(nn.Linear, 32")
    assert "but no call of that class constructs it" in refused(
        tmp_path, source, GIVEN_LAYERS_SCHEDULE, "SR103"
    )


def test_a_partial_that_gives_what_no_split_layer_takes_is_refused(tmp_path):
    source = """from functools import partial

from torch import nn


class Net(nn.Module):
    def __init__(self, table=partial(nn.Embedding, norm_type=2.0)):
        super().__init__()
        self.table = table(16, 8)

    def forward(self, ids):
        return self.table(ids)
"""
    schedule = """import torch


def model(m):
    return m.Net()


def inputs(model):
    return {"ids": torch.randint(0, 16, (2, 3))}


def schedule(s):
    s["table"].shard("weight", axis=0)
    s["table"].sync("fwd_post", "all_reduce")
"""
    error = refused(tmp_path, source, schedule, "SR305")
    assert "does not take the argument `norm_type`" in error


COUNTED = """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.down(self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.depth = 3
        self.layers = nn.ModuleList(Block() for _ in range(self.depth))

    def forward(self, x):
        for i in range(self.depth):
            x = x + self.layers[i](x)
        return x
"""


def test_layers_that_a_number_counts(tmp_path):
    """All of them are followed, and each one's norm, which meets parts, is found."""
    schedule = """import torch


def model(m):
    return m.Model()


def inputs(model):
    return {"x": torch.randn(2, 3, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s["layers.*.up"].shard(["weight", "bias"], axis=0)
    s["layers.*.down"].shard("weight", axis=1)
    s.infer_sync()
"""
    case = {"counted": Case(COUNTED, schedule)}
    prepare(tmp_path, case)
    run(compare, 2, tmp_path, case)
    assert "ReplicatedLayerNorm(4)" in (tmp_path / "counted_out/counted_original.py").read_text()


# What the `partial` gives is taken from that where it is called.
BY_VALUE = "with_class(Linear, nn.Linear, CheckpointedLinear)("
PARTIAL = """\
from functools import partial

from torch import nn

Linear = partial(nn.Linear, 8, bias=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Linear(8) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


@pytest.mark.parametrize(
    ("old", "new", "made"),
    [
        ("", "", "CheckpointedLinear(8, 8, bias=False) if i < 2 else Linear(8)"),
        ("Linear(8)", "Linear(8, bias=True)", "CheckpointedLinear(8, 8, bias=True) if i < 2"),
        ("Linear = partial", "flag = False\nLinear = partial", "CheckpointedLinear(8, 8, bias=F"),
        ("bias=False", "bias=str() == 'a'", BY_VALUE),
        ("Linear(8)", "Linear(8, **{})", BY_VALUE),
        ("class Model", "if nn:\n    Linear = partial(nn.Linear, 8)\n\n\nclass Model", BY_VALUE),
    ],
)
def test_a_partial_of_a_class_gives_the_subclass_what_it_gives(old, new, made, tmp_path):
    schedule = "def model(m):\n    return m.Model()\n\n\ndef schedule(s):\n"
    schedule += '    s["layers"][:2].checkpoint()\n'
    source = PARTIAL.replace(old, new)
    assert made in changed_lines(rewritten(tmp_path, source, schedule))


@pytest.mark.parametrize(
    ("old", "new", "made"),
    [
        ("", "", "CheckpointedLinear(8, 8, bias=bias) if i < 2 else Linear(8)"),
        ("self.layers = ", "bias = True\n        self.layers = ", BY_VALUE),
        ("for _ in range(3)", "for bias in range(3)", BY_VALUE),
        ("Linear(8)", "(lambda bias: Linear(8))(1)", None),
        ("bias=bias", "bias=self.training", BY_VALUE),
    ],
)
def test_a_partial_of_arguments_gives_what_they_are(old, new, made, tmp_path):
    """Unless they are others where it is called."""
    source = PARTIAL.replace("Linear = partial(nn.Linear, 8, bias=False)", "").replace(
        "(self):\n        super().__init__()",
        "(self, bias=False):\n        super().__init__()\n        "
        "Linear = partial(nn.Linear, 8, bias=bias)",
    )
    schedule = "def model(m):\n    return m.Model()\n\n\ndef schedule(s):\n"
    schedule += '    s["layers"][:2].checkpoint()\n'
    source = source.replace(old, new)
    if made is None:
        refused(tmp_path, source, schedule, "SR103")
        return
    assert made in changed_lines(rewritten(tmp_path, source, schedule))


@pytest.mark.parametrize(
    ("bound", "is_known"),
    [
        ("bias = False", True),
        ("bias = other = False", True),
        ("bias = False\n        bias = True", False),
        ("bias, other = False, 1", False),
        ("if self.training:\n            bias = False", False),
    ],
)
def test_a_partial_of_what_a_name_is_bound_to_gives_that(bound, is_known, tmp_path):
    source = PARTIAL.replace("Linear = partial(nn.Linear, 8, bias=False)", "").replace(
        "(self):\n        super().__init__()",
        f"(self):\n        super().__init__()\n        {bound}\n"
        "        Linear = partial(nn.Linear, 8, bias=bias)",
    )
    schedule = "def model(m):\n    return m.Model()\n\n\ndef schedule(s):\n"
    schedule += '    s["layers"][:2].checkpoint()\n'
    known = "CheckpointedLinear(8, 8, bias=bias) if i < 2 else Linear(8)"
    made = changed_lines(rewritten(tmp_path, source, schedule))
    assert (known if is_known else BY_VALUE) in made


@pytest.mark.parametrize("of", ["self.__class__", "type(self)"])
def test_a_class_that_asks_its_object_for_its_base_gets_no_subclass(of, tmp_path):
    source = f"""\
from torch import nn


class Block(nn.Linear):
    def __init__(self):
        super({of}, self).__init__(8, 8)


class Model(nn.Module):
    def __init__(self):
        super(Model, self).__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
    schedule = "def model(m):\n    return m.Model()\n\n\ndef schedule(s):\n"
    schedule += '    s["blocks"][:2].checkpoint()\n'
    text = refused(tmp_path, source, schedule, "SR305")
    assert (
        f"`super({of}, self)` would call `Block` itself" in text and "write super() without" in text
    )
    source = source.replace(f"super({of}, self)", "super()")
    assert "CheckpointedBlock" in changed_lines(rewritten(tmp_path, source, schedule))


FUNCTION = """\
from torch import nn


def wide(n):
    layer = nn.Linear(n, n)
    return layer


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = wide(8)

    def forward(self, x):
        return self.up(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.other, self.layers = Other(), nn.ModuleList([wide(8) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.other(x)
"""


RETURNED = "    return nn.Linear(n, n)\n"


@pytest.mark.parametrize(
    ("selected", "words"),
    [
        ('s["{layers.*,other.up}"]', None),
        ('s["layers.*"]', "`other.up` and `layers.0`, which are scheduled"),
        ('s["other.up"]', "`other.up` and `layers.0`, which are scheduled"),
        ('s["{layers.0,other.up}"]', "`wide` constructs"),
    ],
)
def test_what_a_function_makes_changes_alike_or_not_at_all(selected, words, tmp_path):
    schedule = (
        f"def model(m):\n    return m.Model()\n\n\ndef schedule(s):\n    {selected}.checkpoint()\n"
    )
    if words is not None:
        assert words in refused(tmp_path, FUNCTION, schedule, "SR103")
        return
    changed = changed_lines(rewritten(tmp_path, FUNCTION, schedule))
    assert "+    layer = CheckpointedLinear(n, n)\n" in changed and changed.count("-") == 1


def test_a_call_of_a_function_that_only_returns_a_layer_is_written_out(tmp_path):
    source = FUNCTION.replace("    layer = nn.Linear(n, n)\n    return layer\n", RETURNED)
    schedule = "def model(m):\n    return m.Model()\n\n\ndef schedule(s):\n    s"
    schedule += '["{layers.0,other.up}"].checkpoint()\n'
    changed = changed_lines(rewritten(tmp_path, source, schedule))
    assert "self.up = CheckpointedLinear(8, 8)\n" in changed
    assert "CheckpointedLinear(8, 8) if i == 0 else wide(8) for i in range(3)" in changed


HEADS = """\
import torch.nn.functional as F
from torch import nn


def proj(width):
    made = nn.Linear(width, width)
    return made


class Model(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, self.size)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
"""


def test_a_function_that_does_not_know_the_size_of_a_head(tmp_path):
    """`self.size` means nothing in the function that makes the layers of heads."""
    schedule = "import torch\n\n\ndef model(m):\n    return m.Model()\n\n\n"
    schedule += 'def inputs(model):\n    return {"x": torch.randn(2, 3, 16)}\n\n\n'
    schedule += "def schedule(s):\n"
    schedule += '    s["{q,k,v}"].shard(["weight", "bias"], axis=0)\n'
    schedule += '    s["o"].shard("weight", axis=1)\n    s.infer_sync()\n'
    text = rewritten(tmp_path, HEADS, schedule).files["source_0.py"]
    assert "multiple_of=self.size" in text
    source = HEADS.replace(
        "self.q, self.k = nn.Linear(width, width),", "self.q, self.k = proj(width),"
    )
    text = refused(tmp_path, source, schedule, "SR103")
    assert "multiples of `self.size`, which `proj`, where it is constructed, does not know" in text
    assert "construct `self.q` in the constructor itself" in text


@pytest.mark.parametrize(
    ("lines", "made"),
    [
        (['s["blocks.*.one.inner.0"].checkpoint()'], "Residual(CheckpointedTwo(dim), nn.Linear("),
        (['s["blocks.*.one.inner.1"].checkpoint()'], "Residual(Two(dim), CheckpointedLinear("),
        (['s["blocks.*.named.inner.0"].checkpoint()'], "named = CheckpointedTwo(dim)"),
        (
            ['s["plain.0.inner.0"].checkpoint()'],
            "Residual(CheckpointedTwo(dim) if i == 0 else Two(",
        ),
        (['s["plain.*.inner.0.up"].checkpoint()'], "Residual(ScheduledTwo(dim)) for _ in range(3)"),
        (['s["last.inner.0"].checkpoint()'], "CheckpointedLinear(dim, dim) if i == 0 else nn.Lin"),
        (
            ['s["blocks.*.one.inner.0"].checkpoint()', 's["blocks.*.one"].checkpoint()'],
            "self.one = CheckpointedResidual(CheckpointedTwo(dim), nn.Linear(",
        ),
        (
            ['s["blocks.*.one.inner.1"].replace(nn.Linear, args="dim, dim, True")'],
            "Residual(Two(dim), nn.Linear(dim, dim, True))",
        ),
        (['s["blocks.0.one.inner.0"].checkpoint()'], None),
        (['s["blocks.{1,2}.named.inner.0"].checkpoint()'], None),
        (  # a subclass would make the others anew, as they were
            ['s["blocks.*.named.inner.0"].checkpoint()', 's["blocks.0.one"].checkpoint()'],
            None,
        ),
    ],
)
def test_modules_that_are_given_to_another_one(lines, made, tmp_path):
    schedule = f"from torch import nn\n{ONE}def schedule(s):\n"
    schedule += "".join(f"    {line}\n" for line in lines)
    if made is None:
        words = refused(tmp_path, HANDED, schedule, "SR103")
        assert "a module constructed here is scheduled and also passed" in words
    else:
        text = rewritten(tmp_path, HANDED, schedule).files["source_0.py"]
        assert made in " ".join(text.split()), text


DEPTHS = """\
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, depth):
        super().__init__()
        layers = []
        for _ in range(depth):
            layers.append(nn.Sequential(nn.Linear(8, 8)))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep = Encoder(4)
        self.flat = Encoder(2)

    def forward(self, x):
        return self.flat(self.deep(x))
"""


def test_elements_that_one_of_two_instances_has_alone(tmp_path):
    """The last ones of the deep encoder could change in the class, the first ones could not."""
    start = "import torch\n\n\ndef model(m):\n    return m.Net()\n\n\n"
    start += 'def inputs(model):\n    return {"x": torch.randn(2, 8)}\n\n\ndef schedule(s):\n'
    line = '    s["deep.layers.*"].checkpoint()\n'
    words = refused(tmp_path, DEPTHS, start + line, "SR103")
    assert "some instances of `Encoder` differ in the modules constructed here" in words
    both = start + line + line.replace("deep", "flat")
    assert "layers.append(CheckpointedSequential(" in changed_lines(
        rewritten(tmp_path, DEPTHS, both)
    )
