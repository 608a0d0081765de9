"""GELU's approximation by a sigmoid, written out in tensor operations, in one kernel."""

import torch
from torch import Tensor

from slapo_rewrite.fusion import (
    BY_KERNEL,
    Alternative,
    Calling,
    Example,
    Numerics,
    Refusal,
    Rule,
    RuleMatch,
)
from slapo_rewrite.runtime.kernels.bias_gelu import quick_gelu


def written_out(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def called(x: Tensor) -> Tensor:
    return written_out(x)


MODEL = """\
import torch
from torch import nn


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.activation_fn = QuickGELU()
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x):
        x = self.fc1(x)
        x = self.activation_fn(x)
        return self.fc2(x)
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
    s.apply("quick_gelu")
"""


class QuickGelu(Rule):
    """Compute GELU's approximation by a sigmoid in one kernel, forward and backward.

    If an activation module computes it, the kernel's call replaces the module's, and calls the
    module if that gets hooks at run time.

    Rewrite:
        hidden_states = self.activation_fn(hidden_states)
        -->
        hidden_states = quick_gelu(hidden_states, activation=self.activation_fn)

    Shapes: x (...) -> (...)

    Numerics:
        Reassociated: float32 inside, rounded once. On a CPU the same operations as before.

    State: Unchanged: the activation holds no parameters.
    Raises: SR309 another constant, or another function.

    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2; CLIP, github.com/openai/CLIP.
    """

    name = "quick_gelu"
    numerics = Numerics.REASSOCIATED
    conditions = BY_KERNEL
    pays = "one pass over the memory in the place of three, and one tensor kept in the place of two"
    rank = 10
    alternatives = (Alternative(called),)
    functions = (quick_gelu,)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .kernels import quick_gelu
-        x = self.activation_fn(x)
+        x = quick_gelu(x, activation=self.activation_fn)
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("1.702", "1.7"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("return x * torch", "return x + torch"), SCHEDULE, "SR309"),
    )

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the kernel, with the activation module if there is one."""
        return Calling.of(quick_gelu, ("x",), ("activation",), found.operands)
