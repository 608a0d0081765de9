"""A gated linear unit with SiLU, in one kernel."""

from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.fusion import Alternative, Example, Numerics, Refusal, Rule
from slapo_rewrite.runtime.kernels.gated import swiglu


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def fused(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(gate, up)


MODEL = """\
from torch import nn
from torch.nn import functional as F


class GatedMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 4 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        gated = F.silu(self.gate(x))
        return self.down(gated * self.up(x))
"""
SCHEDULE = """\
import torch


def model(m):
    return m.GatedMLP(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("swiglu")
"""


class Swiglu(Rule):
    """Multiply by SiLU of a gate in one kernel, forward and backward.

    Rewrite:
        self.down(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        -->
        self.down(swiglu(self.gate_proj(x), self.up_proj(x)))

    Shapes:
        gate and up (..., F) -> (..., F)

    Numerics:
        Reassociated: float32 inside, rounded once. On a CPU the same operations as before.

    State:
        Unchanged.

    Raises:
        SR309 another activation, or the activated gate is used elsewhere too.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    name = "swiglu"
    numerics = Numerics.REASSOCIATED
    pays = "reads gate and up once and keeps no activation for the backward pass"
    rank = 20
    alternatives = (Alternative(gated, fused),)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
-from torch.nn import functional as F
+from .kernels import swiglu
-        gated = F.silu(self.gate(x))
-        return self.down(gated * self.up(x))
+        return self.down(swiglu(self.gate(x), self.up(x)))
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("silu", "relu"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("gated * ", "gated + gated * "), SCHEDULE, "SR309"),
    )
