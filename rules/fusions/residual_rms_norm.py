"""A residual addition and the root mean square norm after it, in one kernel."""

from collections.abc import Mapping

import torch
from slapo_rewrite.rules.fusions.rms_norm import normalised
from torch import Tensor

from slapo_rewrite.fusion import Alternative, Example, Found, Numerics, Refusal, Rule
from slapo_rewrite.runtime.kernels.rms_norm import residual_rms_norm


def plain(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return weight * normalised(total, eps).to(total.dtype), total


def in_float32(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return (weight * normalised(total, eps)).to(total.dtype), total


def as_float32(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return (normalised(total, eps) * weight.to(torch.float32)).to(total.dtype), total


def with_offset(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return (normalised(total, eps) * (1.0 + weight.float())).type_as(total), total


def plain_kernel(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return residual_rms_norm(x, residual, weight, eps)


def output_kernel(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return residual_rms_norm(x, residual, weight, eps, cast="output")


def offset_kernel(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return residual_rms_norm(x, residual, weight, eps, offset=1.0, cast="output")


MODEL = """\
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.norm = Norm(width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x):
        residual = x
        x = self.attention(x)
        x = residual + x

        # The second half.
        residual = x
        x = self.norm(x)
        x = self.mlp(x)
        return residual + x
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Block(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.pow(3).mean()


def schedule(s):
    s.apply("residual_rms_norm")
"""


class ResidualRmsNorm(Rule):
    """Add to the residual and normalise the sum in one kernel, forward and backward.

    The norm may be a module of the file: its weight is read where it was called.

    Rewrite:
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        -->
        hidden_states, residual = residual_rms_norm(
            hidden_states, residual, self.norm.weight, self.norm.variance_epsilon
        )

    Shapes:
        x and residual (..., D), weight (D,) -> (..., D) and (..., D)

    Numerics:
        Reassociated: the sum is rounded as before; statistics in float32.

    State:
        Unchanged: the norm stays where it is made.

    Raises:
        SR309 the norm does not follow the addition in one `forward`.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    name = "residual_rms_norm"
    numerics = Numerics.REASSOCIATED
    rank = 40
    alternatives = (
        Alternative(plain, plain_kernel),
        Alternative(in_float32, output_kernel),
        Alternative(as_float32, output_kernel),
        Alternative(with_offset, offset_kernel),
    )
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .kernels import residual_rms_norm
-        x = residual + x
-        residual = x
-        x = self.norm(x)
+        x, residual = residual_rms_norm(x, residual, self.norm.weight, 1e-06)
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("residual + x\n\n", "residual - x\n\n"), SCHEDULE, "SR309"),
        Refusal(
            MODEL.replace("self.norm = Norm(width)", "self.norm = nn.LayerNorm(width)"),
            SCHEDULE,
            "SR309",
        ),
    )

    def operands(self, found: Found) -> Mapping[str, str]:
        """Of the two that are added, the older one is the residual."""
        given = dict(found.operands)
        if found.value("x").order < found.value("residual").order:
            given["x"], given["residual"] = given["residual"], given["x"]
        return given
