"""`infer_sync`: adds the collectives that are missing among sharded modules."""

from __future__ import annotations

from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.state import ModuleRequests, Wish
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive
from slapo_rewrite.primitives.shard import SAMPLE


class InferSync(Primitive):
    """Add the collectives that are missing among the shards of a module and below it.

    It follows the placement of each value in `forward`. A layer whose input gradient is a partial
    sum gets `sync("bwd_post", "all_reduce")`. A layer whose partial sums are needed in full gets
    `sync("fwd_post", "all_reduce")`; one whose shards are needed in full, by a reduction or as the
    model's output, gets `sync("fwd_post", "all_gather", axis=-1)`. An embedding's table that is the
    head as well, `x @ self.embedding.weight.T`, yields full logits.

    If several layers read one value, such as queries, keys and values, its gradient is all-reduced
    once for all of them: by the module around them, or at the value.

    If the collective cannot be at a module's input or output, a value inside `forward` or another
    method gets it, as by `sync(..., of=...)`: keys that all heads share, weights of experts. Each
    rank slices a replicated value without gradient that meets a shard, as a bias for each head.

    The call may precede the shards. Modules with a `sync` of their own keep it, and collectives of
    enclosing modules count. `slapo-rewrite explain` shows what was inferred.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        -->
        self.up = ColumnParallelLinear(width, 4 * width)
        self.down = RowParallelLinear(4 * width, width)

    Shapes: As the collectives change them.
    Numerics: Reassociated.
    State: Unchanged.

    Raises:
        SR104 a value whose placement does not fit, even with all collectives that can be inferred;
        SR305 a model that cannot be analysed, or a module with `infer_sync` already.

    Source: the placement of collectives is that of Megatron-LM, arXiv 1909.08053.
    """

    name = "infer_sync"
    examples = (
        SAMPLE.example(
            """\
s["up"].shard(["weight", "bias"], axis=0)
s["down"].shard("weight", axis=1)
s.infer_sync()
""",
            """\
+from .tensor_parallel import ColumnParallelLinear, RowParallelLinear
-        self.up = nn.Linear(width, 4 * width)
-        self.down = nn.Linear(4 * width, width)
+        self.up = ColumnParallelLinear(width, 4 * width)
+        self.down = RowParallelLinear(4 * width, width)
""",
        ),
        SAMPLE.example(
            """\
s["down"].shard(["weight", "bias"], axis=0)
s.infer_sync()
""",
            """\
+from .tensor_parallel import ColumnParallelLinear
-        self.down = nn.Linear(4 * width, width)
+        self.down = ColumnParallelLinear(4 * width, width, gather_output=True)
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR104", 's["down"].shard("weight", axis=1)', "s.infer_sync()"),
        SAMPLE.refused("SR305", "s.infer_sync()", "s.infer_sync()"),
        SAMPLE.refused("SR206", 's.infer_sync("bwd_post")'),
    )

    @staticmethod
    def takes() -> None:
        """`infer_sync()`."""

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Marks the module: collectives below it are inferred once all shards are known."""
        if state.infer_sync is not None:
            raise errors.Unsupported(
                f"the syncs of {node.shown} are already inferred", cause=state.infer_sync.cause
            )
        return replace(state, infer_sync=Wish(call.directive))
