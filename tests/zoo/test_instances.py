"""Some instances of a class differ: their subclasses, and what these inherit and construct."""

from __future__ import annotations

import ast

import pytest
import torch
from transformers import BertConfig, BertModel

from slapo_rewrite.model.uncalled import hooks_on
from tests.rewriting import SPLITTING as SCHEDULE
from tests.rewriting import changed_lines, imported, refused, rewritten, written

HEAD = "import torch\nfrom torch import nn\n\n\n"
MLP = """\
class MLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def forward(self, x):
        return self.down(self.up(x).relu())


"""


def model_of(constructor: str, forward: str) -> str:
    return (
        "class Model(nn.Module):\n    def __init__(self, d=8):\n        super().__init__()\n"
        f"{constructor}\n    def forward(self, x):\n{forward}"
    )


def test_a_subclass_makes_again_what_a_variable_class_makes(tmp_path):
    source = (
        HEAD
        + MLP
        + """\
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        kind = MLP
        self.mlp = kind(d)

    def forward(self, x):
        return x + self.mlp(x)


"""
        + model_of(
            "        self.blocks = nn.ModuleList([Block(d) for _ in range(3)])\n",
            "        for block in self.blocks:\n            x = block(x)\n        return x\n",
        )
    )
    output = rewritten(tmp_path, source, SCHEDULE + '    split(s["blocks"][1:]["mlp"])\n')
    added = changed_lines(output)
    assert "+        kind = TensorParallelMLP\n" in added
    assert "+        with same_weights(self):\n+            self.mlp = kind(d)\n" in added


def test_an_append_loop_is_given_a_counter(tmp_path):
    source = (
        HEAD
        + MLP
        + model_of(
            "        self.blocks = nn.ModuleList()\n        for _ in range(3):\n"
            "            self.blocks.append(MLP(d))\n",
            "        for block in self.blocks:\n            x = block(x)\n        return x\n",
        )
    )
    output = rewritten(tmp_path, source, SCHEDULE + '    s["blocks"][:2].checkpoint()\n')
    added = changed_lines(output)
    assert "-        for _ in range(3):\n" in added and "+        for i in range(3):\n" in added
    assert "self.blocks.append(CheckpointedMLP(d) if i < 2 else MLP(d))" in added


def test_a_place_in_a_list_that_instances_differ_in(tmp_path):
    source = (
        HEAD
        + MLP
        + """\
class Block(nn.Module):
    def __init__(self, d, first):
        super().__init__()
        self.layer = nn.ModuleList()
        if first:
            self.layer.append(nn.LayerNorm(d))
        self.layer.append(MLP(d))

    def forward(self, x):
        for layer in self.layer:
            x = layer(x)
        return x


"""
        + model_of(
            "        self.a = Block(d, True)\n        self.b = Block(d, False)\n",
            "        return self.b(self.a(x))\n",
        )
    )
    output = rewritten(tmp_path, source, SCHEDULE + '    split(s["a.layer"][1])\n')
    added = changed_lines(output)
    assert "+            self.layer[1] = TensorParallelMLP(d)\n" in added
    assert "+        self.a = TensorParallelBlock(d, True)\n" in added


def test_a_subclass_keeps_the_condition_that_not_all_of_its_instances_meet(tmp_path):
    source = (
        HEAD
        + """\
class Block(nn.Module):
    def __init__(self, d, deep):
        super().__init__()
        self.deep = deep
        self.up = nn.Linear(d, d)
        if deep:
            self.more = nn.Linear(d, d)
        self.down = nn.Linear(d, d)

    def forward(self, x):
        x = self.up(x)
        return self.down(x)


"""
        + model_of(
            "        self.a = Block(d, True)\n        self.b = Block(d, False)\n"
            "        self.c = Block(d, True)\n",
            "        return self.c(self.b(self.a(x)))\n",
        )
    )
    lines = '    split(s["{a,b}"])\n    s["a.more"].shard(["weight", "bias"], axis=0)\n'
    lines += '    s["a.more"].sync("bwd_post", "all_reduce")\n'
    added = changed_lines(rewritten(tmp_path, source, SCHEDULE + lines))
    assert (
        "+        with same_weights(self):\n+            self.up = ColumnParallelLinear(d, d)\n"
        "+            if deep:\n+                self.more = ColumnParallelLinear(d, d)\n" in added
    )


def of_a_variable(binding: str) -> str:
    """A model of two, one of which is to differ; its width is bound by some lines."""
    lines = "".join(f"        {line}\n" for line in binding.splitlines())
    return (
        HEAD
        + MLP.replace("(self, d)", "(self, d, h=None)")
        .replace("4 * d", "h")
        .replace("        self.up =", f"{lines}        self.up =")
        + model_of(
            "        self.a = MLP(d)\n        self.b = MLP(d, 16)\n",
            "        return self.b(self.a(x))\n",
        )
    )


@pytest.mark.parametrize(
    "binding",
    [
        "h = 4 * d",
        "h = h or 4 * d\nh = h + 4",
        "h = 4 * d if h is None else h",
        "h: int = 4 * d\nh += 4",
        "if h is None:\n    h = 4 * d\nelse:\n    h = h * 2\n    h += 4",
        "n, m = 2, 4\nh = n * m * d",
    ],
)
def test_what_binds_an_argument_anew_is_repeated_once(tmp_path, binding):
    output = rewritten(tmp_path, of_a_variable(binding), SCHEDULE + '    split(s["b"])\n')
    assert all(output.files[output.model_file].count(line) == 2 for line in binding.splitlines())
    original = imported(tmp_path / "source_0.py").Model()
    model = imported(written(tmp_path, output)).Model()
    model.load_state_dict(original.state_dict())
    x = torch.randn(2, 8)
    assert torch.equal(model(x), original(x))


@pytest.mark.parametrize(
    "binding",
    [
        "h = d\nfor _ in range(2):\n    h = h * 2",
        "h = d\nif d == 8:\n    self.wide, h = True, 4 * d",
        "h = n = d\nwhile h < 32:\n    h += n",
    ],
)
def test_what_cannot_be_repeated_by_itself_is_refused(tmp_path, binding):
    source = of_a_variable(binding)
    words = refused(tmp_path, source, SCHEDULE + '    split(s["b"])\n', "SR103")
    assert "depend on the local variable `h`" in words
    keeping = source.replace("        self.up", "        self.h = h\n        self.up", 1)
    keeping = keeping.replace("(d, h)", "(d, self.h)").replace("(h, d)", "(self.h, d)")
    rewritten(tmp_path, keeping, SCHEDULE + '    split(s["b"])\n')


def test_a_variable_that_is_bound_again_after_its_use_is_refused(tmp_path):
    source = of_a_variable("h = 4 * d")
    source = source.replace("nn.Linear(h, d)", "nn.Linear(h, d)\n        h = d")
    words = refused(tmp_path, source, SCHEDULE + '    split(s["b"])\n', "SR103")
    assert "depend on the local variable `h`" in words


RECURSIVE = (
    HEAD
    + """\
class MLP(nn.Module):
    def __init__(self, d, depth=2):
        super().__init__()
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)
        self.next = MLP(d, depth - 1) if depth else None

    def forward(self, x):
        x = self.down(self.up(x).relu())
        return x if self.next is None else self.next(x)


"""
    + model_of("        self.a = MLP(d)\n", "        return self.a(x)\n")
)


@pytest.mark.parametrize(
    ("lines", "instead"),
    [
        (['split(s["a.next"])'], [f'split(s["a{end}"])' for end in ("", ".next", ".next.next")]),
        (['s["a.next"].checkpoint()'], ['s["a"].checkpoint()']),
        (['s["a"].checkpoint()', 's["a.next"].checkpoint()'], ['s["a"].checkpoint()']),
    ],
)
def test_one_of_a_class_that_makes_itself_is_refused_and_the_advice_works(tmp_path, lines, instead):
    schedule, other = ("".join(f"    {line}\n" for line in each) for each in (lines, instead))
    words = refused(tmp_path, RECURSIVE, SCHEDULE + schedule, "SR305")
    assert "only some modules of class `MLP` should change" in words
    rewritten(tmp_path, RECURSIVE, SCHEDULE + other)


INHERITED = (
    HEAD
    + MLP.replace("class MLP", "class Base")
    + """\
class Plain(Base):
    pass


class Other(Base):
    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


"""
    + model_of(
        "        self.a = Plain(d)\n        self.b = Other(d)\n        self.c = Plain(d)\n",
        "        return self.c(self.b(self.a(x)))\n",
    )
)


def test_an_inherited_constructor_is_changed_once_for_all_heirs(tmp_path):
    added = changed_lines(rewritten(tmp_path, INHERITED, SCHEDULE + '    split(s["{a,b,c}"])\n'))
    assert added.count("ColumnParallelLinear(") == 1


def test_one_heir_of_a_constructor_gets_a_subclass(tmp_path):
    added = changed_lines(rewritten(tmp_path, INHERITED, SCHEDULE + '    split(s["c"])\n'))
    assert "+class TensorParallelPlain(Plain):\n" in added
    assert "+        self.c = TensorParallelPlain(d)\n" in added


def test_all_of_one_heir_and_none_of_another_get_a_subclass(tmp_path):
    added = changed_lines(rewritten(tmp_path, INHERITED, SCHEDULE + '    split(s["{a,c}"])\n'))
    assert added.count("+class TensorParallelPlain(Plain):\n") == 1
    assert "-        self.b" not in added


def test_one_line_that_makes_modules_scheduled_differently_is_refused(tmp_path):
    source = (
        HEAD
        + """\
class MLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        for name in ("up", "down"):
            setattr(self, name, nn.Linear(d, d))

    def forward(self, x):
        return self.down(self.up(x))


"""
        + model_of("        self.mlp = MLP(d)\n", "        return self.mlp(x)\n")
    )
    text = refused(tmp_path, source, SCHEDULE + '    split(s["mlp"])\n', "SR103")
    assert "`mlp.up` and `mlp.down` are constructed by one line" in text


COPIES = """\
import copy


def clones(module, number):
    return nn.ModuleList([copy.deepcopy(module) for ANY in range(number)])


class Model(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.layers = MADE

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x
"""


@pytest.mark.parametrize("name", ["_", "i"])
def test_copies_of_one_that_are_scheduled_differently_are_refused_and_the_advice_works(
    name, tmp_path
):
    source = HEAD + COPIES.replace("ANY", name)
    lines = (
        SCHEDULE
        + """\
    s["layers.0"].shard(["weight", "bias"], axis=0)
    s["layers.1"].shard("weight", axis=1)
    s.infer_sync()
"""
    )
    copied = source.replace("MADE", "clones(nn.Linear(d, d), 3)")
    text = refused(tmp_path, copied, lines, "SR103")
    assert "construct each with a call, in a loop there: [Linear(...) for _ in ...]" in text
    called = source.replace("MADE", "nn.ModuleList([nn.Linear(d, d) for _ in range(3)])")
    assert "if i == 0" in changed_lines(rewritten(tmp_path, called, lines))


GIVEN = """\
class Stack(nn.Module):
    def __init__(self, layer, number):
        super().__init__()
        self.layers = clones(layer, number)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Model(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        layer = MLP(d)
        self.a, self.b = Stack(layer, 3), Stack(layer, 3)

    def forward(self, x):
        return self.b(self.a(x))
"""


@pytest.mark.parametrize(
    ("selected", "made"),
    [
        ("{a,b}.layers.*", True),
        ("a.layers.*", False),  # all are copies of one
        ("{a,b}.layers.0", False),
    ],
)
def test_copies_of_what_a_constructor_is_given_change_where_that_is_made(selected, made, tmp_path):
    clones = COPIES.partition("class Model")[0].replace("ANY", "_")
    source, schedule = HEAD + clones + MLP + GIVEN, f'    s["{selected}"].checkpoint()\n'
    if not made:
        text = refused(tmp_path, source, SCHEDULE + schedule, "SR103")
        assert "are constructed by one line, but scheduled differently" in text
        return
    schedule += f'    split(s["{selected}"])\n'
    added = changed_lines(rewritten(tmp_path, source, SCHEDULE + schedule))
    assert "+        layer = CheckpointedMLP(d)\n" in added
    assert "+        self.up = ColumnParallelLinear(d, 4 * d)\n" in added


def test_a_layer_can_be_split_and_checkpointed(tmp_path):
    source = HEAD + MLP + model_of("        self.mlp = MLP(d)\n", "        return self.mlp(x)\n")
    lines = '    split(s["mlp"])\n    s["mlp.up"].checkpoint()\n'
    output = rewritten(tmp_path, source, SCHEDULE + lines)
    added = changed_lines(output)
    assert "+class CheckpointedColumnParallelLinear(ColumnParallelLinear):\n" in added
    assert "+        self.up = CheckpointedColumnParallelLinear(d, 4 * d)\n" in added
    assert "+        self.down = RowParallelLinear(4 * d, d)\n" in added


def test_a_replaced_module_can_be_checkpointed(tmp_path):
    source = HEAD + MLP + model_of("        self.mlp = MLP(d)\n", "        return self.mlp(x)\n")
    new = MLP.replace("MLP(", "New(") + "def schedule(s):\n"
    schedule = SCHEDULE.replace("def schedule(s):\n", new)
    lines = '    s["mlp"].replace(New, args="d=d")\n    s["mlp"].checkpoint()\n'
    output = rewritten(tmp_path, source, schedule + lines)
    assert "+        self.mlp = CheckpointedNew(d=d)\n" in changed_lines(output)
    ast.parse(next(text for name, text in output.files.items() if name.startswith("source_")))


KEPT = """\
class Inner(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale = 1.0
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu()) * self.scale


class Outer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.inner = Inner(d)
        self.inner.AFTERWARDS

    def forward(self, x):
        return self.inner(x)


"""


def outers(afterwards: str) -> str:
    """A model of two modules that do something to what they hold, after it was made."""
    return (
        HEAD
        + KEPT.replace("AFTERWARDS", afterwards)
        + model_of(
            "        self.outers = nn.ModuleList([Outer(d) for _ in range(2)])\n",
            "        for outer in self.outers:\n            x = outer(x)\n        return x\n",
        )
    )


@pytest.mark.parametrize(
    ("afterwards", "lost"),
    [
        ("scale = 2.0", "its `scale` is 1.0 there, and was 2.0"),
        ("norm.eps = 0.5", "its `eps` is 1e-05 there, and was 0.5"),
        ("norm.bias = None", "its `bias` is back there"),
        ("norm = nn.Identity()", "`outers.0.inner.norm` is a `LayerNorm`, not a `Identity`"),
        ("norm.register_full_backward_hook(print)", "it does not have the hooks there"),
        ("norm.bias = self.inner.norm.weight", "are no longer one parameter there"),
    ],
)
def test_what_is_made_again_would_lose_what_was_done_to_it(afterwards, lost, tmp_path):
    schedule = SCHEDULE + '    s["outers.0.inner"].checkpoint()\n'
    assert lost in refused(tmp_path, outers(afterwards), schedule, "SR305")


def test_hooks_that_transformers_puts_on_as_a_model_runs_are_not_lost():
    """The original ran, and the output did not yet; ColPali asks for what they collect."""
    model = BertModel(BertConfig(num_hidden_layers=1, hidden_size=12, intermediate_size=12)).eval()
    layer = model.encoder.layer[0]
    layer.register_forward_hook(lambda *of: None)
    model(torch.ones(1, 2, dtype=torch.long), output_hidden_states=True)
    assert len(layer._forward_hooks) == 2 > hooks_on(layer, "_forward_hooks") == 1


NORMS = SCHEDULE.replace("\n\n\ndef", "\n\n\nclass Norm(nn.LayerNorm):\n    pass\n\n\ndef", 1)


def inner_outers(afterwards: str) -> str:
    """The model, where the class that holds `norm` does something to it itself."""
    source = outers("calls = 0")
    return source.replace(
        "self.up = nn", f"norm = self.norm\n        {afterwards}\n        self.up = nn"
    )


SET = {
    "its `eps` is 1e-05 there, and was 0.5": "norm.eps = 0.5",
    "its `scale` is None there": 'norm.register_buffer("scale", torch.ones(2), False)',
}


@pytest.mark.parametrize("by_others", [False, True], ids=["itself", "around"])
@pytest.mark.parametrize("lost", SET)
def test_a_replacement_would_lose_what_was_set(lost, by_others, tmp_path):
    """Of some instances alone, in a subclass, which comes after; of all it stands before."""
    source = inner_outers("" if by_others else SET[lost])
    if by_others:
        source = source.replace(
            "self.inner.calls = 0", f"norm = self.inner.norm\n        {SET[lost]}"
        )
    schedule = NORMS + '    s["outers.0.inner.norm"].replace(Norm)\n'
    assert lost in refused(tmp_path, source, schedule, "SR305")
    rewritten(tmp_path, source, schedule.replace("outers.0", "outers.*"))


def test_a_replacement_by_other_names_would_not_be_frozen(tmp_path):
    new = """\
class Named(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.scale, self.shift)
"""
    schedule = SCHEDULE.replace("\n\n\ndef", f"\n\n\n{new}\n\ndef", 1)
    weights = '{"scale": "weight", "shift": "bias"}'
    schedule += f'    s["outers.0.inner.norm"].replace(Named, weights={weights})\n'
    source = inner_outers("norm.bias.requires_grad_(False)")
    assert "`shift` is not frozen" in refused(tmp_path, source, schedule, "SR305")


def test_what_is_made_again_stays_frozen(tmp_path):
    schedule = SCHEDULE + '    split(s["outers.0.inner"])\n'
    source = outers("requires_grad_(False)")
    model = imported(written(tmp_path, rewritten(tmp_path, source, schedule))).Model()
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_replacement_that_another_element_gets_is_refused(tmp_path):
    constructor = (
        "        layers = [MLP(d) for _ in range(3)]\n        layers.insert(0, MLP(d))\n"
        "        self.layers = nn.ModuleList(layers)\n"
    )
    forward = "        for layer in self.layers:\n            x = layer(x)\n        return x\n"
    new = MLP.replace("class MLP", "class Other")
    schedule = SCHEDULE.replace("\n\n\ndef model", f"\n\n\n{new}def model")
    schedule += '    s["layers.3"].replace(Other)\n'
    source = HEAD + MLP + model_of(constructor, forward)
    text = refused(tmp_path, source, schedule, "SR103")
    assert "elements of `layers.*` differ, and nothing counts them" in text
