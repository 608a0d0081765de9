"""Query, key and value of one operand, whose gradients are summed inside the products."""

import re
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from slapo_rewrite.fusion import BY_KERNEL, Alternative, Example, Numerics, Refusal, Rule, RuleMatch
from slapo_rewrite.runtime.kernels.linear_each import linear_each

_ROLES = {"query": "q", "key": "k", "value": "v"}
_ROLE = re.compile(r"(query|key|value|q|k|v)(_proj|_lin|_layer)?")


def projected(
    x: Tensor,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    value_weight: Tensor,
    value_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    query = F.linear(x, query_weight, query_bias)
    key = F.linear(x, key_weight, key_bias)
    value = F.linear(x, value_weight, value_bias)
    return query, key, value


def together(
    x: Tensor, query_layer: nn.Module, key_layer: nn.Module, value_layer: nn.Module
) -> tuple[Tensor, ...]:
    return linear_each(x, query_layer, key_layer, value_layer)


MODEL = """\
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)

    def forward(self, x, memory):
        shape = (*x.shape[:-1], 2, -1)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Attention(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8), "memory": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("linear_each")
"""


class LinearEach(Rule):
    """Compute query, key and value together, and sum their input's gradients in the products.

    The layers do not change, and are called one by one if one of them does more than `nn.Linear` or
    has hooks, or if autocast is on. So they can be sharded, wrapped and replaced as before.

    Rewrite:
        q = self.q_proj(x).view(shape)
        k = self.k_proj(x).view(shape)
        v = self.v_proj(x).view(shape)
        -->
        query, key, value = linear_each(x, self.q_proj, self.k_proj, self.v_proj)
        q = query.view(shape)
        k = key.view(shape)
        v = value.view(shape)

    Shapes: x (..., D) -> (..., Q), (..., K) and (..., V)
    Numerics: Reassociated: products are added to the gradient before they are rounded.
    State: Unchanged.

    Raises:
        SR309 no three layers with such names read one operand in one branch, in this order.

    Source: `FusedDense` of github.com/Dao-AILab/flash-attention, whose product adds the residual's
    gradient in the same way.
    """

    name = "linear_each"
    numerics = Numerics.REASSOCIATED
    conditions = BY_KERNEL
    pays = "backwards the products add up the input's gradient, in the place of two passes"
    rank = 10
    alternatives = (Alternative(projected, together),)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .kernels import linear_each
-        q = self.q_proj(x).view(shape).transpose(1, 2)
-        k = self.k_proj(x).view(shape).transpose(1, 2)
-        v = self.v_proj(x).view(shape).transpose(1, 2)
+        query, key, value = linear_each(x, self.q_proj, self.k_proj, self.v_proj)
+        q = query.view(shape).transpose(1, 2)
+        k = key.view(shape).transpose(1, 2)
+        v = value.view(shape).transpose(1, 2)
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("k_proj(x)", "k_proj(memory)"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("k_proj", "up"), SCHEDULE, "SR309"),
    )

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses layers of other names."""
        for role, letter in _ROLES.items():
            layer = self._layer(found, role)
            match = _ROLE.fullmatch(layer or "")
            if match is None or match[1][0] != letter:
                return f"`{found.operands[f'{role}_weight']}` is not that of a layer for the {role}"
        return None

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The operand and the layers."""
        layers = {f"{role}_layer": f"self.{self._layer(found, role)}" for role in _ROLES}
        return {"x": found.operands["x"], **layers}

    def width(self, found: RuleMatch) -> int:
        """The output features of the query layer."""
        features: int = found.live("query_weight").shape[0]
        return features

    def _layer(self, found: RuleMatch, role: str) -> str | None:
        """The name of the module's own layer with a weight; None if it is not called."""
        called = {n.called for n in found.match.nodes}
        path = str(found.value(f"{role}_weight").literal).removesuffix(".weight")
        return path if path in called else None
