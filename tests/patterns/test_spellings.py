"""A computation is matched in every spelling."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_rewrite.model.node_facts import NodeFacts
from slapo_rewrite.patterns.canonical_ops import by_module
from slapo_rewrite.patterns.search import scopes_of
from tests.finding import HEAD, forward, selection

INIT = """
self.gelu = nn.GELU()
self.tanh_gelu = nn.GELU(approximate="tanh")
self.relu = nn.ReLU()
self.soft = nn.Softmax(dim=-1)
self.drop = nn.Dropout(0.1)
self.norm = nn.LayerNorm(4)
self.fc = nn.Linear(4, 4)
self.plain = nn.Linear(4, 4, bias=False)
self.act = F.silu
self.part = partial(F.gelu, approximate="tanh")
self.none = nn.Identity()
self.layers = nn.ModuleList([nn.Linear(4, 4)])
self.scale = 0.5
"""

# Expressions of one line are one computation.
# fmt: off
SAME = [
    ["F.gelu(x)", "nn.functional.gelu(x)", "torch.nn.functional.gelu(input=x)", "self.gelu(x)",
     "nn.GELU()(x)", "g(x)", "F.gelu(x, approximate='none')", "F.gelu(self.none(x))"],
    ["F.gelu(x, approximate='tanh')", "self.tanh_gelu(x)", "nn.GELU('tanh')(x)", "self.part(x)"],
    ["F.relu(x)", "torch.relu(x)", "x.relu()", "self.relu(x)", "nn.ReLU()(x)", "F.relu(x, False)"],
    ["F.silu(x)", "self.act(x)", "nn.SiLU()(x)", "getattr(self, 'act')(x)"],
    ["x + y", "y + x", "torch.add(x, y)", "x.add(y)", "torch.add(input=x, other=y, alpha=1)"],
    ["x - y", "torch.sub(x, y)", "x.sub(y)", "torch.subtract(x, y)"],
    ["x * y", "torch.mul(y, x)", "x.multiply(y)"],
    ["x / y", "torch.div(x, y)", "x.true_divide(y)"],
    ["x @ y", "torch.matmul(x, y)", "x.matmul(y)", "x.matmul(other=y)"],
    ["x ** 2", "x.pow(2)", "torch.pow(x, 2)", "torch.square(x)", "x.square()", "x ** 2.0"],
    ["x == y", "torch.eq(y, x)", "x.eq(y)"],
    ["x < y", "y > x", "torch.lt(x, y)", "torch.gt(y, x)", "y.greater(x)"],
    ["-x", "torch.neg(x)", "x.neg()", "x.negative()"],
    ["F.softmax(x, dim=-1)", "x.softmax(-1)", "torch.softmax(x, -1)", "self.soft(x)",
     "torch.softmax(x, dim=-1, dtype=None)", "F.softmax(x, -1, 3, None)"],
    ["F.dropout(x, 0.1, self.training)", "self.drop(x)",
     "F.dropout(x, p=0.1, training=self.training)",
     "torch.dropout(x, 0.1, self.training)", "torch.dropout(x, p=0.1, train=self.training)"],
    ["F.linear(x, self.fc.weight, self.fc.bias)", "self.fc(x)", "self.fc(input=x)",
     "F.linear(bias=self.fc.bias, weight=self.fc.weight, input=x)"],
    ["F.linear(x, self.plain.weight)", "self.plain(x)", "F.linear(x, self.plain.weight, None)"],
    ["F.layer_norm(x, (4,), self.norm.weight, self.norm.bias)", "self.norm(x)",
     "torch.layer_norm(x, (4,), self.norm.weight, self.norm.bias, 1e-5)",
     "F.layer_norm(x, [4], weight=self.norm.weight, bias=self.norm.bias, eps=1e-05)"],
    ["x.transpose(1, 2)", "torch.transpose(x, 2, 1)", "x.swapaxes(1, 2)",
     "x.transpose(dim0=1, dim1=2)"],
    ["x.view(2, -1)", "x.view((2, -1))", "x.view([2, -1])", "x.view(size=(2, -1))"],
    ["x.permute(0, 2, 1)", "torch.permute(x, (0, 2, 1))", "x.permute([0, 2, 1])"],
    ["x.float()", "x.to(torch.float32)", "x.to(dtype=torch.float)", "x.type(torch.float32)"],
    ["x.size(1)", "x.shape[1]", "x.size()[1]", "x.size(dim=1)"],
    ["x.mean(-1, keepdim=True)", "torch.mean(x, dim=-1, keepdim=True)",
     "x.mean(dim=-1, keepdim=True)"],
    ["x * math.sqrt(4.0)", "x * 2.0", "x * (1 + 1)", "2 * x"],
    ["torch.cat((x, y), dim=-1)", "torch.cat([x, y], -1)", "torch.concat(tensors=[x, y], dim=-1)"],
    ["torch.sigmoid(x)", "x.sigmoid()", "F.sigmoid(x)"],
]
DIFFERENT = [
    ["x - y", "y - x"],
    ["x / y", "y / x", "x // y"],
    ["x @ y", "y @ x", "x * y"],
    ["F.gelu(x)", "F.gelu(x, approximate='tanh')", "F.silu(x)", "my_gelu(x)", "self.gelu(y)"],
    ["torch.add(x, y)", "torch.add(x, y, alpha=2)", "torch.add(y, x, alpha=2)"],
    ["F.softmax(x, dim=-1)", "F.softmax(x, dim=1)", "x.softmax(-1, dtype=torch.float32)"],
    ["self.drop(x)", "F.dropout(x, 0.1)", "F.dropout(x, 0.2, self.training)"],
    ["self.fc(x)", "self.plain(x)", "self.layers[0](x)"],
    ["x ** 2", "x ** 3", "2 ** x"],
    ["x.transpose(1, 2)", "x.transpose(-1, -2)", "x.transpose(0, 1)"],
    ["x * 1", "x * True"],
    ["x.to(y.dtype)", "x.to(y.device)", "x.to('cpu')", "x.type_as(y)"],
    ["x.mean(-1)", "x.mean(-1, keepdim=True)"],
]
# fmt: on


BEFORE = """\
from functools import partial

from torch.nn.functional import gelu as g


def my_gelu(x):
    return x.tanh()


"""


def result(expression: str, folder: Path, text: str = "return {}"):
    """The value that a `forward` returns, and its graph."""
    s = selection(folder, BEFORE + forward(text.format(expression), init=INIT))
    scope = scopes_of("", NodeFacts(s._nodes[0], s._plan.sources))[0]
    return scope.graph.returned[0], scope.graph


def shape_of(value):
    """A value as nested tuples, commutative operands in one order."""
    if value.inner is not None:
        return shape_of(value.inner)
    if value.is_leaf:
        literal = value.literal
        return value.operation, repr(float(literal) if type(literal) is int else literal)
    inner = [(name, shape_of(v)) for name, v in value.arguments]
    if value.commutes:
        inner[:2] = sorted((s for _, s in inner[:2]), key=repr)
    return value.operation, value.literal, tuple(inner)


@pytest.mark.parametrize("spellings", SAME, ids=lambda spellings: spellings[0])
def test_same(tmp_path, spellings):
    shapes = {spelling: shape_of(result(spelling, tmp_path)[0]) for spelling in spellings}
    first = shapes[spellings[0]]
    assert {s: shape for s, shape in shapes.items() if shape != first} == {}


@pytest.mark.parametrize("spellings", DIFFERENT, ids=lambda spellings: spellings[0])
def test_different(tmp_path, spellings):
    shapes = [shape_of(result(spelling, tmp_path)[0]) for spelling in spellings]
    for one, other in itertools.combinations(range(len(shapes)), 2):
        assert shapes[one] != shapes[other], (spellings[one], spellings[other])


# Programs -------------------------------------------------------------------------------------

# Each operation: how a pattern spells it, and how a model may.
SPELLED = {
    "add": ("{} + {}", ["{} + {}", "torch.add({}, {})", "{}.add({})"]),
    "mul": ("{} * {}", ["{} * {}", "torch.mul({}, {})", "torch.multiply({}, other={})"]),
    "sub": ("{} - {}", ["{} - {}", "torch.sub({}, {})"]),
    "matmul": ("{} @ {}", ["{} @ {}", "torch.matmul({}, {})", "{}.matmul({})"]),
    "gelu": ("F.gelu({})", ["self.gelu({})", "nn.functional.gelu(input={})", "nn.GELU()({})"]),
    "relu": ("torch.relu({})", ["F.relu({})", "self.relu({})", "{}.relu()"]),
    "tanh": ("torch.tanh({})", ["{}.tanh()", "F.tanh({})"]),
    "half": ("{} * 0.5", ["0.5 * {}", "torch.mul({}, 1 / 2)"]),
    "turn": ("{}.transpose(1, 2)", ["torch.transpose({}, 2, 1)", "{}.transpose(dim1=2, dim0=1)"]),
}
COMMUTATIVE = {"add", "mul"}
ONE_OPERAND = {"gelu", "relu", "tanh", "half", "turn"}
OPERANDS = ("x", "y", "z")


@dataclass(frozen=True)
class Tree:
    operation: str
    operands: tuple[Tree | str, ...]

    def text(self) -> str:
        parts = [o if isinstance(o, str) else o.text() for o in self.operands]
        return f"({SPELLED[self.operation][0].format(*parts)})"

    def names(self) -> set[str]:
        inner = (o if isinstance(o, str) else o.names() for o in self.operands)
        return {name for names in inner for name in names}


def node(children):
    one = st.builds(lambda o, a: Tree(o, (a,)), st.sampled_from(sorted(ONE_OPERAND)), children)
    binary = st.sampled_from(sorted(SPELLED.keys() - ONE_OPERAND))
    two = st.builds(lambda o, a, b: Tree(o, (a, b)), binary, children, children)
    return one | two


TREES = node(st.recursive(st.sampled_from(OPERANDS), node, max_leaves=5))


class Writer:
    """Writes a tree as the body of a `forward`, as the data says: no two need look alike."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.lines, self.live = data, [], set()

    def draw(self, *choices):
        return self.data.draw(st.sampled_from(choices))

    def write(self, tree: Tree | str) -> str:
        if isinstance(tree, str):
            return tree
        operands = list(tree.operands)
        if tree.operation in COMMUTATIVE and self.draw(True, False):
            operands.reverse()
        texts = [self.write(o) for o in operands]
        text = f"({self.draw(*SPELLED[tree.operation][1]).format(*texts)})"
        if self.draw(True, False):
            self.unrelated()
            self.live -= set(re.findall(r"\w+", text))  # what was read may be bound again
            name = self.draw(*sorted(set("abcdefghij") - self.live))
            self.live.add(name)
            self.lines.append(f"{name} = {text}")
            return name
        return text

    def unrelated(self) -> None:
        self.lines += self.draw(
            [],
            ["u = w * 2"],
            ["if w is None:", "    u = 1", "else:", "    u = 2"],
            ["for u in range(2):", "    w = w + u"],
            ["u = self.fc(w)", "w[0] = 3"],
        )

    def body(self, tree: Tree) -> str:
        last = self.write(tree)
        return "\n".join([*self.lines, f"return {last}, w"])


def function(folder: Path, tree: Tree) -> FunctionType:
    """The pattern that a tree is."""
    path = folder / "wanted.py"
    parameters = ", ".join(sorted(tree.names()))
    path.write_text(f"{HEAD}def wanted({parameters}):\n    return {tree.text()}\n")
    spec = importlib.util.spec_from_file_location("wanted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.wanted


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TREES, st.data())
def test_a_program_is_found_however_it_is_written(tree, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        body = Writer(data).body(tree)
        init = "self.gelu = nn.GELU()\nself.relu = nn.ReLU()\nself.fc = nn.Linear(4, 4)"
        s = selection(folder, forward(body, "self, x, y, z, w", init))
        found = s.find(function(folder, tree))
        assert len(found) >= 1, f"{body}\n{found}"


# Arguments that only say how large a module's tensors are, where they lie or how they begin.
SIZES = {
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "kernel_size",
    "num_channels",
}
SIZES |= {"num_embeddings", "embedding_dim", "elementwise_affine", "affine", "device", "dtype"}
SIZES |= {"_weight", "_freeze"}


@pytest.mark.parametrize("cls", by_module())
def test_every_option_of_a_module_is_known(cls):
    """One that is not would be taken for the default, whatever it is."""
    known = by_module()[cls]
    made = getattr(torch.nn, cls.rpartition(".")[2])
    given = {n for n in inspect.signature(made).parameters if n not in ("args", "kwargs")}
    older = {"min_value", "max_value"}  # names for `min_val` and `max_val` that torch warns of
    assert given <= {*known.names, *(n for n, _ in known.only), *SIZES, *older}
