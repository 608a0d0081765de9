"""The module tree: paths, owners, ties, and models that cannot be built."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_rewrite import errors
from slapo_rewrite.model.tree import Tree, build_model


class Stack(nn.Sequential):
    """Has no constructor: whoever makes it makes what it holds."""


class Experts(nn.ModuleList):
    def __init__(self, count):
        super().__init__()
        for _ in range(count):
            self.append(nn.Linear(2, 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)])
        self.stack = Stack(nn.Linear(2, 2))
        self.experts = Experts(2)
        self.nothing = None
        self.again = self.stack[0]
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.again.weight
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(2))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])


@pytest.fixture
def tree():
    return Tree(build_model(lambda _: Model(), ModuleType("m")))


def test_paths_are_pytorchs_own_in_its_order(tree):
    names = [n for n, _ in tree.root.live.named_modules(remove_duplicate=False)]
    assert list(tree.nodes) == names
    assert list(tree.root.children) == ["layers", "stack", "experts", "again", "head", "scales"]


def test_owners_are_who_makes_a_module(tree):
    node = tree.nodes["layers.1.0"]
    assert (node.owner, node.relative, node.name) == (tree.root, "layers.1.0", "0")
    assert (node.parent, node.cls) == (tree.nodes["layers.1"], nn.Linear)
    assert tree.nodes["stack"].is_container
    assert tree.nodes["stack.0"].owner is tree.root
    assert not tree.nodes["experts"].is_container
    assert tree.nodes["experts.1"].owner is tree.nodes["experts"]
    assert tree.nodes["experts.1"].relative == "1"
    assert tree.nodes["scales"].is_container
    assert (tree.root.owner, tree.root.parent, tree.root.relative) == (None, None, "")


def test_parameters_and_buffers_are_a_modules_own(tree):
    assert list(tree.root.parameters) == ["scale"]
    assert list(tree.root.buffers) == ["mask"]
    assert list(tree.nodes["head"].parameters) == ["weight"]
    assert tree.root.parameters["scale"].is_meta


def test_a_shared_module_has_a_node_on_each_path(tree):
    first, second = tree.nodes["stack.0"], tree.nodes["again"]
    assert first is not second and first.live is second.live


def test_ties(tree):
    weight = ("stack.0.weight", "again.weight", "head.weight")
    assert {n: tree.ties[n] for n in weight} == dict.fromkeys(weight, weight)
    assert tree.ties["stack.0.bias"] == ("stack.0.bias", "again.bias")
    assert "layers.0.0.weight" not in tree.ties


def test_a_large_tree_takes_milliseconds():
    config = LlamaConfig(num_hidden_layers=126, hidden_size=64, intermediate_size=64, vocab_size=99)
    model = build_model(lambda _: LlamaForCausalLM(config), ModuleType("m"))
    seconds = []
    for _ in range(5):
        started = time.process_time()
        tree = Tree(model)
        seconds.append(time.process_time() - started)
    assert len(tree.nodes) == 1645
    assert min(seconds) < 0.1


def test_building_changes_no_settings():
    def make(_: ModuleType) -> nn.Module:
        torch.set_grad_enabled(False)
        return nn.Linear(2, 2)

    with torch.enable_grad():
        model = build_model(make, ModuleType("m"))
        assert torch.is_grad_enabled()
    assert model.weight.requires_grad and model.weight.is_meta
    assert not torch.ones(1).is_meta


def schedule(tmp_path: Path, text: str) -> Callable[[ModuleType], nn.Module]:
    path = tmp_path / "s.py"
    path.write_text(text)
    names: dict[str, Callable[[ModuleType], nn.Module]] = {}
    exec(compile(text, str(path), "exec"), names)
    return names["model"]


def test_a_model_that_raises_is_shown_at_the_schedules_line(tmp_path):
    make = schedule(
        tmp_path,
        "from torch import nn\n\n\ndef model(m):\n    return helper()\n\n\n"
        "def helper():\n    return nn.Linear('a', 2)\n",
    )
    with pytest.raises(errors.ModelError, match="TypeError") as caught:
        build_model(make, ModuleType("m"))
    assert str(caught.value.at).endswith("s.py:9:5")
    assert caught.value.at.text == "    return nn.Linear('a', 2)"
    assert caught.value.also == ()
    assert "s.py:9" in caught.value.render()


def test_a_model_that_reads_values_is_told_about_the_meta_device(tmp_path):
    make = schedule(tmp_path, "import torch\ndef model(m):\n    return torch.rand(1).item()\n")
    with pytest.raises(errors.ModelError) as caught:
        build_model(make, ModuleType("m"))
    assert "meta device" in caught.value.hint


@pytest.mark.parametrize(("value", "words"), [("None", "None"), ("3", "an int"), ("m", "a module")])
def test_what_is_no_module_is_refused(tmp_path, value, words):
    make = schedule(tmp_path, f"\ndef model(m):\n    return {value}\n")
    with pytest.raises(errors.ModelError, match=f"returns {words}, not") as caught:
        build_model(make, ModuleType("m"))
    assert caught.value.at.line == 2


def test_a_module_inside_itself_is_refused():
    model = nn.Sequential(nn.Sequential())
    model[0].add_module("up", model)
    with pytest.raises(errors.ModelError, match=r"`0\.up`"):
        Tree(model)


def test_a_look_up_that_raises_something_else_is_refused():
    class Configured(nn.Module):
        def __getattr__(self, name):
            return {"width": 4}[name]

    with pytest.raises(errors.ModelError, match="`Configured` raises KeyError") as caught:
        Tree(nn.Sequential(Configured()))
    assert caught.value.at is not None and "return {" in caught.value.at.text


def test_nothing_is_filled_on_the_meta_device():
    """Torch's references for that take half of the time in which a model is built."""
    filled = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            filled.append(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    def make(_: ModuleType) -> nn.Module:
        made = nn.Sequential(nn.Linear(2, 3), nn.Embedding(4, 3), nn.Conv1d(2, 2, 1))
        nn.init.xavier_normal_(made[0].weight)
        return made

    with Watch():
        build_model(make, ModuleType("m"))
    assert "aten::empty" in filled
    assert not any(name.endswith(("uniform_", "normal_")) for name in filled)
