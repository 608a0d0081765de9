"""Rotary position embedding of queries and keys in one kernel."""

import torch
from torch import Tensor

from slapo_rewrite.fusion import BY_KERNEL, Alternative, Example, Numerics, Refusal, Rule, RuleMatch
from slapo_rewrite.runtime.kernels.rotary import rotary


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def whole(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned(q, cos, sin), turned(k, cos, sin)


def partial(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    size = cos.shape[-1]
    q = torch.cat([turned(q[..., :size], cos, sin), q[..., size:]], dim=-1)
    k = torch.cat([turned(k[..., :size], cos, sin), k[..., size:]], dim=-1)
    return q, k


def fused(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> tuple[Tensor, Tensor]:
    return rotary(q, k, cos, sin, unsqueeze_dim)


MODEL = """\
import torch
from torch import nn


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class Scores(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width // 2)
        self.head_dim = width // heads

    def forward(self, x, cos, sin):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q @ k.repeat_interleave(2, 1).transpose(2, 3)
"""
PARTIAL = MODEL.replace(
    """\
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
""",
    """\

    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
    k_embed = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
""",
)
SCHEDULE = """\
import torch


def model(m):
    return m.Scores(32, 4)


def inputs(model):
    angles = torch.randn(1, 6, 4).repeat(1, 1, 2)
    return {"x": torch.randn(2, 6, 32), "cos": angles.cos(), "sin": angles.sin()}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("rotary")
"""


class Rotary(Rule):
    """Apply rotary position embedding to queries and keys in one kernel, forward and backward.

    If a function of the file computes it, that function calls the kernel, for all its callers.

    Rewrite:
        cos = cos.unsqueeze(unsqueeze_dim)
        sin = sin.unsqueeze(unsqueeze_dim)
        q_embed = (q * cos) + (rotate_half(q) * sin)
        k_embed = (k * cos) + (rotate_half(k) * sin)
        return q_embed, k_embed
        -->
        return rotary(q, k, cos, sin, unsqueeze_dim)

    Shapes:
        q (B, N, T, H), k (B, K, T, H), cos and sin (B, T, R), R <= H -> q's and k's;
        with `unsqueeze_dim` 2, q (B, T, N, H) and k (B, T, K, H)

    Numerics: Reassociated: float32 inside, rounded once.
    State: Unchanged.
    Raises: SR309 another layout of the pairs, or a value inside is used elsewhere too.

    Source: Su et al. 2021, arXiv:2104.09864; part of a head: Black et al. 2022, arXiv:2204.06745.
    """

    name = "rotary"
    numerics = Numerics.REASSOCIATED
    conditions = BY_KERNEL
    pays = "reads and writes queries and keys once in the place of five times"
    rank = 25
    alternatives = (Alternative(whole, fused), Alternative(partial, fused))
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
+from .kernels import rotary
-    cos = cos.unsqueeze(unsqueeze_dim)
-    sin = sin.unsqueeze(unsqueeze_dim)
-    q_embed = (q * cos) + (rotate_half(q) * sin)
-    k_embed = (k * cos) + (rotate_half(k) * sin)
-    return q_embed, k_embed
+    return rotary(q, k, cos, sin, unsqueeze_dim)
""",
        ),
        Example(
            PARTIAL,
            SCHEDULE.replace("(1, 6, 4)", "(1, 6, 2)"),
            """\
+from .kernels import rotary
-    cos = cos.unsqueeze(unsqueeze_dim)
-    sin = sin.unsqueeze(unsqueeze_dim)
-    rotary_dim = cos.shape[-1]
-    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
-    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
-    q_embed = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
-    k_embed = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
-    return q_embed, k_embed
+    return rotary(q, k, cos, sin, unsqueeze_dim)
""",
        ),
    )
    refusals = (
        # Neighbours are rotated instead of halves; the other direction; keys only.
        Refusal(
            MODEL.replace("x[..., : x.shape[-1] // 2]", "x[..., ::2]").replace(
                "x[..., x.shape[-1] // 2 :]", "x[..., 1::2]"
            ),
            SCHEDULE,
            "SR309",
        ),
        Refusal(MODEL.replace("(-x2, x1)", "(x2, -x1)"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("(k * cos) + (", "(k * cos) - ("), SCHEDULE, "SR309"),
        Refusal(
            MODEL.replace("return q_embed, k_embed", "return q_embed, k_embed * cos"),
            SCHEDULE,
            "SR309",
        ),
    )

    def width(self, found: RuleMatch) -> int | None:
        """The size of a head, from the module's attribute `head_dim`."""
        size = found.attribute("head_dim")
        return size if isinstance(size, int) else None
