"""What is run before an output is written."""

import threading
import time
import types

import torch
import torch.distributed as dist
from torch import nn

from slapo_rewrite.model.rehearsal import _on_ranks, _reference, _worst


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


def test_a_parameter_without_elements_is_compared():
    """Vision models that may have register tokens and have none hold such a one."""

    def made():
        model = nn.Linear(4, 3)
        model.tokens = nn.Parameter(torch.zeros(0, 3))
        model.register_forward_hook(lambda module, _, y: y + module.tokens.sum(0))
        return model

    schedule = types.SimpleNamespace(
        model=lambda m: made(),
        inputs=lambda model: {"input": torch.randn(2, 4)},
        loss=lambda outputs: outputs.square().sum(),
    )
    reference = _reference(schedule, nn)  # type: ignore[arg-type]
    assert reference is not None and reference.want.gradients["tokens"].shape == (0, 3)
    assert _worst(reference.want, reference.want)[0] == 0


def test_one_rank_computes_at_a_time():
    """Two at once fight for the interpreter, and take more time together."""
    computing = threading.Semaphore(1)

    def run(turn):
        with turn:
            total = torch.ones(1)
            for _ in range(5):
                assert computing.acquire(blocking=False)
                time.sleep(0.002)  # others would begin now
                computing.release()
                dist.all_reduce(total)
        return total

    assert _on_ranks(3, run) == [torch.tensor([243.0])] * 3
