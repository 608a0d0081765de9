"""What is run before an output is written."""

import types

import torch
from torch import nn

from slapo_rewrite.model.rehearsal import _reference


def test_a_schedules_loss_that_fails_leaves_outputs_and_gradients_to_compare():
    schedule = types.SimpleNamespace(
        model=lambda m: m.Linear(4, 3),
        inputs=lambda model: {"input": torch.randn(2, 4)},
        loss=lambda outputs: outputs["loss"],
    )
    reference = _reference(schedule, nn)  # type: ignore[arg-type]
    assert reference is not None
    assert reference.want.loss is None
    assert all(gradient.any() for gradient in reference.want.gradients.values())
