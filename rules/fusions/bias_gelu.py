"""The bias of a linear layer and GELU after it, in one kernel."""

from collections.abc import Callable, Mapping

from slapo_rewrite.rules.fusions.geglu import gelu, gelu_tanh
from slapo_rewrite.rules.fusions.gelu_tanh import factored, without_a_power, written_out
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
from slapo_rewrite.runtime.kernels.bias_gelu import bias_gelu, linear_gelu


def with_bias(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The pattern of an added bias and GELU."""

    def after(x: Tensor, bias: Tensor) -> Tensor:
        return activation(x + bias)

    return after


def alone(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The pattern of GELU; the linear layer before it adds the bias."""

    def after(x: Tensor) -> Tensor:
        return activation(x)

    return after


# The kernel's argument for each.
APPROXIMATE = {
    gelu: None,
    **dict.fromkeys((gelu_tanh, written_out, without_a_power, factored), '"tanh"'),
}
PATTERNS = {
    after(activation): told
    for after in (with_bias, alone)
    for activation, told in APPROXIMATE.items()
}

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.bias = nn.Parameter(torch.zeros(4 * width))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = self.up(x) + self.bias
        return self.down(F.gelu(x))
"""
WRITTEN_OUT = "0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))"
SCHEDULE = """\
import torch


def model(m):
    return m.MLP(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("bias_gelu")
"""


class BiasGelu(Rule):
    """Add a bias and compute GELU in one kernel, forward and backward.

    The bias is one that the model adds itself, or that of the linear layer before, which is passed
    to the kernel. The forward pass gains nothing, since a product adds a bias at no cost; in the
    backward pass the bias's gradient is summed together with GELU's, not in a pass of its own. A
    layer or activation that gets hooks or an adapter at run time is called.

    Rewrite:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.act(hidden_states)
        -->
        hidden_states = linear_gelu(hidden_states, self.dense, activation=self.act)

    Shapes: x (..., F), bias (F,) -> (..., F)

    Numerics:
        Reassociated: the sum is not rounded before GELU is computed, the product is. On a CPU the
        same operations as before, except for a GELU that is written out.

    State: Unchanged.

    Raises:
        SR309 GELU's input is not the result of a linear layer with a bias, or the added tensor is
        not a parameter with one axis, or the sum is used elsewhere too.

    Source: Shoeybi et al. 2019, arXiv:1909.08053; Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """

    name = "bias_gelu"
    numerics = Numerics.REASSOCIATED
    conditions = BY_KERNEL
    pays = "backwards the bias's gradient is summed without reading its terms once more"
    rank = 20
    alternatives = tuple(map(Alternative, PATTERNS))
    functions = (bias_gelu, linear_gelu)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
-from torch.nn import functional as F
+from .kernels import bias_gelu
-        x = self.up(x) + self.bias
-        return self.down(F.gelu(x))
+        return self.down(bias_gelu(self.up(x), self.bias))
""",
        ),
        Example(
            "import math\n\n" + MODEL.replace("F.gelu(x)", WRITTEN_OUT),
            SCHEDULE,
            f"""\
-import math
+from .kernels import bias_gelu
-        x = self.up(x) + self.bias
-        return self.down({WRITTEN_OUT})
+        return self.down(bias_gelu(self.up(x), self.bias, "tanh"))
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("+ self.bias", "- self.bias"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("+ self.bias", "+ x.mean()"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("zeros(4 * width)", "zeros(1, 1, 4 * width)"), SCHEDULE, "SR309"),
    )

    def after_linear(self, found: RuleMatch) -> str | None:
        """The operand that a linear layer may produce, if nothing else adds a bias."""
        return None if "bias" in found.operands else "x"

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the kernel, with the linear layer or with the bias."""
        kernel, first = (linear_gelu, "linear") if found.linear else (bias_gelu, "bias")
        parameters = ("x", first, "approximate")
        return Calling.of(kernel, parameters, ("activation",), self.operands(found))

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The operands, and the kind of GELU."""
        told = PATTERNS[found.alternative.pattern]
        return found.operands | ({"approximate": told} if told else {})

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses matches without a bias."""
        if "bias" not in found.operands:
            if found.linear is None:
                return f"`{found.operands['x']}` is not what a linear layer with a bias gives"
            return None
        bias = found.live("bias")
        if not isinstance(bias, Tensor) or bias.dim() != 1:
            return f"`{found.operands['bias']}` is no parameter with one axis"
        return None
