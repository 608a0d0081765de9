"""Elements of module lists that represent equal ones."""

from __future__ import annotations

import torch
from torch import nn

from slapo_rewrite.model.construction_calls import recorded
from slapo_rewrite.model.representatives import Places, Representatives, repeated
from slapo_rewrite.model.tree import Tree


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList([Layer(4) for _ in range(depth)])
        self.layers.append(Layer(8))
        self.twice = nn.ModuleList([Layer(4), Layer(4)])


def made(depth, asked=None):
    with torch.device("meta"), recorded():
        tree = Tree(Net(depth))
    return tree, Representatives(tree, asked or {})


def test_what_is_left_does_not_grow_with_layers():
    kept = []
    for depth in (3, 50):
        tree, alike = made(depth)
        with alike.reduced():
            kept.append(list(tree.nodes))
    assert len(kept[0]) == len(kept[1])
    assert "layers.0.linear" in kept[1] and "layers.1" not in kept[1] and "layers.50" in kept[1]


def test_siblings():
    _, alike = made(3)
    assert alike.siblings["layers.0"] == ("0", "1", "2")
    assert alike.siblings["layers.3"] == ("3",), "of another size"
    assert alike.siblings["twice.0"] == ("0",), "made by another expression"


def test_what_is_asked_of_an_inner_module_tells_elements_apart():
    _, alike = made(4, {"layers.1.linear": "sharded", "layers.2.linear": "sharded"})
    assert alike.siblings["layers.0"] == ("0", "3")
    assert alike.siblings["layers.1"] == ("1", "2")


def test_an_element_that_has_another_name_stands_for_itself():
    with torch.device("meta"), recorded():
        net = Net(4)
        net.last = net.layers[2]
        alike = Representatives(Tree(net), {})
    assert alike.siblings["layers.0"] == ("0", "1", "3")
    assert alike.siblings["layers.2"] == ("2",)


def test_a_list_that_holds_none_keeps_its_places():
    """A loop over it and a list of layers would end too soon, or give a layer another's."""
    with torch.device("meta"), recorded():
        net = Net(3)
        net.extra = nn.ModuleList([None, Layer(4), None])
        alike = Representatives(Tree(net), {})
    extra = net.extra[1]
    with alike.reduced(), alike.shortened():
        assert [*net.extra] == [None, extra, None]


def test_everything_is_put_back():
    tree, alike = made(3)
    paths, children = list(tree.nodes), list(tree.nodes["layers"].children)
    live = tree.root.live
    with alike.reduced(), alike.shortened():
        assert len(live.layers) == 4 and live.layers[0] is live.layers[1] is live.layers[2]
        assert list(tree.nodes["layers"].children) == ["0", "3"]
    assert list(tree.nodes) == paths
    assert list(tree.nodes["layers"].children) == children
    assert len(live.layers) == 4


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.runs = 0

    def forward(self, x, held):
        self.runs += 1
        return x + len(held)


class Growing(nn.Module):
    """Gives one layer the same list six times, which has grown by the fifth."""

    def __init__(self, grows):
        super().__init__()
        self.layer, self.grows = Counting(), grows

    def forward(self, x):
        held: list[int] = []
        for number in range(6):
            if number == 4 and self.grows:
                held.append(number)
            last = self.layer(x, held)
        return last


def test_a_layer_runs_again_where_what_it_is_given_has_changed():
    for grows, runs in ((False, 2), (True, 4)):
        model = Growing(grows)
        with repeated(model, {model.layer: Places([*range(6)])}):
            assert model(torch.zeros(1)) == grows
        assert model.layer.runs == runs
