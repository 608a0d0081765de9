"""Dropout, a residual addition and the layer norm after it, in one kernel."""

from collections.abc import Mapping
from typing import Any

from slapo_rewrite.rules.fusions.residual_rms_norm import (
    added,
    are_swapped,
    broadcast,
    called_with_more,
    normed_by,
)
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
from slapo_rewrite.runtime.kernels.layer_norm import add_layer_norm, residual_layer_norm


def dropped_and_kept(
    x: Tensor,
    residual: Tensor,
    shape: Any,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    p: float,
    training: bool,
) -> tuple[Tensor, Tensor]:
    total = F.dropout(x, p, training) + residual
    normed = F.layer_norm(total, shape, weight, bias, eps)
    return normed, total


def kept(
    x: Tensor, residual: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    normed = F.layer_norm(total, shape, weight, bias, eps)
    return normed, total


def dropped(
    x: Tensor,
    residual: Tensor,
    shape: Any,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    p: float,
    training: bool,
) -> Tensor:
    return F.layer_norm(F.dropout(x, p, training) + residual, shape, weight, bias, eps)


def summed(
    x: Tensor, residual: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    return F.layer_norm(x + residual, shape, weight, bias, eps)


POST = """\
from torch import nn


class Output(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states
"""
POST_SCHEDULE = """\
import torch


def model(m):
    return m.Output(8)


def inputs(model):
    return {"hidden_states": torch.randn(2, 3, 8), "input_tensor": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.pow(3).mean()


def schedule(s):
    s.apply("residual_layer_norm")
"""
PRE = """\
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x
"""
PRE_SCHEDULE = """\
import torch


def model(m):
    return m.Block(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.pow(3).mean()


def schedule(s):
    s.apply("residual_layer_norm")
"""


class ResidualLayerNorm(Rule):
    """Compute dropout, a residual addition and a layer norm in one kernel, forward and backward.

    If the norm ends a block (BERT), nothing else reads the sum: `add_layer_norm`. If it begins a
    block (GPT), the sum is also the next residual: `residual_layer_norm`. The norm's weight and
    bias are read at its call. The bias of a linear layer right before is added as well, and its
    gradient is summed in the same backward pass. A module that gets hooks or an adapter at run time
    is called.

    Rewrite:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        -->
        hidden_states = add_layer_norm(
            hidden_states, input_tensor, self.LayerNorm.weight, self.LayerNorm.bias,
            self.LayerNorm.eps, norm=self.LayerNorm, linear=self.dense, dropout=self.dropout
        )

        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        -->
        normed, x = residual_layer_norm(
            self.attn(self.ln_1(x)), x, self.ln_2.weight, self.ln_2.bias, self.ln_2.eps,
            norm=self.ln_2
        )
        x = x + self.mlp(normed)

    Shapes: x and residual (..., D), weight and bias (D,) -> (..., D), or (..., D) and (..., D)

    Numerics:
        Reseeded: on a GPU dropout draws other numbers; without it, and on a CPU, the same formula.
        The sum is rounded as before; statistics in float32.

    State: Unchanged: the constructor still makes the norm.

    Raises:
        SR309 the norm does not follow the addition in the same `forward`, or has several axes.

    Source: Ba et al. 2016, arXiv:1607.06450; Shoeybi et al. 2019, arXiv:1909.08053.
    """

    name = "residual_layer_norm"
    numerics = Numerics.RESEEDED
    conditions = BY_KERNEL
    pays = "the sum is read once, and dropout keeps no mask"
    rank = 40
    alternatives = (
        Alternative(dropped_and_kept),
        Alternative(kept),
        Alternative(dropped),
        Alternative(summed),
    )
    functions = (add_layer_norm, residual_layer_norm)
    examples = (
        Example(
            POST,
            POST_SCHEDULE,
            """\
+from .kernels import add_layer_norm
-        hidden_states = self.dense(hidden_states)
-        hidden_states = self.dropout(hidden_states)
-        hidden_states = self.LayerNorm(hidden_states + input_tensor)
+        hidden_states = add_layer_norm(
+            hidden_states,
+            input_tensor,
+            self.LayerNorm.weight,
+            self.LayerNorm.bias,
+            self.LayerNorm.eps,
+            norm=self.LayerNorm,
+            linear=self.dense,
+            dropout=self.dropout,
+        )
""",
        ),
        Example(
            PRE,
            PRE_SCHEDULE,
            """\
+from .kernels import residual_layer_norm
-        x = x + self.attn(self.ln_1(x))
-        x = x + self.mlp(self.ln_2(x))
+        normed, x = residual_layer_norm(
+            self.ln_1(x),
+            x,
+            self.ln_2.weight,
+            self.ln_2.bias,
+            self.ln_2.eps,
+            norm=self.ln_2,
+            linear=self.attn,
+        )
+        x = x + self.mlp(normed)
""",
        ),
    )
    refusals = (
        Refusal(POST.replace("+ input", "- input"), POST_SCHEDULE, "SR309"),
        Refusal(POST.replace("LayerNorm(width", "LayerNorm((3, width)"), POST_SCHEDULE, "SR309"),
        Refusal(
            POST.replace("input_tensor)\n        r", "1.0)\n        r"), POST_SCHEDULE, "SR309"
        ),
        Refusal(PRE.replace("self.ln_2(x)", "self.ln_2(2 * x)"), PRE_SCHEDULE, "SR309"),
    )

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses a norm over more than the last axis, and summands of different sizes."""
        shape = found.live("shape")
        if not (isinstance(shape, int) or (isinstance(shape, tuple) and len(shape) == 1)):
            return "the norm is not known to go over the last axis alone"
        return broadcast(found) or called_with_more(found)

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The operands; without dropout, the older summand is the residual."""
        return added(found) | normed_by(found)

    def after_linear(self, found: RuleMatch) -> str:
        """The operand that a linear layer may produce."""
        return "residual" if are_swapped(found) else "x"

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the kernel, with the needed keywords."""
        both = found.alternative.pattern in (dropped_and_kept, kept)
        kernel = residual_layer_norm if both else add_layer_norm
        parameters = ("x", "residual", "weight", "bias", "eps")
        return Calling.of(kernel, parameters, ("norm", "linear", "dropout"), self.operands(found))
