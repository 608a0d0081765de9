"""Replaces attention that is written out in tensor operations by torch's own operation.

Shapes: B batch, N heads, T tokens, S tokens attended to, H channels of a head.
"""

import ast
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.code.build import parenthesised
from slapo_rewrite.fusion import (
    Alternative,
    Calling,
    Conditions,
    Example,
    Numerics,
    Refusal,
    Rule,
    RuleMatch,
    Twice,
    layout_reader,
    share_dropped,
)
from slapo_rewrite.patterns.value_graph import Value


def scaled(q: Tensor, k: Tensor, scale: Any) -> Tensor:
    return torch.matmul(q, k.transpose(-2, -1)) * scale


def divided(q: Tensor, k: Tensor, scale: Any) -> Tensor:
    return torch.matmul(q, k.transpose(-2, -1)) / scale


def added(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + mask


def hidden_where_zero(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask == 0, float("-inf"))


def hidden_where_true(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, float("-inf"))


def hidden_where_false(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, float("-inf"))


def softmax(scores: Tensor, q: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1)


def float32_softmax(scores: Tensor, q: Tensor) -> Tensor:
    return F.softmax(scores.float(), dim=-1).type_as(q)


Scores, Softmax = Callable[[Tensor, Tensor, Any], Tensor], Callable[[Tensor, Tensor], Tensor]


def unmasked(scores: Scores, softmax: Softmax) -> list[Callable[..., Tensor]]:
    def with_dropout(
        q: Tensor, k: Tensor, v: Tensor, scale: Any, p: float, training: bool
    ) -> Tensor:
        return torch.matmul(F.dropout(softmax(scores(q, k, scale), q), p, training), v)

    def without(q: Tensor, k: Tensor, v: Tensor, scale: Any) -> Tensor:
        return torch.matmul(softmax(scores(q, k, scale), q), v)

    return [with_dropout, without]


def masked(
    scores: Scores, hidden: Callable[[Tensor, Tensor], Tensor], softmax: Softmax
) -> list[Callable[..., Tensor]]:
    def with_dropout(
        q: Tensor, k: Tensor, v: Tensor, scale: Any, mask: Tensor, p: float, training: bool
    ) -> Tensor:
        weights = softmax(hidden(scores(q, k, scale), mask), q)
        return torch.matmul(F.dropout(weights, p, training), v)

    def without(q: Tensor, k: Tensor, v: Tensor, scale: Any, mask: Tensor) -> Tensor:
        return torch.matmul(softmax(hidden(scores(q, k, scale), mask), q), v)

    return [with_dropout, without]


# The source text of a mask for the operation, in which true means visible.
MASKS: dict[Callable[..., Tensor], str] = {
    hidden_where_zero: "{} != 0",
    hidden_where_false: "{}",
    hidden_where_true: "~{}",
}
# Methods that change the dtype of a mask.
CASTS = ("bool", "to", "byte", "float", "int", "type")
# Operations that always return floating point; then those that do for floating-point inputs.
FLOATING = {"embedding", "softmax", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt"}
PASSING = {"view", "reshape", "permute", "transpose", "expand", "unsqueeze", "contiguous", "item"}
PASSING |= {"neg", "clone", "detach", "masked_fill", "tril", "triu", "repeat"}
SPELLINGS = list(itertools.product((scaled, divided), (softmax, float32_softmax)))
PATTERNS = {
    pattern: (scores, hidden)
    for hidden in (added, *MASKS, None)
    for scores, weights in SPELLINGS
    for pattern in (masked(scores, hidden, weights) if hidden else unmasked(scores, weights))
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
        self.register_buffer("seen", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        # No token sees what comes after it.
        scores = scores.masked_fill(self.seen[:, :, :T, :T] == 0, float("-inf"))
        weights = self.drop(F.softmax(scores, dim=-1))
        y = weights @ v  # (B, N, T, H)
        return y.transpose(1, 2).reshape(B, T, C)
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Attention(16, 4)


def inputs(model):
    return {"x": torch.randn(2, 6, 16)}


def loss(outputs):
    return outputs.square().mean()


def schedule(s):
    s.apply("sdpa")
"""


class Sdpa(Rule):
    """Compute attention by torch's `scaled_dot_product_attention`.

    A mask that is constructed as a lower triangle, sliced to the tokens, becomes `is_causal`. An
    added mask that may be boolean is cast to the queries' dtype: added, true is 1, but for the
    operation true means visible.

    Rewrite:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        y = self.drop(F.softmax(scores + mask, dim=-1)) @ v
        -->
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask.to(q.dtype),
            dropout_p=self.drop.p if self.drop.training else 0.0,
        )

    Shapes:
        q (B, N, T, H), k and v (B, N, S, H), mask like (T, S) or (B, N, T, S) -> (B, N, T, H)

    Numerics:
        Reseeded: dropout draws other numbers; without it, the same formula, rounded differently. A
        row whose tokens are all masked was NaN before, and may now be zero; if a large number masks
        them, some of torch's kernels compute other gradients for its queries and keys.

    State: Unchanged: a mask's buffer stays.

    Raises:
        SR309 the weights are used elsewhere too, or are not a plain softmax of scaled products.

    Source: Dao et al. 2022, arXiv:2205.14135; torch.nn.functional.scaled_dot_product_attention.
    """

    name = "sdpa"
    numerics = Numerics.RESEEDED
    conditions = Conditions(Twice.NEVER)
    pays = "the scores, (B, N, T, S), are never written to memory"
    rank = 90
    alternatives = tuple(map(Alternative, PATTERNS))
    functions = (F.scaled_dot_product_attention,)
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
-import math
-        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
-        scores = scores.masked_fill(self.seen[:, :, :T, :T] == 0, float("-inf"))
-        weights = self.drop(F.softmax(scores, dim=-1))
-        y = weights @ v  # (B, N, T, H)
+        y = F.scaled_dot_product_attention(
+            q,
+            k,
+            v,
+            dropout_p=self.drop.p if self.drop.training else 0.0,
+            is_causal=T > 1,
+        )  # (B, N, T, H)
""",
        ),
    )
    refusals = (
        Refusal(
            MODEL.replace("(1.0 / math.sqrt(k.size(-1)))", "self.seen[0, 0, 0, 0]"),
            SCHEDULE,
            "SR309",
        ),
        Refusal(MODEL.replace("return y.", "return weights.sum() * y."), SCHEDULE, "SR309"),
        Refusal(MODEL.replace("dim=-1", "dim=-2"), SCHEDULE, "SR309"),
    )

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses a tensor as the scale, a number as the mask, and other uses of the result."""
        if not is_plain_number(found):
            return "the scale may be a tensor"
        if found.is_number("mask"):
            return "what is added is a number"
        given = found.match.root.site
        if found.graph.overwritten([given], given.order) is not None:
            return "what it gives is written to, and the operation needs it to go back"
        if (reader := layout_reader(given)) is not None:
            return f"`{reader}` reads how its result lies in memory, which is another way then"
        mask = found.live("mask") if "mask" in found.match.values else None
        if isinstance(mask, Tensor) and mask.dim() < 2:
            return "torch takes no mask of one axis"
        if PATTERNS[found.alternative.pattern][1] is added and added_mask(found) is None:
            return "what is added may be boolean, and nothing there has a name to cast it like"
        return None

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the operation, with the needed keywords."""
        given = self.operands(found)
        keywords = ("attn_mask", "dropout_p", "is_causal", "scale")
        return Calling.of(F.scaled_dot_product_attention, ("q", "k", "v"), keywords, given)

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The source texts of the arguments, without torch's defaults."""
        scores, hidden = PATTERNS[found.alternative.pattern]
        given = dict(found.operands)
        seen = hidden in (hidden_where_zero, hidden_where_false)
        if seen and (causal := causal_where(found)) is not None:
            given["is_causal"] = causal
        elif hidden is added:
            given["attn_mask"] = added_mask(found) or given["mask"]
        elif hidden is not None:
            given["attn_mask"] = MASKS[hidden].format(parenthesised(given["mask"]))
        if "p" in given and given["training"] != "False" and given["p"] not in ("0", "0.0"):
            given["dropout_p"] = share_dropped(given["p"], given["training"])
        if scores is divided:
            given["scale"] = f"1.0 / {parenthesised(given['scale'])}"
        if is_usual(given["scale"], given["q"], given["k"]):
            del given["scale"]
        return given


def is_plain_number(found: RuleMatch) -> bool:
    """Whether the scale is known to be a number."""
    scale = found.value("scale")
    if scale.operation == "parameter":
        return isinstance(scale.node, ast.arg) and ast.unparse(
            scale.node.annotation or scale.node
        ) in ("float", "int")
    return scale.number or (scale.is_leaf and not isinstance(found.live("scale"), Tensor))


def added_mask(found: RuleMatch) -> str | None:
    """The source text of an added mask in floating point; None if it cannot be written."""
    mask = found.operands["mask"]
    if is_floating(found.value("mask"), found):
        return mask
    like = next((n for n in ("q", "k", "v") if found.operands[n].isidentifier()), None)
    return f"{parenthesised(mask)}.to({found.operands[like]}.dtype)" if like else None


def is_floating(value: Value, found: RuleMatch) -> bool:
    """Whether a value is known to be floating point."""
    first = [argument for _, argument in value.arguments[:2]]
    match value.operation:
        case "constant":
            return isinstance(value.literal, float)
        case "attribute":
            live = found.attribute(str(value.literal))
            return isinstance(live, Tensor) and live.is_floating_point()
        case "add" | "sub" | "mul":
            return any(is_floating(argument, found) for argument in first)
        case "where":
            return any(is_floating(argument, found) for _, argument in value.arguments[1:])
        case "to":
            return first[1].literal == "torch.float32"  # queries may have another half dtype
        case name if name in PASSING:
            return is_floating(first[0], found)
    return value.operation in FLOATING


def is_usual(scale: str, q: str, k: str) -> bool:
    """Whether a scale is torch's default, one over the square root of the head's size."""
    sizes = [f"{x}{size}" for x in (q, k) for size in (".size(-1)", ".shape[-1]", ".size(dim=-1)")]
    text = ast.unparse(ast.parse(scale, mode="eval"))
    for size in sizes:
        if text in (f"{size} ** (-0.5)", f"1 / {size} ** 0.5", f"1.0 / {size} ** 0.5"):
            return True
        if re.fullmatch(rf"1(\.0)? / (math|np|numpy)\.sqrt\({re.escape(size)}\)", text):
            return True
    return False


def causal_where(found: RuleMatch) -> str | None:
    """The expression for `is_causal`; None if the mask may not be causal.

    A causal mask is a buffer that is made as a lower triangle, sliced to the first tokens. For one
    token it hides nothing, however many keys there are, as with a cache.
    """
    mask = found.value("mask")
    match mask.node:
        case ast.Subscript(
            value=ast.Attribute(value=ast.Name("self"), attr=name),
            slice=ast.Tuple(
                elts=[
                    *_,
                    ast.Slice(None, ast.Name(tokens) as read, None),
                    ast.Slice(None, ast.Name(others), None),
                ]
            ),
        ) if tokens == others and found.holds(read):
            made = found.buffer(name)
            return f"{tokens} > 1" if made is not None and is_lower_triangle(made) else None
    return None


def is_lower_triangle(made: ast.expr) -> bool:
    """Whether an expression is `torch.tril(torch.ones(n, n))`, with other axes before or dtype."""
    match made:
        case ast.Call(func=ast.Attribute(ast.Name("torch"), "tril"), args=[full], keywords=[]):
            return bool(sizes(full))
        case ast.Call(func=ast.Attribute(inner, "view" | "reshape"), args=args):
            return is_lower_triangle(inner) and [ast.unparse(a) for a in args[-2:]] == sizes(inner)
        case ast.Call(func=ast.Attribute(inner, "unsqueeze"), args=[ast.Constant(0)]):
            return is_lower_triangle(inner)
        case ast.Call(func=ast.Attribute(inner, method)) if method in CASTS:
            return is_lower_triangle(inner)
        case ast.Subscript(inner, ast.Tuple(elts)):
            axes = " ".join(map(ast.unparse, elts))
            return bool(re.fullmatch(r"(None ?)*(: :|\.\.\.)?", axes)) and is_lower_triangle(inner)
    return False


def sizes(made: ast.expr) -> list[str]:
    """The last two sizes of the `torch.ones` that a mask is made from; empty without one."""
    match made:
        case ast.Call(func=ast.Attribute(ast.Name("torch"), "ones"), args=[ast.Tuple(elts=given)]):
            return [ast.unparse(size) for size in given[-2:]]
        case ast.Call(func=ast.Attribute(ast.Name("torch"), "ones"), args=given):
            return [ast.unparse(size) for size in given[-2:]]
        case ast.Call(func=ast.Attribute(ast.Name("torch"), "tril"), args=[full]):
            return sizes(full)
        case ast.Call(func=ast.Attribute(inner)) | ast.Subscript(inner):
            return sizes(inner)
    return []
