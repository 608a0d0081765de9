"""The softmax of attention scores, scaled and masked, in one kernel."""

import ast
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from slapo_rewrite.rules.fusions.sdpa import MASKS, added
from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.code.build import parenthesised
from slapo_rewrite.fusion import BY_KERNEL, Alternative, Example, Numerics, Refusal, Rule, RuleMatch
from slapo_rewrite.runtime.kernels.softmax import masked_softmax


def scaled(q: Tensor, k: Tensor, scale: Any) -> Tensor:
    return torch.matmul(q, k) * scale


def divided(q: Tensor, k: Tensor, scale: Any) -> Tensor:
    return torch.matmul(q, k) / scale


def added_if_given(scores: Tensor, mask: Tensor | None) -> Tensor:
    return scores + mask if mask is not None else scores


def plain_softmax(scores: Tensor, like: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1)


def float32_softmax(scores: Tensor, like: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(like.dtype)


def upcast_softmax(scores: Tensor, like: Tensor) -> Tensor:
    return F.softmax(scores.float(), dim=-1).to(like.dtype)


Scores, Softmax = Callable[[Tensor, Tensor, Any], Tensor], Callable[[Tensor, Tensor], Tensor]
Hidden = Callable[[Tensor, Tensor], Tensor]


def of_product(scores: Scores, hidden: Hidden, softmax: Softmax) -> Callable[..., Tensor]:
    def pattern(q: Tensor, k: Tensor, scale: Any, mask: Tensor) -> Tensor:
        return softmax(hidden(scores(q, k, scale), mask), q)

    return pattern


def of_scores(hidden: Hidden, softmax: Softmax) -> Callable[..., Tensor]:
    def pattern(scores: Tensor, mask: Tensor, like: Tensor) -> Tensor:
        return softmax(hidden(scores, mask), like)

    def without(scores: Tensor, mask: Tensor) -> Tensor:
        return softmax(hidden(scores, mask), scores)

    return without if softmax is plain_softmax else pattern


def called(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    return masked_softmax(torch.matmul(q, k), mask, scale)


def infix(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    return masked_softmax(q @ k, mask, scale)


def given(scores: Tensor, mask: Tensor) -> Tensor:
    return masked_softmax(scores, mask)


def called_keeping(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    return masked_softmax(torch.matmul(q, k), scale=scale, keep=mask)


def infix_keeping(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    return masked_softmax(q @ k, scale=scale, keep=mask)


def given_keeping(scores: Tensor, mask: Tensor) -> Tensor:
    return masked_softmax(scores, keep=mask)


# The replacements for a mask that is added, and for one that hides.
ADDING, KEEPING = (called, infix, given), (called_keeping, infix_keeping, given_keeping)
HIDDEN: list[Hidden] = [added_if_given, *MASKS]
SOFTMAX: list[Softmax] = [plain_softmax, float32_softmax, upcast_softmax]
SCALED = {
    of_product(scores, hidden, softmax): (scores, hidden)
    for scores, hidden, softmax in itertools.product((scaled, divided), HIDDEN, SOFTMAX)
}
UNSCALED = {
    of_scores(hidden, softmax): hidden for hidden, softmax in itertools.product(HIDDEN, SOFTMAX)
}

MODEL = """\
import math

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.0)
        self.heads = heads

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        if mask is not None:
            scores = scores + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        y = self.drop(weights) @ v
        return y.transpose(1, 2).reshape(B, T, C), weights
"""
SCALED_SCORES = MODEL[MODEL.index("        scores =") : MODEL.index("        weights =")]
BIASED = """\
        scores = q @ k.transpose(-2, -1) + x.mean()
        scores = scores.masked_fill(mask, float("-inf"))
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Attention(16, 4)


def inputs(model):
    return {"x": torch.randn(2, 6, 16), "mask": torch.randn(2, 1, 6, 6)}


def loss(outputs):
    return sum(output.square().mean() for output in outputs)


def schedule(s):
    s.apply("masked_softmax")
"""


class MaskedSoftmax(Rule):
    """Scale, mask and softmax attention scores in one kernel, forward and backward.

    If no other code uses the attention weights, `sdpa` saves more.

    Rewrite:
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        if mask is not None:
            scores = scores + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        -->
        weights = masked_softmax(q @ k.transpose(-2, -1), mask, 1.0 / math.sqrt(k.size(-1)))

    Shapes: scores (B, N, T, S), mask like (B, N, T, S) or None -> (B, N, T, S)

    Numerics:
        Reassociated: float32 inside; the weights have the dtype of the scores. A row whose tokens
        are all masked is NaN, as before.

    State: Unchanged.

    Raises:
        SR309 another softmax, scores that are used elsewhere too, or an attention function that
        this model does not use.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
    """

    name = "masked_softmax"
    numerics = Numerics.REASSOCIATED
    conditions = BY_KERNEL
    pays = "reads and writes the scores, (B, N, T, S), once in the place of three times"
    rank = 15
    alternatives = (
        *(Alternative(pattern, called) for pattern in SCALED),
        *(Alternative(pattern, given) for pattern in UNSCALED),
    )
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
-import torch
-from torch.nn import functional as F
+from .kernels import masked_softmax
-        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
-        if mask is not None:
-            scores = scores + mask
-        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
+        weights = masked_softmax(
+            q @ k.transpose(-2, -1), mask, 1.0 / math.sqrt(k.size(-1))
+        )
""",
        ),
        Example(
            MODEL.replace(SCALED_SCORES, BIASED),
            SCHEDULE.replace("torch.randn(2, 1, 6, 6)", "torch.ones(6, 6).triu(1) > 0"),
            """\
-import torch
-from torch.nn import functional as F
+from .kernels import masked_softmax
-        scores = scores.masked_fill(mask, float("-inf"))
-        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
+        weights = masked_softmax(scores, keep=~mask)
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("dim=-1", "dim=-2"), SCHEDULE, "SR309"),
        Refusal(MODEL.replace(".to(q.dtype)", ""), SCHEDULE, "SR309"),
        Refusal(
            MODEL.replace("y = self", "weights = weights + scores\n        y = self"),
            SCHEDULE,
            "SR309",
        ),
    )

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses a function that is not used, and an added number."""
        if found.is_number("mask"):
            return "what is added is a number"
        kind = found.attribute("config._attn_implementation")
        if found.match.function == "eager_attention_forward" and kind not in (None, "eager"):
            return f"the model attends by {kind!r}, and not by `eager_attention_forward`"
        return None

    def replacement(self, found: RuleMatch) -> Callable[..., Any]:
        """The kernel's call around the product of queries and keys, in the original's notation."""
        adding = hidden_by(found) in (added, added_if_given)
        in_one_call, between, alone = ADDING if adding else KEEPING
        if found.alternative.pattern not in SCALED:
            return alone
        product = next(node for node in found.match.nodes if node.operation == "matmul")
        return between if isinstance(product.node, ast.BinOp) else in_one_call

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The operands, with a mask in the form that the kernel takes."""
        operands, hidden = dict(found.operands), hidden_by(found)
        if hidden not in (added, added_if_given):
            operands["mask"] = MASKS[hidden].format(parenthesised(operands["mask"]))
        if SCALED.get(found.alternative.pattern, (None, None))[0] is divided:
            operands["scale"] = f"1.0 / {parenthesised(operands['scale'])}"
        return operands


def hidden_by(found: RuleMatch) -> Hidden:
    """The function by which the mask is applied to scores."""
    pattern = found.alternative.pattern
    return SCALED[pattern][1] if pattern in SCALED else UNSCALED[pattern]
