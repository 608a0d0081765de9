"""`decompose`: adds a linear layer's bias where the layer is called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.state import ModuleRequests, Wish
from slapo_rewrite.examples import Sample
from slapo_rewrite.model.layers import MULTIPLIED, qualified
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import check_uncalled
from slapo_rewrite.primitives.base import Call, Primitive
from slapo_rewrite.primitives.shard import MLP, MODEL, SAMPLE


class Decompose(Primitive):
    """Add a linear layer's bias separately, so that the addition can be fused with what follows.

    Each call of the layer by its parent module is replaced by the product with the weight and the
    addition of the bias. For a sharded layer its collectives are written there as well: a full bias
    is added after the all-reduce. The construction of the layer does not change. A layer that is
    not sharded is still called if it gets hooks or an adapter at run time.

    Rewrite:
        return self.down(torch.relu(self.up(x)))
        -->
        return self.down(torch.relu(linear_product(x, self.up) + self.up.bias))

    Shapes: Unchanged.

    Numerics:
        Reassociated: the product is rounded before the bias is added. Under autocast the sum has
        the bias's type.

    State: Unchanged.

    Raises:
        SR305 a module that is not a linear layer, has no bias, is not called by name, has hooks or
        a parametrization, or a collective that leaves its output incomplete; SR306 a layer that is
        decomposed already.

    Source: Slapo, arXiv 2302.08005, section 3.3.
    """

    name = "decompose"
    examples = (
        SAMPLE.example(
            's["up"].decompose()',
            """\
+from .kernels import linear_product
-        return self.down(torch.relu(self.up(x)))
+        return self.down(torch.relu(linear_product(x, self.up) + self.up.bias))
""",
        ),
        SAMPLE.example(
            """\
s["up"].shard(["weight", "bias"], axis=0)
s["up"].sync("bwd_post", "all_reduce")
s["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce").decompose()
""",
            """\
+from .tensor_parallel import ColumnParallelLinear, RowParallelLinear, all_reduce
-        self.up = nn.Linear(width, 4 * width)
-        self.down = nn.Linear(4 * width, width)
+        self.up = ColumnParallelLinear(width, 4 * width)
+        self.down = RowParallelLinear(4 * width, width)
-        return self.down(torch.relu(self.up(x)))
+        return (
+            all_reduce(nn.functional.linear(torch.relu(self.up(x)), self.down.weight))
+            + self.down.bias
+        )
""",
        ),
    )
    refusals = (
        Sample(MLP.replace("width)\n\n", "width, bias=False)\n\n"), MODEL).refused(
            "SR305", 's["down"].decompose()'
        ),
        SAMPLE.refused("SR305", "s.decompose()"),
        SAMPLE.refused("SR306", 's["up"].decompose()', 's["up"].decompose()'),
    )

    @staticmethod
    def takes() -> None:
        """`decompose()`."""

    def targets(self, call: Call, nodes: list[Node]) -> Iterable[Node]:
        """The layers; refuses those whose call does more than `forward`, which would be lost."""
        for node in nodes:
            check_uncalled(node.path or "s", node.live)
        return nodes

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Marks the layer."""
        if qualified(node.cls) not in MULTIPLIED:
            raise errors.Unsupported(
                f"{node.shown} is a {node.cls.__name__}, not a linear layer",
                hint="select a Linear or transformers' Conv1D",
            )
        if "bias" not in node.parameters:
            raise errors.Unsupported(f"{node.shown} has no bias")
        if state.decompose is not None:
            earlier = state.decompose.cause
            raise errors.ConflictingEdits(f"{node.shown} is already decomposed", cause=earlier)
        return replace(state, decompose=Wish(call.directive))
