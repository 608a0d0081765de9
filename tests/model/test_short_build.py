"""Models built again without the layers that others represent."""

import types

import pytest
from torch import nn

from slapo_rewrite.model.layer_kinds import shortened
from slapo_rewrite.model.short_build import LeftOut, Shortening, filled, full_names
from slapo_rewrite.model.tree import Tree, build_model

M = types.ModuleType("m")


class Layer(nn.Module):
    made = 0

    def __init__(self, number, width=4):
        super().__init__()
        Layer.made += 1
        self.number, self.linear = number, nn.Linear(4, width)


class Wide(Layer):
    def __init__(self, number):
        super().__init__(number, width=8)


class Model(nn.Module):
    def __init__(self, looks=False, extra=False, tied=False):
        super().__init__()
        self.first = Layer(0) if extra else nn.Linear(4, 4)
        self.layers = nn.ModuleList([Wide(n) if n == 3 else Layer(n) for n in range(9)])
        self.head = nn.Linear(4, 2)
        if looks:
            self.width = sum(layer.linear.out_features for layer in self.layers)
        if tied:
            self.layers[7].linear.weight = self.layers[8].linear.weight


def built(**options):
    def build():
        return build_model(lambda m: Model(**options), M)

    tree = Tree(build())
    short = Shortening.of(tree)
    Layer.made = 0
    return tree, short.folds, short.built(build)


def names(model):
    return {name: p.numel() for name, p in model.named_parameters()}


def test_two_of_each_kind_are_made_and_tell_of_all():
    tree, folds, model = built()
    assert folds["layers"].left == (0, 1, 3) and folds["layers"].stands_for[2:5] == (1, 2, 1)
    assert Layer.made == 3
    assert [isinstance(layer, LeftOut) for layer in model.layers] == [
        n not in (0, 1, 3) for n in range(9)
    ]
    assert full_names(names(model), folds) == names(tree.root.live)
    filled(model, folds)
    assert [type(layer) for layer in model.layers] == [type(x) for x in tree.root.live.layers]
    assert len(shortened(model, folds)["layers"]) == len(model.layers) == 3


@pytest.mark.parametrize("option", ["looks", "extra", "tied"])
def test_all_are_made_where_the_others_are_missed(option):
    """A constructor reads them, other modules are made among them, or they share parameters."""
    tree, _, model = built(**{option: True})
    assert names(model) == names(tree.root.live)


def test_classes_are_left_as_they_were():
    before = Layer.__init__, Wide.__init__
    built()
    assert (Layer.__init__, Wide.__init__) == before
    assert len(Model().layers) == 9 and not any(isinstance(x, LeftOut) for x in Model().layers)


def test_instances_of_subclasses_are_counted_with_those_of_the_class():
    """An output has a subclass for the layers that the schedule changes."""

    class Treated(Layer):
        pass

    def build():
        model = nn.Module()
        model.layers = nn.ModuleList([Treated(n) if n < 4 else Layer(n) for n in range(9)])
        return model

    folds = Shortening.of(Tree(build())).folds
    assert folds["layers"].left == (0, 1, 4, 5)
    short = Shortening(folds, {Layer: [number in (0, 1, 4, 5) for number in range(9)]})
    assert short.is_of(short.built(build))
