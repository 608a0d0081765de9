"""`autocast`: mixed precision, with its casts written into the source."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_rewrite import errors
from slapo_rewrite.changes.mixed_precision import CASTS, HalfPrecision
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.examples import Sample, setting
from slapo_rewrite.model.path_patterns import modules_at
from slapo_rewrite.model.tree import Node
from slapo_rewrite.operations import precision_of
from slapo_rewrite.primitives.base import Call, Primitive

BLOCK = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        scores = self.query(y) @ self.key(y).mT
        return x + self.out(F.softmax(scores, -1) @ y)


class Stack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = Block(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x, labels):
        x = self.block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
"""

MODEL = setting(
    "Stack(8)", '{"x": torch.randn(2, 5, 8), "labels": torch.randint(3, (2, 5))}', "outputs"
)
SAMPLE = Sample(BLOCK, MODEL)


class Autocast(Primitive):
    """Compute the products of modules in half precision, with every cast written into the source.

    Linear layers, convolutions, matrix products and attention compute in `dtype`; norms, softmax,
    losses, sums and means in float32, as under `torch.autocast` on a GPU; all other operations in
    the dtype of their inputs. Casts are only written where a value changes its precision. Types
    that torch promotes itself, as for a residual in float32, need none. Parameters and gradients
    stay in float32, so that weights, state dict and optimizer are the same. Selected modules may
    return half precision; other modules compute in float32.

    `keep` names what stays in float32: modules, by paths relative to the selected ones (a router, a
    head), or operations (`matmul`, `scaled_dot_product_attention`). Code that does not run in a
    training step and an eval step with `inputs(model)` gets no casts. With "float16" gradients may
    underflow: train with torch's `GradScaler`, sharded layers with `ShardedGradScaler`.

    Sharded layers stay sharded: all-reduces and gathers of a layer's output are then in half
    precision, while gradients of inputs are summed in float32.

    Rewrite:
        self.query = nn.Linear(width, width)
        ...
        return F.softmax(scores, -1) @ y
        -->
        self.query = BFloat16Linear(width, width)
        ...
        return F.softmax(scores.float(), -1).bfloat16() @ y.bfloat16()

    Shapes: Unchanged.

    Numerics:
        Approximate: products round to 8 bits (bfloat16) or 11 (float16). Exact without the casts.
        The error of every gradient is at most that under `torch.autocast`, up to chance.

    State: Unchanged, and in float32.

    Raises:
        SR305 an operation whose precision is not known, a value that changes its precision where
        no cast can be written, a `forward` that reads a dtype which would be a different one, a
        model that is in half precision already; SR202 an unknown name in `keep`; SR206 an unknown
        dtype; SR306 two dtypes in one model.

    Source: torch.amp, "CUDA Op-Specific Behavior"; Micikevicius et al., arXiv 1710.03740.
    """

    name = "autocast"
    needs_calls = False
    examples = (
        SAMPLE.example(
            "s.autocast()",
            """\
+from .mixed_precision import BFloat16Linear
-        self.query = nn.Linear(width, width)
-        self.key = nn.Linear(width, width)
-        self.out = nn.Linear(width, width)
+        self.query = BFloat16Linear(width, width)
+        self.key = BFloat16Linear(width, width)
+        self.out = BFloat16Linear(width, width)
-        return x + self.out(F.softmax(scores, -1) @ y)
+        return x + self.out(F.softmax(scores.float(), -1).bfloat16() @ y.bfloat16())
-        self.head = nn.Linear(width, 3)
+        self.head = BFloat16Linear(width, 3)
-        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
+        return F.cross_entropy(
+            self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten()
+        )
""",
        ),
        SAMPLE.example(
            's.autocast("float16", keep=["head", "block.key"])',
            """\
+from .mixed_precision import Float16Linear
-        self.query = nn.Linear(width, width)
+        self.query = Float16Linear(width, width)
-        self.out = nn.Linear(width, width)
+        self.out = Float16Linear(width, width)
-        scores = self.query(y) @ self.key(y).mT
-        return x + self.out(F.softmax(scores, -1) @ y)
+        scores = self.query(y) @ self.key(y).mT.half()
+        return x + self.out(F.softmax(scores.float(), -1).half() @ y.half())
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR206", 's.autocast("int8")'),
        SAMPLE.refused("SR202", 's.autocast(keep=["haed"])'),
        SAMPLE.refused("SR306", "s.autocast()", 's["block"].autocast("float16")'),
        Sample(
            BLOCK.replace("F.softmax(scores, -1)", "torch.where(scores.dtype == y.dtype, y, y).mT"),
            MODEL,
        ).refused("SR305", "s.autocast()"),
    )

    @staticmethod
    def takes(dtype: str = "bfloat16", keep: str | Sequence[str] = ()) -> None:
        """`autocast(dtype="bfloat16", keep=())`."""

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Marks the module."""
        dtype = call.arguments["dtype"]
        if dtype not in CASTS:
            raise errors.BadArgument(
                f"`dtype` is one of {', '.join(map(repr, CASTS))}, not {dtype!r}"
            )
        if earlier := [cause for _, cause in state.asks(HalfPrecision)]:
            raise errors.ConflictingEdits(
                f"{node.shown} already computes in half precision", cause=earlier
            )
        return state.asking(HalfPrecision(dtype, _kept(call, node)), call.directive)


def _kept(call: Call, node: Node) -> tuple[str, ...]:
    """The modules or operations that a call's `keep` names."""
    given = call.arguments["keep"]
    names = (given,) if isinstance(given, str) else given
    for name in names:
        if precision_of(name) is None and not modules_at(node, name):
            start = len(node.path) + 1 if node.path else 0
            known = [inner.path[start:] for inner in node.walk() if inner is not node]
            raise errors.UnknownPath(
                f"{node.shown} holds no module `{name}`, and there is no such operation",
                hint=errors.did_you_mean(name, known) or "name modules by path, as in s[...]",
            )
    return tuple(names)
