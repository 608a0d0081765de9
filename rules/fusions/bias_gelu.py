"""The bias of a linear layer, added by itself, and GELU after it, in one kernel."""

from slapo_rewrite.rules.fusions.gelu_tanh import factored, without_a_power, written_out
from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.fusion import Alternative, Example, Found, Numerics, Refusal, Rule
from slapo_rewrite.runtime.kernels.bias_gelu import bias_gelu


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def gelu_tanh(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def gelu_written_out(x: Tensor, bias: Tensor) -> Tensor:
    return written_out(x + bias)


def gelu_without_a_power(x: Tensor, bias: Tensor) -> Tensor:
    return without_a_power(x + bias)


def gelu_factored(x: Tensor, bias: Tensor) -> Tensor:
    return factored(x + bias)


def fused(x: Tensor, bias: Tensor) -> Tensor:
    return bias_gelu(x, bias)


def fused_tanh(x: Tensor, bias: Tensor) -> Tensor:
    return bias_gelu(x, bias, "tanh")


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

    For models that add the bias by themselves: inside a linear layer the matrix product adds it at
    no cost, so `apply_all` leaves this rule out.

    Rewrite:
        x = self.up(x) + self.bias
        return self.down(F.gelu(x))
        -->
        return self.down(bias_gelu(self.up(x), self.bias))

    Shapes:
        x (..., F), bias (F,) -> (..., F)

    Numerics:
        Reassociated: the sum is not rounded before GELU is computed. On a CPU the same operations
        as before, a GELU that is written out apart.

    State:
        Unchanged.

    Raises:
        SR309 what is added is no parameter with one axis, or the sum is used elsewhere too.

    Source: Shoeybi et al. 2019, arXiv:1909.08053; Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """

    name = "bias_gelu"
    numerics = Numerics.REASSOCIATED
    rank = 20
    alternatives = (
        Alternative(gelu, fused),
        Alternative(gelu_tanh, fused_tanh),
        Alternative(gelu_written_out, fused_tanh),
        Alternative(gelu_without_a_power, fused_tanh),
        Alternative(gelu_factored, fused_tanh),
    )
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

    def refuses(self, found: Found) -> str | None:
        """What is added is no bias."""
        bias = found.live("bias")
        if not isinstance(bias, Tensor) or bias.dim() != 1:
            return f"`{found.operands['bias']}` is no parameter with one axis"
        return None
