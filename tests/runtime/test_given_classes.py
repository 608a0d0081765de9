"""What makes modules of another class where a class came in as a value, or is looked up."""

from __future__ import annotations

from torch import nn

from slapo_rewrite.runtime.given_classes import as_subclass


class Own(nn.Linear):
    """Another class than what it is derived from."""


class Checkpointed(nn.Linear):
    """A subclass with the same state."""


def test_only_a_module_of_the_class_itself_becomes_one_of_the_subclass():
    made, own = nn.Linear(2, 3), Own(2, 3)
    assert as_subclass(made, nn.Linear, Checkpointed) is made and type(made) is Checkpointed
    assert as_subclass(own, nn.Linear, Checkpointed) is own and type(own) is Own
