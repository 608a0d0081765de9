"""Packs query, key and value projections into one layer."""

import re
from collections.abc import Sequence

from slapo_rewrite.fusion import BY_OPERATIONS, Example, Numerics, Packing, Refusal
from slapo_rewrite.patterns.search import Match
from slapo_rewrite.patterns.value_graph import Graph

_ROLE = re.compile(r"(query|key|value|q|k|v)(_proj|_lin|_layer)?")

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)

    def forward(self, x, memory):
        query = self.q_proj(x)
        key = self.k_proj(x)
        value = self.v_proj(x)
        return F.scaled_dot_product_attention(query, key, value)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = Attention(width)

    def forward(self, x, memory):
        return self.attention(x, memory)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Block(8)


def inputs(model):
    return {"x": torch.randn(2, 3, 8), "memory": torch.randn(2, 3, 8)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("pack_qkv")
"""
UNLIKE = MODEL.replace("k_proj = nn.Linear(width, width", "k_proj = nn.Linear(width, width, False")
CROSS = MODEL.replace("_proj(x)", "_proj(memory)").replace("q_proj(memory)", "q_proj(x)")


class PackQkv(Packing):
    """Compute query, key and value by one linear layer, `qkv_proj`.

    The layers are recognised by their names: `q_proj`, `query`, `q_lin` and others. If query reads
    another operand, as in cross-attention, only key and value become one `kv_proj`.

    Only applied when asked for, since a schedule cannot shard the layers by their old names any
    more. It launches fewer products, but moves as many bytes, since their gradients are copied into
    one tensor; `linear_each` moves fewer. To shard the new layer by heads, name its blocks:
    `parts=3`, or with grouped-query attention the full widths of query, key and value:

        s.apply("pack_qkv")
        s["**.self_attn.qkv_proj"].shard(["weight", "bias"], axis=0, parts=[4096, 1024, 1024])
        s["**.self_attn.qkv_proj"].sync("bwd_post", "all_reduce")

    Rewrite:
        query = self.q_proj(x)
        key = self.k_proj(x)
        value = self.v_proj(x)
        -->
        query, key, value = self.qkv_proj(x).chunk(3, dim=-1)

    Shapes: x (..., D) -> (..., Q), (..., K) and (..., K); the weight is (Q + 2K, D).
    Numerics: Reassociated: the gradient of the operand is summed inside one product.

    State:
        `load_state_dict` takes the original's names, `loading.full_state_dict` returns them bitwise
        equal; models of transformers read and write the original's checkpoints.

    Raises: SR309 there are no such layers; SR305 one of them is read elsewhere too.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    name = "pack_qkv"
    numerics = Numerics.REASSOCIATED
    conditions = BY_OPERATIONS
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .weights import concat, map_weights
+class PackedAttention(Attention):
+    \"""An `Attention` with `q_proj`, `k_proj` and `v_proj` in one `qkv_proj`.\"""
+    def __init__(self, width):
+        super().__init__(width)
+        self.qkv_proj = nn.Linear(width, 3 * width)
+        del self.q_proj, self.k_proj, self.v_proj
+    def forward(self, x, memory):
+        query, key, value = self.qkv_proj(x).chunk(3, dim=-1)
+        return F.scaled_dot_product_attention(query, key, value)
-        self.attention = Attention(width)
+        self.attention = map_weights(
+            lambda: PackedAttention(width),
+            original=lambda: Attention(width),
+            weights={
+                "qkv_proj.weight": concat(
+                    "q_proj.weight", "k_proj.weight", "v_proj.weight"
+                ),
+                "qkv_proj.bias": concat("q_proj.bias", "k_proj.bias", "v_proj.bias"),
+            },
+        )
""",
        ),
        Example(
            CROSS,
            SCHEDULE,
            """\
+from .weights import concat, map_weights
+class PackedAttention(Attention):
+    \"""An `Attention` with `k_proj` and `v_proj` in one `kv_proj`.\"""
+    def __init__(self, width):
+        super().__init__(width)
+        self.kv_proj = nn.Linear(width, 2 * width)
+        del self.k_proj, self.v_proj
+    def forward(self, x, memory):
+        query = self.q_proj(x)
+        key, value = self.kv_proj(memory).chunk(2, dim=-1)
+        return F.scaled_dot_product_attention(query, key, value)
-        self.attention = Attention(width)
+        self.attention = map_weights(
+            lambda: PackedAttention(width),
+            original=lambda: Attention(width),
+            weights={
+                "kv_proj.weight": concat("k_proj.weight", "v_proj.weight"),
+                "kv_proj.bias": concat("k_proj.bias", "v_proj.bias"),
+            },
+        )
""",
        ),
    )
    refusals = (
        Refusal(CROSS.replace("k_proj(memory)", "k_proj(-memory)"), SCHEDULE, "SR309"),
        Refusal(UNLIKE, SCHEDULE, "SR309"),
    )

    def packed(self, group: Sequence[Match], graph: Graph) -> str | None:
        """The new layer's name, by the roles of the layers in attention; else None."""
        roles = [_ROLE.fullmatch(str(match.root.called)) for match in group]
        letters = sorted(role[1][0] for role in roles if role is not None)
        if len(letters) < len(group) or letters not in (["k", "q", "v"], ["k", "v"]):
            return None
        return "qkv_proj" if "q" in letters else "kv_proj"
