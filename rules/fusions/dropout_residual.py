"""Dropout and a residual addition, in one kernel."""

from slapo_rewrite.rules.fusions.residual_rms_norm import broadcast
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
from slapo_rewrite.runtime.kernels.dropout_residual import dropout_residual


def dropped(x: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    return residual + F.dropout(x, p, training)


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
    """Compute dropout and a residual addition in one kernel, forward and backward, without a mask.

    It is for sums whose norm is in another module; if the norm follows directly,
    `residual_layer_norm` and `residual_rms_norm` fuse more. The bias of a linear layer right before
    is added there as well, and its gradient is summed in the same pass. A layer or dropout that
    gets hooks or an adapter at run time is called.

    Rewrite:
        forwarded_states = self.dense(forwarded_states)
        hidden_states = hidden_states + self.dropout(forwarded_states)
        -->
        hidden_states = dropout_residual(
            forwarded_states, hidden_states, linear=self.dense, dropout=self.dropout
        )

    Shapes: x and residual (..., D) -> (..., D)

    Numerics:
        Reseeded: on a GPU dropout draws other numbers; on a CPU the same operations as before.

    State: Unchanged.
    Raises: SR309 dropout's result is used elsewhere too, is not added, or its rate is 0.

    Source: Shoeybi et al. 2019, arXiv:1909.08053; Salmon et al. 2011, doi:10.1145/2063384.2063405.
    """

    name = "dropout_residual"
    numerics = Numerics.RESEEDED
    conditions = BY_KERNEL
    pays = "reads each of the two once, and dropout keeps no mask"
    rank = 10
    alternatives = (Alternative(dropped),)
    functions = (dropout_residual,)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .kernels import dropout_residual
-        forwarded_states = self.dense(forwarded_states)
-        hidden_states = hidden_states + self.dropout(forwarded_states)
+        hidden_states = dropout_residual(
+            forwarded_states, hidden_states, linear=self.dense, dropout=self.dropout
+        )
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("0.1", "0.0"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("s + self.dropout", "s * self.dropout"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("hidden_states + self", "1.0 + self"), SCHEDULE, "SR309"),
    )

    def after_linear(self, found: RuleMatch) -> str:
        """The operand that a linear layer may produce."""
        return "x"

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the kernel, with the linear layer if there is one."""
        keywords = ("linear", "dropout")
        return Calling.of(dropout_residual, ("x", "residual"), keywords, found.operands)

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses dropout with a rate of 0, and summands of different sizes."""
        if found.live("p") == 0:
            return f"`{found.operands['p']}` is 0: it drops nothing"
        return broadcast(found)
