"""`infer_sync`: the collectives that are missing among sharded modules."""

from __future__ import annotations

from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.state import ModuleRequests, Wish
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive
from slapo_rewrite.primitives.shard import SAMPLE


class InferSync(Primitive):
    """Write the collectives that are missing among the shards of a module and below it.

    Each value in `forward` is followed: where nothing adds up a gradient, the layer gets
    `sync("bwd_post", "all_reduce")`; a layer whose partial sums are needed whole gets
    `sync("fwd_post", "all_reduce")`; one whose partitions are needed whole, by a reduction or as
    the model's output, gets `sync("fwd_post", "all_gather", axis=-1)`. An embedding's table that
    is the head as well, `x @ self.embedding.weight.T`, gives whole logits.

    Where several layers read one value, queries, keys and values say, its gradient is added up once
    for all of them: by the module around them, or at the value.

    Where no module's border is the place, a value inside `forward` or another method gets the
    collective, as by `sync(..., of=...)`: keys that all heads share, the weights of experts. Of a
    whole value without gradient that meets a part, a bias of each head say, a rank takes its slice.

    The call may stand before the shards that it is about. What a `sync` states is left alone, and
    stated collectives of the modules around count. `slapo-rewrite explain` shows what was inferred.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        -->
        self.up = ColumnParallelLinear(width, 4 * width)
        self.down = RowParallelLinear(4 * width, width)

    Shapes: As the collectives leave them.
    Numerics: Reassociated.
    State: Unchanged.

    Raises:
        SR104 a value that does not fit although everything that could be inferred is there; SR305 a
        model that cannot be followed, or a module whose collectives are inferred already.

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
        """Leaves the collectives of the module and below it open, until all shards are known."""
        if state.infer_sync is not None:
            raise errors.Unsupported(
                f"the syncs of {node.shown} are inferred already", cause=state.infer_sync.cause
            )
        return replace(state, infer_sync=Wish(call.directive))
