"""Models that resemble what rules match: the result gives the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.rewriting import refused, rewritten, written
from tests.rules.alike import SCHEDULE, built, hold_alike, model, same

TWO_ACTIVATIONS = model(
    "return self.second(self.first(x)),",
    'self.first, self.second = MLP("gelu"), MLP("relu")',
    classes="""\
ACT = {"relu": nn.ReLU(), "gelu": nn.GELU()}


class MLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = ACT[act]

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))""",
)


NESTED = TWO_ACTIVATIONS.replace(
    'MLP("gelu"), MLP("relu")', 'Block("gelu"), Block("relu")'
).replace(
    "class Model(",
    """class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.mlp = MLP(act)

    def forward(self, x):
        return x + self.mlp(x)


class Model(""",
)


def test_two_activations_two_classes_down(tmp_path):
    text = same(tmp_path, NESTED)
    assert "self.mlp = FusedMLP(act)" in text and "class FusedBlock(Block)" in text


def test_two_activations_in_one_class(tmp_path):
    text = same(tmp_path, TWO_ACTIVATIONS)
    assert "return self.fc2(self.act(self.fc1(x)))" in text
    assert "class FusedMLP(MLP)" in text


LAYERS = ("self.l, self.n = nn.Linear(8, 8), nn.LayerNorm(8)",)
GELU, NORM = "return (F.gelu(self.l(x)),)", "return (self.n(x + self.l(x)),)"
LOSS = "o = self.l(x)\nlabels = torch.arange(6) % 8\n"
LOSS += "loss = self.f(o.view(-1, o.size(-1)), labels.view(-1))\nreturn (loss,)"
PRUNED = "from torch.nn.utils import prune\nprune.identity(self.l, 'weight')"
ROTARY = """\
def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def turned(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin"""
TURNING = "q = self.l(x)[:, None, :, :7]\ncos, sin = torch.rand(2, 1, 3, {}).double()\n"
TURNING += "return turned(q, 2 * q, cos, sin)"
MODELS = {
    "a head of an odd size": model(TURNING.format(7), *LAYERS, classes=ROTARY),
    "one angle for all of a head": model(TURNING.format(1), *LAYERS, classes=ROTARY),
    "weights of classes": model(LOSS, *LAYERS, "self.f = nn.CrossEntropyLoss(torch.arange(8.0))"),
    "a sum over classes": model(LOSS, *LAYERS, 'self.f = nn.CrossEntropyLoss(reduction="sum")'),
    "a bias that is written to": model(
        "h = self.l(x)\nself.l.bias.data.mul_(2)\nreturn (F.gelu(h),)", *LAYERS
    ),
    "a layer that is another then": model(
        "h = self.l(x)\nself.l = self.m\nreturn (F.gelu(h),)", *LAYERS, "self.m = nn.Linear(8, 8)"
    ),
    "a layer without gradients": model(
        "with torch.no_grad():\n    h = self.l(x)\nreturn (F.gelu(h) + x,)", *LAYERS
    ),
    "a value added to itself": model("h = self.l(x)\nreturn (self.n(h + h),)", *LAYERS),
    "a value added to itself in place": model(
        "h = self.l(x)\nh += h\nreturn (self.n(h),)", *LAYERS
    ),
    "a dropped value and itself": model(
        "h = self.l(x)\nreturn (self.n(F.dropout(h, 0.1) + h),)", *LAYERS
    ),
    **{
        f"{name}, {what}": model(forward, *LAYERS, text)
        for what, forward in (("gelu", GELU), ("norm", NORM))
        for name, text in {
            "spectral_norm": "nn.utils.spectral_norm(self.l)",
            "parametrized": "nn.utils.parametrizations.weight_norm(self.l)",
            "bias parametrized": "nn.utils.parametrizations.weight_norm(self.l, 'bias', None)",
            "pruned": f"{PRUNED}\nself.l.weight_mask[0] = 0",
            "a hook": "self.l.register_forward_hook(lambda m, a, o: 2 * o)",
            "a hook before": "self.l.register_forward_pre_hook(lambda m, a: (2 * a[0],))",
            "a hook behind": "self.l.register_full_backward_hook(lambda m, i, o: (2 * i[0],))",
            "a forward of its own": "self.l.forward = lambda x: 2 * x + self.l.weight.sum()",
            "a hook of the norm": "self.n.register_forward_hook(lambda m, a, o: 2 * o)",
            "a parametrized norm": "nn.utils.parametrizations.weight_norm(self.n, dim=None)",
        }.items()
    },
    "a sum that is deleted": model("y = x + self.l(x)\nz = self.n(y)\ndel y\nreturn (z,)", *LAYERS),
    "what is deleted later": model(
        "y = x + self.l(x)\nz = self.n(y)\nz = z * y\ndel y\nreturn (z,)", *LAYERS
    ),
    "a residual that is a number": model(
        "return (self.part(self.l(x)),)",
        *LAYERS,
    )
    + """
    def part(self, y, more=1.0):
        return self.n(more + y)
""",
    "modules in a row": model(
        "return (self.s(x),)", "self.s = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5))"
    ),
    "an activation that is altered": model(
        "act = nn.ELU()\nact.alpha = 0.5\nact.inplace = True\nreturn (act(self.l(x)),)", *LAYERS
    ),
    "dropout that is switched off": model(
        "drop = nn.Dropout(0.5)\ndrop.eval()\nreturn (x + drop(self.l(x)),)", *LAYERS
    ),
    "an `elif` lies between": model(
        "x = x + self.l(x)\nif self.kind == 1:\n    x = x * 2\n"
        "elif self.kind == 2:\n    x = x * 3\nreturn self.n(x)",
        *LAYERS,
        "self.kind = 0",
    ),
    "a method leaves something on the module": model(
        "y = x + self.part(x)\nreturn self.n(y) + y",
        *LAYERS,
        "self.seen = None",
    )
    + """
    def part(self, x):
        self.seen = None if self.seen is None else x.detach()
        return self.l(x)
""",
}


@pytest.mark.parametrize("source", MODELS.values(), ids=list(MODELS))
def test_numbers(source, tmp_path):
    same(tmp_path, source)


def test_annotations_are_what_the_file_makes_of_them(tmp_path):
    """The tool's own files have them as text: what it runs must not."""
    kind = "    def __init_subclass__(cls):\n        assert cls.__annotations__['kind'] is int"
    source = model("return self.n(x + self.l(x))", *LAYERS, classes=f"class Base:\n{kind}")
    source = source.replace(
        "class Model(nn.Module):", "class Model(nn.Module, Base):\n    kind: int\n"
    )
    assert "add_layer_norm" in same(tmp_path, source)


HOOK = "register_forward_hook(lambda m, a, o: 2 * o)"
UNCALLED = {
    "decompose": (model(GELU, *LAYERS, f"self.l.{HOOK}"), 's["l"].decompose()', "SR305"),
    "inline": (
        model("x = self.inner(x)\nreturn x,", "self.inner = Inner()", f"self.inner.{HOOK}")
        + "\n\nclass Inner(nn.Module):\n    def forward(self, x):\n        return 3 * x\n",
        's.inline("inner")',
        "SR305",
    ),
    "packing": (
        model(
            "gate = self.gate(x)\nup = self.up(x)\nreturn F.silu(gate) * up,",
            "self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)",
            f"self.up.{HOOK}",
        ),
        's.apply("pack_gate_up")',
        "SR309",
    ),
}


@pytest.mark.parametrize(("source", "line", "code"), UNCALLED.values(), ids=list(UNCALLED))
def test_a_module_that_has_to_be_called(source, line, code, tmp_path):
    schedule = SCHEDULE.replace("s.apply_all()", line)
    assert "has hooks" in refused(tmp_path, source, schedule, code)


class Adapter(nn.Module):
    """A layer of low rank beside another, as LoRA has it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(8, 2, dtype=torch.float64)
        self.up = nn.Linear(2, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)


def adapted(module) -> None:
    torch.manual_seed(1)
    module.l = Adapter(module.l)


def replaced(module) -> None:
    forward = module.l.forward
    module.l.forward = lambda x: 2 * forward(x)


# How the output takes a layer of which it reads parameters.
NOTICED = (
    *("is_plain(self.l)", "linear_product(x, self.l)", "(x, self.l"),
    *("linear=self.l", "norm=self.l", "layer=self.l", "activation=self.l", "dropout=self.l"),
)
# What is done to a layer after the model was made.
LATER = {
    "an adapter": adapted,
    "a hook": lambda module: module.l.register_forward_hook(lambda m, a, o: 2 * o),
    "a hook before": lambda module: module.l.register_forward_pre_hook(lambda m, a: (2 * a[0],)),
    "a forward": replaced,
    "a parametrization": lambda module: nn.utils.parametrizations.weight_norm(module.l, dim=None),
}
LOSS_LATER = model(LOSS, *LAYERS, "self.f = nn.CrossEntropyLoss()")
LAST = (*LAYERS, "self.l, self.n = self.n, self.l")
ACTIVATED = ("self.l, self.n = nn.GELU(), nn.Linear(8, 8)",)
GATED = 's.apply("geglu")'
DROPPED = ("self.l, self.n, self.m = nn.Dropout(0.5), nn.Linear(8, 8), nn.LayerNorm(8)",)
GOES_ON = "x = x + self.n(x)\nreturn self.l(x), x"
RMS = """\
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + 1e-6)).to(x.dtype)"""
FUSED = {
    "gelu": (model(GELU, *LAYERS), "s.apply_all()"),
    "norm": (model(NORM, *LAYERS), "s.apply_all()"),
    "dropped": (model("return (x + F.dropout(self.l(x), 0.1),)", *LAYERS), "s.apply_all()"),
    "activated": (model("return (F.dropout(F.relu(self.l(x)), 0.1),)", *LAYERS), "s.apply_all()"),
    "layer norm": (model("return (self.l(x + self.n(x)),)", *LAST), "s.apply_all()"),
    "layer norm of a sum that goes on": (model(GOES_ON, *LAST), "s.apply_all()"),
    "root mean square norm": (
        model(GOES_ON, "self.n, self.l = nn.Linear(8, 8), Norm()", classes=RMS),
        's.apply("residual_rms_norm")',
    ),
    "activation": (model("return (self.l(self.n(x)),)", *ACTIVATED), "s.apply_all()"),
    "activation that is gated": (model("return (self.l(x) * self.n(x),)", *ACTIVATED), GATED),
    "activation, dropped": (
        model("return (F.dropout(self.l(x), 0.1),)", *ACTIVATED),
        "s.apply_all()",
    ),
    "dropout": (model("return (x + self.l(self.n(x)),)", *DROPPED), "s.apply_all()"),
    "dropout, normed": (
        model("return (self.m(x + self.l(self.n(x))),)", *DROPPED),
        "s.apply_all()",
    ),
    "dropout of an activation": (
        model("return (self.l(F.relu(self.n(x))),)", *DROPPED),
        "s.apply_all()",
    ),
    "loss alone": (LOSS_LATER, 's.apply("linear_cross_entropy")'),
    "decomposed": (model("return (self.l(x).relu(),)", *LAYERS), 's["l"].decompose()'),
    "loss": (LOSS_LATER.replace("(loss,)", "(loss, o)"), 's.apply("linear_cross_entropy")'),
}


@pytest.fixture(scope="module")
def fused_model(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """Rewrites one of `FUSED`, once for all that is put on it: where, and the model file."""

    @functools.cache
    def of(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("fused")
        source, line = FUSED[name]
        schedule = SCHEDULE.replace("s.apply_all()", line)
        if "cross" in line:
            schedule = schedule.replace(
                "sum(output.pow(3).mean() for output in outputs)", "outputs[0]"
            )
        output = rewritten(folder, source, schedule)
        assert any(each in output.files[output.model_file] for each in NOTICED)
        return folder, written(folder, output)

    return of


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("fused", FUSED)
def test_what_is_put_around_a_layer_later(fused, later, fused_model):
    if later == "a parametrization" and fused.startswith(("activation", "dropout")):
        pytest.skip("it has no parameter")
    *models, given = built(*fused_model(fused))
    for module in models:
        LATER[later](module)
    hold_alike(*models, given)


PAIR = "self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)"
USUAL = "return F.silu(self.gate(x)) * self.up(x)"
APART = {
    "share a weight": (USUAL, "self.up.weight = self.gate.weight"),
    "some are frozen": (USUAL, "self.up.bias.requires_grad_(False)"),
    "`gate` gives is written to": (
        "g = self.gate(x)\ng *= 2\nreturn F.silu(g) * self.up(x)",
        "pass",
    ),
    "`up` gives is written to": ("u = self.up(x)\nreturn F.silu(self.gate(x)) * u.relu_()", "pass"),
    "`stride` depends on the memory layout of what `up` gives": (
        "g, u = self.gate(x), self.up(x)\nreturn F.silu(g) * u * u.stride(0)",
        "pass",
    ),
    "may turn gradients off": (
        "g = self.gate(x)\ntorch.set_grad_enabled(False)\nreturn F.silu(g) * self.up(x)",
        "pass",
    ),
    "has a hook": (USUAL, "self.up.weight.register_hook(lambda g: 2 * g)"),
    "is written to between": (
        "y = x * 1\ng = self.gate(y)\ny.mul_(2)\nreturn F.silu(g) * self.up(y)",
        "pass",
    ),
}


@pytest.mark.parametrize("words", APART)
def test_layers_that_cannot_be_packed(words, tmp_path):
    forward, init = APART[words]
    inner = model(forward, PAIR, init).partition("class Model")[2]
    source = model("return (self.inner(x),)", "self.inner = Inner()", classes=f"class Inner{inner}")
    schedule = SCHEDULE.replace("s.apply_all()", 's.apply("pack_gate_up")')
    assert words in refused(tmp_path, source, schedule, "SR309")


def test_a_packed_layer_that_is_read_by_its_name(tmp_path):
    forward = "return F.silu(self.gate(x)) * self.up(x) + getattr(self, 'up').weight.sum()"
    inner = model(forward, PAIR).partition("class Model")[2]
    source = model("return (self.inner(x),)", "self.inner = Inner()", classes=f"class Inner{inner}")
    schedule = SCHEDULE.replace("s.apply_all()", 's.apply("pack_gate_up")')
    assert "`self.up` is read here" in refused(tmp_path, source, schedule, "SR305")


def test_names_that_only_the_old_text_read(tmp_path):
    forward = """\
import operator
norm = self.n
layer = self.l
seen = layer.in_features
return norm(operator.add(x, self.l(x))), layer(x) * seen"""
    text = same(tmp_path, model(forward, *LAYERS))
    assert "add_layer_norm" in text and "layer = self.l" in text and "seen = layer" in text
    assert "norm = " not in text.replace("norm=", "") and "operator" not in text


KEPT = {
    "bias_gelu": "h = self.l(x)\ny = F.gelu(h + self.n.bias)\nh.mul_(2)\nreturn y, h",
    "reglu": "g = self.l(x)\ny = F.relu(g) * x\ng += 1\nreturn y, g",
    "dropout_residual": "y = x * 1\nz = y + F.dropout(self.l(x), 0.5)\ny[0] = 0\nreturn z, y",
}


@pytest.mark.parametrize("rule", KEPT)
def test_what_a_kernel_keeps_must_stay(rule, tmp_path):
    schedule = SCHEDULE.replace("s.apply_all()", f's.apply("{rule}")')
    said = refused(tmp_path, model(KEPT[rule], *LAYERS), schedule, "SR309")
    assert "is written to later, but the kernel keeps it" in said


def test_two_streams_that_cross_keep_names_apart(tmp_path):
    forward = """\
y = x + self.l(x)
z = x * 2 + self.l(x * 2)
both = y * z
y = torch.relu(self.n(y))
z = torch.relu(self.n(z))
return y + both, z"""
    text = same(tmp_path, model(forward, *LAYERS))
    assert "torch.relu(normed)" in text and "torch.relu(normed_2)" in text
