"""Root mean square normalisation in one kernel."""

import torch
from torch import Tensor

from slapo_rewrite.fusion import BY_KERNEL, Alternative, Example, Numerics, Refusal, Rule, RuleMatch
from slapo_rewrite.runtime.kernels.rms_norm import rms_norm


def normalised(x: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * normalised(x, eps).to(x.dtype)


def scaled_in_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * normalised(x, eps)).to(x.dtype)


def scaled_as_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (normalised(x, eps) * weight.to(torch.float32)).to(x.dtype)


def offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (normalised(x, eps) * (1.0 + weight.float())).type_as(x)


def scaled_after_the_cast(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normalised(x, eps).type_as(x) * weight


def without_a_weight(x: Tensor, eps: float) -> Tensor:
    return normalised(x, eps).to(x.dtype)


def cast_to_half(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    x = x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    x = x.to(weight.dtype) if weight.dtype in [torch.float16, torch.bfloat16] else x
    return weight * x


def plain_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps)


def output_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps, cast="output")


def offset_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps, offset=1.0, cast="output")


def weight_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps, cast="weight")


def bare_kernel(x: Tensor, eps: float) -> Tensor:
    return rms_norm(x, None, eps)


MODEL = """\
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Norm(8)


def inputs(model):
    return {"hidden_states": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.pow(3).mean()


def schedule(s):
    s.apply("rms_norm")
"""
GEMMA = """\
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)
"""
T5 = """\
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states):
        # Only scales, and does not shift.

        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)

        # convert into half-precision if necessary
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)

        return self.weight * hidden_states
"""


class RmsNorm(Rule):
    """Compute a root mean square norm in one kernel, forward and backward.

    The place of the cast from float32, and an offset of 1 to the weight, stay the same.

    Rewrite:
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)
        -->
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    Shapes: x (..., D), weight (D,) -> (..., D)
    Numerics: Reassociated: statistics in float32, as before; sums in another order.
    State: Unchanged.

    Raises:
        SR309 another norm, a cast at another point, or a value inside is used elsewhere too.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    name = "rms_norm"
    numerics = Numerics.REASSOCIATED
    conditions = BY_KERNEL
    pays = "reads and writes each row once in the place of six times"
    rank = 30
    alternatives = (
        Alternative(scaled, plain_kernel),
        Alternative(scaled_in_float32, output_kernel),
        Alternative(scaled_as_float32, output_kernel),
        Alternative(offset, offset_kernel),
        Alternative(scaled_after_the_cast, plain_kernel),
        Alternative(cast_to_half, weight_kernel),
        Alternative(without_a_weight, bare_kernel),
    )
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .kernels import rms_norm
-        input_dtype = hidden_states.dtype
-        hidden_states = hidden_states.to(torch.float32)
-        variance = hidden_states.pow(2).mean(-1, keepdim=True)
-        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
-        return self.weight * hidden_states.to(input_dtype)
+        return rms_norm(hidden_states, self.weight, self.variance_epsilon)
""",
        ),
        Example(
            GEMMA,
            SCHEDULE.replace('"hidden_states"', '"x"'),
            """\
+from .kernels import rms_norm
-        output = self._norm(x.float())
-        output = output * (1.0 + self.weight.float())
-        return output.type_as(x)
+        return rms_norm(x, self.weight, self.eps, offset=1.0, cast="output")
""",
        ),
        Example(
            T5,
            SCHEDULE,
            """\
+from .kernels import rms_norm
-        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
-        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
-        if self.weight.dtype in [torch.float16, torch.bfloat16]:
-            hidden_states = hidden_states.to(self.weight.dtype)
-        return self.weight * hidden_states
+        return rms_norm(hidden_states, self.weight, self.eps, cast="weight")
""",
        ),
    )
    refusals = (
        Refusal(T5.replace(", torch.bfloat16", ""), SCHEDULE, "SR309"),
        Refusal(T5.replace("if self.weight.dtype", "if hidden_states.dtype"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("mean(-1", "mean(-2"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("self.weight * h", "variance * self.weight * h"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("torch.ones(width)", "torch.ones(3, width)"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("torch.ones(width)", "torch.ones(1)"), SCHEDULE, "SR309"),
    )

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses a weight of another shape than the kernel reads."""
        return of_another_shape(found)


def of_another_shape(found: RuleMatch) -> str | None:
    """Why the weight is not a vector with one number for each feature; None if it is."""
    if found.is_number("weight"):
        return f"the weight, `{found.operands['weight']}`, is a number"
    weight = found.live("weight") if "weight" in found.match.values else None
    if isinstance(weight, Tensor) and (weight.dim() != 1 or weight.numel() == 1):
        return f"the weight has the shape {list(weight.shape)}"
    return None
