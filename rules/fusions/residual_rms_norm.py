"""A residual addition, optional dropout before it, and the root mean square norm after it."""

from collections.abc import Callable, Mapping

from slapo_rewrite.rules.fusions.rms_norm import (
    cast_to_half,
    of_another_shape,
    offset,
    scaled,
    scaled_as_float32,
    scaled_in_float32,
)
from torch import Tensor, nn
from torch.nn import functional as F

from slapo_rewrite.code.text import accessor
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
from slapo_rewrite.runtime.kernels.rms_norm import residual_rms_norm


def after_adding(norm: Callable[[Tensor, Tensor, float], Tensor]) -> list[Callable[..., object]]:
    """The patterns of a sum and its norm."""

    def with_dropout(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, p: float, training: bool
    ) -> tuple[Tensor, Tensor]:
        total = residual + F.dropout(x, p, training)
        normed = norm(total, weight, eps)
        return normed, total

    def without(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        normed = norm(total, weight, eps)
        return normed, total

    return [with_dropout, without]


# Further arguments of the kernel, for each way to write the norm.
NORMS: dict[Callable[..., Tensor], dict[str, str]] = {
    scaled: {},
    scaled_in_float32: {"cast": '"output"'},
    scaled_as_float32: {"cast": '"output"'},
    offset: {"offset": "1.0", "cast": '"output"'},
    cast_to_half: {"cast": '"weight"'},
}
PATTERNS = {pattern: told for norm, told in NORMS.items() for pattern in after_adding(norm)}

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
    """Compute a residual addition and an RMS norm in one kernel, forward and backward.

    Dropout before the addition is included. The norm may be a module of the file, whose weight is
    read at its call. A norm or dropout that gets hooks or an adapter at run time is called.

    Rewrite:
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        -->
        hidden_states, residual = residual_rms_norm(
            hidden_states, residual, self.norm.weight, self.norm.variance_epsilon, norm=self.norm
        )

    Shapes: x and residual (..., D), weight (D,) -> (..., D) and (..., D)

    Numerics:
        Reseeded: on a GPU dropout draws other numbers; without it, and on a CPU, the same formula.
        The sum is rounded as before; statistics in float32.

    State: Unchanged: the constructor still makes the norm.
    Raises: SR309 the norm does not follow the addition in the same `forward`.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    name = "residual_rms_norm"
    numerics = Numerics.RESEEDED
    conditions = BY_KERNEL
    pays = "the sum is read once, and dropout keeps no mask"
    rank = 40
    alternatives = tuple(map(Alternative, PATTERNS))
    functions = (residual_rms_norm,)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .kernels import residual_rms_norm
-        x = residual + x
-        residual = x
-        x = self.norm(x)
+        x, residual = residual_rms_norm(
+            x, residual, self.norm.weight, 1e-06, norm=self.norm
+        )
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("torch.ones(width)", "torch.ones(3, width)"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("residual + x\n\n", "residual - x\n\n"), SCHEDULE, "SR309"),
        Refusal(
            MODEL.replace("self.norm = Norm(width)", "self.norm = nn.LayerNorm(width)"),
            SCHEDULE,
            "SR309",
        ),
    )

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses summands of different sizes, and weights of another shape."""
        return broadcast(found) or of_another_shape(found) or called_with_more(found)

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the kernel, with the needed keywords."""
        parameters, keywords = (
            ("x", "residual", "weight", "eps"),
            ("norm", "offset", "cast", "dropout"),
        )
        return Calling.of(residual_rms_norm, parameters, keywords, self.operands(found))

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The operands, with the arguments for the kind of norm."""
        return added(found) | normed_by(found) | PATTERNS[found.alternative.pattern]


def added(found: RuleMatch) -> dict[str, str]:
    """The operands; without dropout, the older summand is the residual."""
    given = found.operands
    if are_swapped(found):
        given["x"], given["residual"] = given["residual"], given["x"]
    return given


def are_swapped(found: RuleMatch) -> bool:
    """Whether the pattern's residual is not the residual, but the other summand."""
    if found.entered is not None:  # the summand that the linear layer produces
        return found.entered == "residual"
    dropped = "p" in found.match.values
    return not dropped and found.value("x").order < found.value("residual").order


def normed_by(found: RuleMatch) -> dict[str, str]:
    """The norm's module, if it is called as one, since it may get hooks at run time."""
    layer = found.match.results[0].site.called
    return {"norm": accessor(layer)} if layer is not None else {}


def called_with_more(found: RuleMatch) -> str | None:
    """Why the norm's module cannot be called with only the sum; None if it can."""
    call = found.match.results[0].site
    if call.called is None:
        return None
    if found.attribute(call.called)._modules:
        return f"`{call.called}` holds modules: an adapter of the norm would look alike"
    if len(call.given) != 1:
        return f"`{call.called}` is given more than the sum"
    return None


def broadcast(found: RuleMatch) -> str | None:
    """Why a summand is probably broadcast; None if it is not."""
    for name in {"x", "residual"} - {found.entered}:
        value = found.value(name)
        if found.is_number(name) or value.operation in ("constant", "attribute"):
            return f"`{found.operands[name]}`, which is added, is no activation"
        called = found.attribute(value.called) if value.called else None
        if isinstance(called, nn.Embedding):
            return f"`{value.called}` may give rows that are added to every sequence alike"
    return None
