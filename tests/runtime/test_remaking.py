"""Submodules that are made again in a subclass's constructor."""

import torch
from torch import nn

from slapo_rewrite.runtime.remaking import same_weights


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        initialise(self)


class Remade(Part):
    def __init__(self):
        super().__init__()
        with same_weights(self):
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.head = part(), nn.Linear(3, 2)
        initialise(self)


def initialise(model):
    """Each layer once, whichever model around it begins, as transformers does."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not getattr(module, "is_initialised", False):
            nn.init.normal_(module.weight)
            module.is_initialised = True


def test_what_is_made_anew_is_not_initialised_again():
    models = []
    for part in (Part, Remade):
        torch.manual_seed(0)
        models.append(Whole(part))
    wanted, found = (model.state_dict() for model in models)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
