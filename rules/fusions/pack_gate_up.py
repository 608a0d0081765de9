"""Packs both projections of a gated linear unit into one layer."""

from collections.abc import Sequence

from slapo_rewrite.fusion import BY_OPERATIONS, Example, Numerics, Packing, Refusal
from slapo_rewrite.patterns.search import Match
from slapo_rewrite.patterns.value_graph import Graph, Value

MODEL = """\
from torch import nn
from torch.nn import functional as F


class GatedMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 4 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = GatedMLP(width)

    def forward(self, x):
        return x + self.mlp(x)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Block(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("pack_gate_up")
"""


class PackGateUp(Packing):
    """Compute the gate and the gated projection by one linear layer, `gate_up_proj`.

    It packs two layers with any names that read one operand, if their results are multiplied and
    one of them is activated.

    Only applied when asked for, since a schedule cannot shard the layers by their old names any
    more. The new layer packs two blocks:

        s.apply("pack_gate_up")
        s["**.mlp.gate_up_proj"].shard("weight", axis=0, parts=2)
        s["**.mlp.gate_up_proj"].sync("bwd_post", "all_reduce")

    Rewrite:
        self.down(F.silu(self.gate(x)) * self.up(x))
        -->
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        self.down(F.silu(gate) * up)

    Shapes: x (..., D) -> (..., F) twice; the weight is (2F, D).
    Numerics: Reassociated: the gradient of the operand is summed inside one product.

    State:
        `load_state_dict` takes the original's names, `loading.full_state_dict` returns them bitwise
        equal; models of transformers read and write the original's checkpoints.

    Raises: SR309 there are no such layers; SR305 one of them is read elsewhere too.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    name = "pack_gate_up"
    numerics = Numerics.REASSOCIATED
    conditions = BY_OPERATIONS
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .weights import concat, map_weights
+class PackedGatedMLP(GatedMLP):
+    \"""A `GatedMLP` with `gate` and `up` in one `gate_up_proj`.\"""
+    def __init__(self, width):
+        super().__init__(width)
+        self.gate_up_proj = nn.Linear(width, 2 * 4 * width)
+        del self.gate, self.up
+    def forward(self, x):
+        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
+        return self.down(F.silu(gate) * up)
-        self.mlp = GatedMLP(width)
+        self.mlp = map_weights(
+            lambda: PackedGatedMLP(width),
+            original=lambda: GatedMLP(width),
+            weights={
+                "gate_up_proj.weight": concat("gate.weight", "up.weight"),
+                "gate_up_proj.bias": concat("gate.bias", "up.bias"),
+            },
+        )
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace(") * self.up", ") + self.up"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("self.up(x)", "self.up(-x)"), SCHEDULE, "SR309"),
    )

    def packed(self, group: Sequence[Match], graph: Graph) -> str | None:
        """The new layer's name for two layers whose results are multiplied; else None."""
        if len(group) != 2:
            return None
        calls = {match.root for match in group}
        products = [value for value in graph.values if value.operation == "mul"]
        meets = any({_source(each, calls) for _, each in p.arguments} >= calls for p in products)
        return "gate_up_proj" if meets else None


def _source(value: Value, calls: set[Value]) -> Value:
    """The call that computes a value, possibly before an activation."""
    while value not in calls:
        inputs = [given for _, given in value.arguments if not given.is_leaf]
        if len(inputs) != 1:
            break
        value = inputs[0]
    return value
