"""How a transformers model initialises its modules, found without memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slapo_rewrite.model.initial import initialises_inside

WRITES = ("normal_", "zeros_", "xavier_uniform_", "trunc_normal_", "orthogonal_")


def initialises(write, inner: bool = True) -> bool:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4)) if inner else nn.Linear(4, 4)
    (linear,) = (m for m in module.modules() if isinstance(m, nn.Linear))
    model = SimpleNamespace(_init_weights=lambda m: m is module and write(linear.weight))
    return initialises_inside(model, module)


@pytest.mark.parametrize("name", WRITES)
def test_whatever_fills_a_tensor(name):
    """Some functions of torch leave tensors without memory alone, and fill others."""
    assert initialises(getattr(nn.init, name))
    assert not initialises(getattr(nn.init, name), inner=False)


def test_what_only_reads_is_no_matter():
    assert not initialises(lambda weight: weight.std() + weight.numel())
