"""Our `find` on source finds what the public Slapo's finds, except its wrong matches."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

from slapo_rewrite import ModulePattern, Pattern, call_module
from tests.finding import forward, selection

LENET = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(6, 16, kernel_size=5),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.fc = nn.Linear(400, 120)
        self.relu = nn.ReLU()
        self.fc1 = nn.Linear(120, 84)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(84, 10)

    def forward(self, x):
        out = self.layer2(self.layer1(x))
        out = out.reshape(out.size(0), -1)
        out = self.fc(out)
        out = self.relu(out)
        out = self.fc1(out)
        out = self.relu1(out)
        out = self.fc2(out)
        return out
"""


def relu_add(x):
    return F.relu(x) + x


@pytest.mark.parametrize("call", ["F.relu", "self.relu", "torch.relu"])
@pytest.mark.parametrize("total", ["{} + x", "x + {}"])
def test_exact_and_as_a_module(tmp_path, call, total):
    body = f"x = self.conv(x)\nx = {total.format(f'{call}(x)')}\nreturn x"
    init = "self.conv = nn.Conv2d(3, 32, 3)\nself.relu = nn.ReLU()"
    s = selection(tmp_path, forward(body, "self, x", init))
    (match,) = s.find(relu_add)
    assert [node.operation for node in match.nodes] == ["relu", "add"]
    assert match.operands == {"x": "x"}
    assert match.calls == (["relu"] if call == "self.relu" else [])


def test_one_parameter_is_one_value(tmp_path):
    init = "self.conv = nn.Conv2d(3, 32, 3)"
    found = selection(tmp_path, forward("return F.relu(self.conv(x)) + x", "self, x", init)).find(
        relu_add
    )
    assert not found and "two different values" in found.nearest.stop.reason


def test_module_by_its_path(tmp_path):
    init = "self.relu = nn.ReLU()"
    s = selection(tmp_path, forward("return self.relu(x) + x", "self, x", init))

    def pattern(x):
        return call_module("relu", x) + x

    (match,) = s.find(pattern)
    assert match.calls == ["relu"] and match.operands == {"x": "x"}


class ReluOfNorm(Pattern):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.bn(x))


class FunctionalReluOfNorm(Pattern):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.bn(x))


class ReluOfLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 20)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.linear(x)
        x = self.relu(x)
        return x


class ReluOfPath(Pattern):
    def __init__(self):
        super().__init__()
        self.fc = ModulePattern(r"fc?")
        self.relu = nn.ReLU()

    def forward(self, out):
        out = self.fc(out)
        return self.relu(out)


@pytest.mark.parametrize("pattern", [ReluOfNorm, ReluOfNorm(), FunctionalReluOfNorm])
@pytest.mark.parametrize("path", ["layer1", "layer2"])
def test_inside_a_sequential(tmp_path, pattern, path):
    (match,) = selection(tmp_path, LENET)[path].find(pattern)
    assert match.calls == ["1", "2"] and match.path == path


def test_class_with_a_linear_of_another_size(tmp_path):
    found = selection(tmp_path, LENET).find(ReluOfLinear)
    assert [match.calls for match in found] == [["fc", "relu"], ["fc1", "relu1"]]
    assert found[1].operands["linear.weight"] == "self.fc1.weight"


def test_path_in_a_class_and_in_a_function(tmp_path):
    def pattern(x):
        x = call_module(r"fc?", x)
        return F.relu(x)

    s = selection(tmp_path, LENET)
    for wanted in (ReluOfPath, pattern):
        assert [match.calls for match in s.find(wanted)] == [["fc", "relu"], ["fc1", "relu1"]]


def test_two_paths(tmp_path):
    init = "self.fc1 = nn.Linear(10, 10)\nself.fc2 = nn.Linear(10, 10)\nself.relu = nn.ReLU()"
    body = "x1 = self.fc1(x)\nx2 = self.fc2(x)\nx = self.relu(x1 + x2)\nreturn x"

    def pattern(x1, x2):
        x = F.relu(x1 + x2)
        return x

    (match,) = selection(tmp_path, forward(body, "self, x", init)).find(pattern)
    assert match.operands == {"x1": "x1", "x2": "x2"}


def test_tree(tmp_path):
    def pattern(x, y, z):
        return (x + y) * (y - z)

    (match,) = selection(tmp_path, forward("a = x + y\nb = y - z\nc = a * b\nreturn c")).find(
        pattern
    )
    assert [node.operation for node in match.nodes] == ["add", "sub", "mul"]


def test_horizontal(tmp_path):
    source = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(32, 32)
            self.k_proj = nn.Linear(32, 32)
            self.v_proj = nn.Linear(32, 32)
            self.dropout = nn.Dropout(0.2)

        def permute(self, x):
            return x.permute(0, 2, 1, 3)

        def forward(self, x):
            q = self.permute(self.q_proj(x))
            k = self.permute(self.k_proj(x))
            v = self.permute(self.v_proj(x))
            return self.dropout(F.softmax(q * k)) * v
    """

    def pattern(x):
        x = call_module(r"[qkv]_proj", x)
        return x.permute(0, 2, 1, 3)

    found = selection(tmp_path, source).find(pattern)
    assert [match.calls for match in found] == [["q_proj"], ["k_proj"], ["v_proj"]]
    assert found.groups == [tuple(found)]
    by_path = selection(tmp_path, source).find(r"[qk]_proj")
    assert [match.calls for match in by_path] == [["q_proj"], ["k_proj"]]


DIAMOND = """
x = self.fc1(x)
y = self.fc2(y)
a = x + y
b = a * 2
b1 = {other} * 5
c = a * 3
d = b + c
return b1 + d
"""


def test_diamond(tmp_path):
    init = "self.fc1 = nn.Linear(10, 10)\nself.fc2 = nn.Linear(10, 10)"

    def shared(m, n):
        a = m + n
        return a * 2 + a * 3

    def written_twice(m, n):
        return (m + n) * 2 + (m + n) * 3

    s = selection(tmp_path, forward(DIAMOND.format(other="x"), "self, x, y", init))
    for pattern in (shared, written_twice):
        (match,) = s.find(pattern)
        assert [node.operation for node in match.nodes] == ["add", "mul", "mul", "add"]
    # Slapo finds it although the sum is used once more, where a fused function has no value for it.
    s = selection(tmp_path, forward(DIAMOND.format(other="a"), "self, x, y", init))
    found = s.find(shared)
    assert not found and "used elsewhere" in found.nearest.stop.reason


def test_data_flow_decides(tmp_path):
    def pattern(p, q):
        return F.relu(p + q)

    found = selection(tmp_path, forward("a = x + y\nb = F.relu(y)\nreturn a + b")).find(pattern)
    assert not found
