"""`fork_rng`: draws different random numbers on each tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_rewrite import errors
from slapo_rewrite.changes.around_forward import ForkRandom
from slapo_rewrite.changes.regions import ForkRegion
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.examples import Sample, setting
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive, check_called, subgraph_of

BLOCK = """\
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.p = p

    def forward(self, x):
        weights = F.dropout(x @ x.transpose(-2, -1), self.p, self.training)
        return weights @ self.linear(x)


class Block(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.attention = Attention(width, p)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return x + self.dropout(self.attention(x))
"""

SAMPLE = Sample(BLOCK, setting("Block(8, p=0.1)", '{"x": torch.randn(2, 5, 8)}'))


class ForkRng(Primitive):
    """Draw different random numbers on each tensor-parallel rank, inside a module.

    Elsewhere they are equal on all ranks, which dropout on full values needs. On shards, of heads
    for example, equal numbers would drop the same positions of each shard. After the module the
    random states of ranks are equal again, whatever each rank drew inside. Recomputation by
    `checkpoint` draws the same numbers, in either order of the two calls. Shards of uneven size
    need it: without it the rewrite warns of operations that draw random numbers for them.

    Rewrite:
        def forward(self, x):
        -->
        @fork_rng()
        def forward(self, x):
        or a subclass `Forked...`, for a class of another file or for some instances only; or for
        the part of `forward` with certain calls (`subgraph`, as in `checkpoint`), a block
        with fork_rng():

    Shapes: Unchanged.
    Numerics: Exact on one rank. On more ranks other random numbers, intentionally.
    State: Unchanged.

    Raises:
        SR305 a module list (select its elements), a module that has it already, or, in a sharded
        model, random numbers for a replicated value; SR202 calls that no method makes.

    Source: Slapo, arXiv 2302.08005; Megatron-LM, arXiv 1909.08053, appendix B.2.
    """

    name = "fork_rng"
    examples = (
        SAMPLE.example(
            's["attention"].fork_rng()',
            """\
+from .rng import fork_rng
+    @fork_rng()
""",
        ),
        SAMPLE.example(
            's["dropout"].fork_rng()',
            """\
+from .rng import fork_rng
+class ForkedDropout(nn.Dropout):
+    \"\"\"`nn.Dropout` with random numbers that differ between tensor-parallel ranks.\"\"\"
+    @fork_rng()
+    def forward(self, *args, **kwargs):
+        return super().forward(*args, **kwargs)
-        self.dropout = nn.Dropout(p)
+        self.dropout = ForkedDropout(p)
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR305", 's["dropout"].fork_rng()', 's["*"].fork_rng()'),
        SAMPLE.refused("SR206", 's["dropout"].fork_rng(seed=1)'),
    )

    @staticmethod
    def takes(subgraph: str | Sequence[str] | None = None) -> None:
        """`fork_rng(subgraph=None)`."""

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Marks the module."""
        check_called(call, node)
        part = subgraph_of(call)
        earlier = [cause for _, cause in state.asks(ForkRandom)]
        earlier += [cause for fork, cause in state.asks(ForkRegion) if fork.part == part]
        if earlier:
            raise errors.Unsupported(
                f"{node.shown} already has its own random numbers", cause=earlier
            )
        change = ForkRandom() if part is None else ForkRegion(part)
        return state.asking(change, call.directive)
