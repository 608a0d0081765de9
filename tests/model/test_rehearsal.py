"""What is run before an output is written."""

import threading
import time
import types

import torch
import torch.distributed as dist
from torch import nn

from slapo_rewrite.model.rehearsal import _on_ranks, _reference


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
