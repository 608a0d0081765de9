"""Models that look like what rules take: whatever is made of them gives the same numbers."""

from __future__ import annotations

from tests.rules.alike import model, same

TWO_ACTIVATIONS = model(
    "return self.second(self.first(x)),",
    'self.first, self.second = MLP("gelu"), MLP("relu")',
    classes='''\
ACT = {"relu": nn.ReLU(), "gelu": nn.GELU()}


class MLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = ACT[act]

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))''',
)


def test_two_activations_in_one_class(tmp_path):
    text = same(tmp_path, TWO_ACTIVATIONS)
    assert "return self.fc2(self.act(self.fc1(x)))" in text
    assert "class FusedMLP(MLP)" in text
