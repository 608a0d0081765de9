"""An activation and dropout after it, in one kernel."""

from collections.abc import Callable, Mapping

from slapo_rewrite.rules.fusions import quick_gelu
from slapo_rewrite.rules.fusions.geglu import gelu, gelu_tanh
from slapo_rewrite.rules.fusions.gelu_tanh import factored, without_a_power, written_out
from slapo_rewrite.rules.fusions.reglu import relu
from slapo_rewrite.rules.fusions.swiglu import silu
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
from slapo_rewrite.runtime.kernels.bias_gelu import activation_dropout, linear_activation


def dropped(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The pattern of an activation and dropout."""

    def after(x: Tensor, p: float, training: bool) -> Tensor:
        return F.dropout(activation(x), p, training)

    return after


KINDS = {
    relu: "relu",
    silu: "silu",
    gelu: "gelu",
    **dict.fromkeys((gelu_tanh, written_out, without_a_power, factored), "gelu_tanh"),
    quick_gelu.written_out: "quick_gelu",
}


PATTERNS = {dropped(activation): kind for activation, kind in KINDS.items()}

MODEL = """\
from torch import nn


class Dense(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wi = nn.Linear(width, 4 * width)
        self.wo = nn.Linear(4 * width, width)
        self.act = nn.ReLU()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = self.wi(x)
        x = self.act(x)
        x = self.dropout(x)
        return self.wo(x)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Dense(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("activation_dropout")
"""


class ActivationDropout(Rule):
    """Compute an activation and dropout in one kernel, forward and backward, without a mask.

    The bias of a linear layer right before is added there as well, and its gradient is summed in
    the same pass. A module that gets hooks or an adapter at run time is called.

    Rewrite:
        hidden_states = self.act(hidden_states)
        hidden_states = self.dropout(hidden_states)
        -->
        hidden_states = activation_dropout(
            hidden_states, "relu", activation=self.act, dropout=self.dropout
        )

    Shapes: x (...) -> (...)

    Numerics:
        Reseeded: on a GPU dropout draws other numbers, and the activation is rounded once. On a
        CPU the same operations as before, except for a GELU that is written out.

    State: Unchanged.

    Raises:
        SR309 another activation, its result is used elsewhere too, or dropout's rate is 0.

    Source: Raffel et al. 2019, arXiv:1910.10683; Salmon et al. 2011, doi:10.1145/2063384.2063405.
    """

    name = "activation_dropout"
    numerics = Numerics.RESEEDED
    conditions = BY_KERNEL
    pays = "reads and writes once in the place of twice, and dropout keeps no mask"
    rank = 20
    alternatives = tuple(map(Alternative, PATTERNS))
    functions = (activation_dropout, linear_activation)
    examples = (
        Example(
            MODEL.replace("4 * width)\n        self.wo", "4 * width, bias=False)\n        self.wo"),
            SCHEDULE,
            """\
+from .kernels import activation_dropout
-        x = self.act(x)
-        x = self.dropout(x)
+        x = activation_dropout(x, "relu", activation=self.act, dropout=self.dropout)
""",
        ),
        Example(
            MODEL.replace("ReLU()", "GELU()"),
            SCHEDULE,
            """\
+from .kernels import linear_activation
-        x = self.wi(x)
-        x = self.act(x)
-        x = self.dropout(x)
+        x = linear_activation(
+            x, self.wi, "gelu", activation=self.act, dropout=self.dropout
+        )
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("0.1", "0.0"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("ReLU", "Mish"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("x = self.dropout(x)", "x = x + self.dropout(x)"), SCHEDULE, "SR309"),
    )

    def after_linear(self, found: RuleMatch) -> str:
        """The operand that a linear layer may produce."""
        return "x"

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the kernel, with the linear layer if there is one."""
        kernel = linear_activation if found.linear else activation_dropout
        keywords = ("activation", "dropout")
        return Calling.of(kernel, ("x", "linear", "kind"), keywords, self.operands(found))

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses dropout with a rate of 0."""
        return f"`{found.operands['p']}` is 0: it drops nothing" if found.live("p") == 0 else None

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The operands, and the activation's name."""
        return {**found.operands, "kind": f'"{PATTERNS[found.alternative.pattern]}"'}
