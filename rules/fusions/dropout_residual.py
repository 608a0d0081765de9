"""Dropout and a residual addition, in one kernel."""

from collections.abc import Callable, Mapping

from slapo_rewrite.rules.fusions.residual_rms_norm import broadcast
from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.fusion import BY_KERNEL, Alternative, Example, Numerics, Refusal, Rule, RuleMatch
from slapo_rewrite.runtime.kernels.dropout_residual import dropout_residual


def dropped(x: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    return residual + F.dropout(x, p, training)


def fused(x: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    return dropout_residual(x, residual, p=p, training=training)


def with_bias(x: Tensor, residual: Tensor, bias: Tensor, p: float, training: bool) -> Tensor:
    return dropout_residual(x, residual, input_bias=bias, p=p, training=training)


MODEL = """\
from torch import nn


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.layer_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states):
        forwarded_states = self.layer_norm(hidden_states)
        forwarded_states = self.dense(forwarded_states)
        hidden_states = hidden_states + self.dropout(forwarded_states)
        return hidden_states
"""
SCHEDULE = """\
import torch


def model(m):
    return m.FeedForward(8)


def inputs(model):
    return {"hidden_states": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("dropout_residual")
"""


class DropoutResidual(Rule):
    """Drop and add to the residual in one kernel, forward and backward, without a mask.

    For where the norm of the sum lies in another module; where it follows, `residual_layer_norm`
    and `residual_rms_norm` do more. The bias of a linear layer right before is added there as well:
    its gradient is summed on the way.

    Rewrite:
        hidden_states = hidden_states + self.dropout(forwarded_states)
        -->
        hidden_states = dropout_residual(
            forwarded_states, hidden_states, p=self.dropout.p, training=self.dropout.training
        )

    Shapes:
        x and residual (..., D) -> (..., D)

    Numerics:
        Reseeded: on a GPU dropout draws other numbers; on a CPU the same operations as before.

    State:
        Unchanged.

    Raises:
        SR309 what is dropped is used elsewhere too, is not added, or dropout's rate is 0.

    Source: Shoeybi et al. 2019, arXiv:1909.08053; Salmon et al. 2011, doi:10.1145/2063384.2063405.
    """

    name = "dropout_residual"
    numerics = Numerics.RESEEDED
    conditions = BY_KERNEL
    pays = "reads each of the two once, and dropout keeps no mask"
    rank = 10
    alternatives = (Alternative(dropped, fused),)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .kernels import dropout_residual, linear_product
-        forwarded_states = self.dense(forwarded_states)
-        hidden_states = hidden_states + self.dropout(forwarded_states)
+        forwarded_states = linear_product(forwarded_states, self.dense)
+        hidden_states = dropout_residual(
+            forwarded_states,
+            hidden_states,
+            input_bias=self.dense.bias,
+            p=self.dropout.p,
+            training=self.dropout.training,
+        )
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("0.1", "0.0"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("s + self.dropout", "s * self.dropout"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("hidden_states + self", "1.0 + self"), SCHEDULE, "SR309"),
    )

    def biased(self, found: RuleMatch) -> str | None:
        """The layer that gives what is dropped."""
        return found.layer("x")

    def replacement(self, found: RuleMatch) -> Callable[..., Tensor]:
        """The kernel with the bias of the layer, where there is one."""
        return fused if self.biased(found) is None else with_bias

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """What the pattern is given, and the bias."""
        layer = self.biased(found)
        return {**found.operands, "bias": f"self.{layer}.bias"} if layer else found.operands

    def refuses(self, found: RuleMatch) -> str | None:
        """Nothing to drop, or two that are not of one size."""
        if found.live("p") == 0:
            return f"`{found.operands['p']}` is 0: it drops nothing"
        return broadcast(found)
