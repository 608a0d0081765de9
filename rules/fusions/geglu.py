"""A gated linear unit with GELU, in one kernel."""

from collections.abc import Mapping

from slapo_rewrite.rules.fusions.gelu_tanh import factored, without_a_power, written_out
from slapo_rewrite.rules.fusions.swiglu import gated_by, gating
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
from slapo_rewrite.runtime.kernels.gated import geglu


def gelu(gate: Tensor) -> Tensor:
    return F.gelu(gate)


def gelu_tanh(gate: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh")


# The kernel's argument for each.
APPROXIMATE = {
    gelu: None,
    **dict.fromkeys((gelu_tanh, written_out, without_a_power, factored), '"tanh"'),
}
PATTERNS = {
    pattern: told for activation, told in APPROXIMATE.items() for pattern in gated_by(activation)
}

MODEL = """\
from torch import nn
from torch.nn import functional as F


class DenseGated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wi_0 = nn.Linear(width, 4 * width)
        self.wi_1 = nn.Linear(width, 4 * width)
        self.wo = nn.Linear(4 * width, width)
        self.act = nn.GELU(approximate="tanh")
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        hidden_gelu = self.act(self.wi_0(x))
        hidden_linear = self.wi_1(x)
        x = hidden_gelu * hidden_linear
        x = self.dropout(x)
        return self.wo(x)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.DenseGated(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("geglu")
"""


class Geglu(Rule):
    """Multiply by GELU of a gate in one kernel, forward and backward, with dropout of the product.

    Rewrite:
        self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        -->
        self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), "tanh", activation=self.act_fn))

    Shapes: gate and up (..., F) -> (..., F)

    Numerics:
        Reseeded: on a GPU dropout of the product draws other numbers; without it, float32 inside,
        rounded once. On a CPU the same operations as before, except for a written-out GELU.

    State: Unchanged.
    Raises: SR309 another activation, or the activated gate is used elsewhere too.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    name = "geglu"
    numerics = Numerics.RESEEDED
    conditions = BY_KERNEL
    pays = "reads gate and up once and keeps no activation for the backward pass"
    rank = 20
    alternatives = tuple(map(Alternative, PATTERNS))
    functions = (geglu,)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .kernels import geglu
-        hidden_gelu = self.act(self.wi_0(x))
-        x = hidden_gelu * hidden_linear
-        x = self.dropout(x)
+        x = geglu(
+            self.wi_0(x),
+            hidden_linear,
+            "tanh",
+            activation=self.act,
+            dropout=self.dropout,
+        )
""",
        ),
        Example(
            MODEL.replace('"tanh"', '"none"').replace("        x = self.dropout(x)\n", ""),
            SCHEDULE,
            """\
+from .kernels import geglu
-        hidden_gelu = self.act(self.wi_0(x))
-        x = hidden_gelu * hidden_linear
+        x = geglu(self.wi_0(x), hidden_linear, activation=self.act)
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace('GELU(approximate="tanh")', "SiLU()"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("gelu * h", "gelu + h"), SCHEDULE, "SR309"),
    )

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the kernel, as for `swiglu`."""
        return gating(geglu, self.operands(found))

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The operands, and the kind of GELU."""
        told = PATTERNS[found.alternative.pattern]
        return found.operands | ({"approximate": told} if told else {})
