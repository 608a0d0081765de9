"""Models that look like what rules take: whatever is made of them gives the same numbers."""

from __future__ import annotations

import pytest

from tests.rules.alike import model, same

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


def test_two_activations_in_one_class(tmp_path):
    text = same(tmp_path, TWO_ACTIVATIONS)
    assert "return self.fc2(self.act(self.fc1(x)))" in text
    assert "class FusedMLP(MLP)" in text


# Models without a tool's error, a wrong name or a wrong number in what is made of them.
LAYERS = ("self.l, self.n = nn.Linear(8, 8), nn.LayerNorm(8)",)
MODELS = {
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
