"""An activation and dropout after it, in one kernel."""

from collections.abc import Callable, Mapping

from slapo_rewrite.rules.fusions import quick_gelu
from slapo_rewrite.rules.fusions.geglu import gelu, gelu_tanh
from slapo_rewrite.rules.fusions.gelu_tanh import factored, without_a_power, written_out
from slapo_rewrite.rules.fusions.reglu import relu
from slapo_rewrite.rules.fusions.swiglu import silu
from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.fusion import BY_KERNEL, Alternative, Example, Numerics, Refusal, Rule, RuleMatch
from slapo_rewrite.runtime.kernels.bias_gelu import activation_dropout, bias_activation


def dropped(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The pattern of an activation and dropout."""

    def after(x: Tensor, p: float, training: bool) -> Tensor:
        return F.dropout(activation(x), p, training)

    return after


def fused(x: Tensor, kind: str, p: float, training: bool) -> Tensor:
    return activation_dropout(x, kind, p=p, training=training)


KINDS = {
    relu: "relu",
    silu: "silu",
    gelu: "gelu",
    **dict.fromkeys((gelu_tanh, written_out, without_a_power, factored), "gelu_tanh"),
    quick_gelu.written_out: "quick_gelu",
}


def with_bias(x: Tensor, bias: Tensor, kind: str, p: float, training: bool) -> Tensor:
    return bias_activation(x, bias, kind, p=p, training=training)


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
    """Activate and drop in one kernel, forward and backward, without a mask.

    The bias of a linear layer right before is added there as well: its gradient is summed on the
    way.

    Rewrite:
        hidden_states = self.act(hidden_states)
        hidden_states = self.dropout(hidden_states)
        -->
        hidden_states = activation_dropout(
            hidden_states, "relu", p=self.dropout.p, training=self.dropout.training
        )

    Shapes:
        x (...) -> (...)

    Numerics:
        Reseeded: on a GPU dropout draws other numbers, and the activation is rounded once. On a
        CPU the same operations as before, a GELU that is written out apart.

    State:
        Unchanged.

    Raises:
        SR309 another activation, what it gives is used elsewhere too, or dropout's rate is 0.

    Source: Raffel et al. 2019, arXiv:1910.10683; Salmon et al. 2011, doi:10.1145/2063384.2063405.
    """

    name = "activation_dropout"
    numerics = Numerics.RESEEDED
    conditions = BY_KERNEL
    pays = "reads and writes once in the place of twice, and dropout keeps no mask"
    rank = 20
    alternatives = tuple(Alternative(pattern, fused) for pattern in PATTERNS)
    examples = (
        Example(
            MODEL.replace("4 * width)\n        self.wo", "4 * width, bias=False)\n        self.wo"),
            SCHEDULE,
            """\
+from .kernels import activation_dropout
-        x = self.act(x)
-        x = self.dropout(x)
+        x = activation_dropout(
+            x, "relu", p=self.dropout.p, training=self.dropout.training
+        )
""",
        ),
        Example(
            MODEL.replace("ReLU()", "GELU()"),
            SCHEDULE,
            """\
+from .kernels import bias_activation, linear_product
-        x = self.wi(x)
-        x = self.act(x)
-        x = self.dropout(x)
+        x = linear_product(x, self.wi)
+        x = bias_activation(
+            x, self.wi.bias, "gelu", p=self.dropout.p, training=self.dropout.training
+        )
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("0.1", "0.0"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("ReLU", "Mish"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("x = self.dropout(x)", "x = x + self.dropout(x)"), SCHEDULE, "SR309"),
    )

    def biased(self, found: RuleMatch) -> str | None:
        """The layer that gives what is activated."""
        return found.layer("x")

    def replacement(self, found: RuleMatch) -> Callable[..., Tensor]:
        """The kernel with the bias of the layer, where there is one."""
        return fused if self.biased(found) is None else with_bias

    def refuses(self, found: RuleMatch) -> str | None:
        """Nothing to drop."""
        return f"`{found.operands['p']}` is 0: it drops nothing" if found.live("p") == 0 else None

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """What the pattern is given, the activation's name, and the bias."""
        given = {**found.operands, "kind": f'"{PATTERNS[found.alternative.pattern]}"'}
        return {**given, "bias": f"self.{self.biased(found)}.bias"}
