"""Replaces GELU's tanh approximation, written out in tensor operations, by torch's operation."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.fusion import BY_OPERATIONS, Alternative, Example, Numerics, Refusal, Rule


def written_out(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def without_a_power(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + torch.tanh(inner))


def factored(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def one_operation(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


MODEL = """\
import math

import torch
from torch import nn


class NewGELU(nn.Module):
    def forward(self, x):
        cubic = x + 0.044715 * torch.pow(x, 3.0)
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubic))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = NewGELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))
"""
SCHEDULE = """\
import torch


def model(m):
    return m.MLP(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("gelu_tanh")
"""


class GeluTanh(Rule):
    """Compute GELU's approximation by tanh as one operation of torch.

    If an activation module computes it, the operation replaces the module's call.

    Rewrite:
        hidden_states = self.act(hidden_states)
        -->
        hidden_states = nn.functional.gelu(hidden_states, approximate="tanh")

    Shapes: x (...) -> (...)
    Numerics: Reassociated: the same formula, rounded fewer times.
    State: Unchanged: the activation holds no parameters.
    Raises: SR309 GELU by the error function, or other constants.

    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2.
    """

    name = "gelu_tanh"
    numerics = Numerics.REASSOCIATED
    conditions = BY_OPERATIONS
    pays = "one pass over the memory in the place of eight, and one tensor kept in the place of six"
    rank = 10
    alternatives = (
        Alternative(written_out, one_operation),
        Alternative(without_a_power, one_operation),
        Alternative(factored, one_operation),
    )
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
-        return self.down(self.act(self.up(x)))
+        return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("0.044715", "0.0447"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("NewGELU()", "nn.GELU()"), SCHEDULE, "SR309"),
    )
