"""A gated linear unit with SiLU, in one kernel; code that other gated units share."""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional as F

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
from slapo_rewrite.runtime.kernels.gated import swiglu

Activation = Callable[[Tensor], Tensor]
Pattern = Callable[..., Tensor]


def gated_by(activation: Activation) -> tuple[Pattern, Pattern]:
    """The patterns of a product with an activated gate: with dropout, and without."""

    def with_dropout(gate: Tensor, up: Tensor, p: float, training: bool) -> Tensor:
        return F.dropout(activation(gate) * up, p, training)

    def without(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    return with_dropout, without


def silu(gate: Tensor) -> Tensor:
    return F.silu(gate)


def gating(kernel: Callable[..., Tensor], given: Mapping[str, str]) -> Calling:
    """The call of a gated unit's kernel."""
    return Calling.of(kernel, ("gate", "up", "approximate"), ("activation", "dropout"), given)


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
    """Multiply by SiLU of a gate in one kernel, forward and backward, with dropout of the product.

    Rewrite:
        self.down(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        -->
        self.down(swiglu(self.gate_proj(x), self.up_proj(x), activation=self.act_fn))

    Shapes: gate and up (..., F) -> (..., F)

    Numerics:
        Reseeded: on a GPU dropout of the product draws other numbers; without it, float32 inside,
        rounded once. On a CPU the same operations as before.

    State: Unchanged.
    Raises: SR309 another activation, or the activated gate is used elsewhere too.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    name = "swiglu"
    numerics = Numerics.RESEEDED
    conditions = BY_KERNEL
    pays = "reads gate and up once and keeps no activation for the backward pass"
    rank = 20
    alternatives = tuple(map(Alternative, gated_by(silu)))
    functions = (swiglu,)
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

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the kernel, with the activation and dropout modules if there are any."""
        return gating(swiglu, found.operands)
