"""`checkpoint`: recomputes a module's activations in the backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.around_forward import Recompute
from slapo_rewrite.changes.regions import RecomputeRegion
from slapo_rewrite.changes.save_policy import SavePolicy
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.examples import Sample, setting
from slapo_rewrite.model.operation_names import UnknownOperation, operations
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import (
    Call,
    Chosen,
    Primitive,
    check_called,
    function_of,
    subgraph_of,
)

STACK = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""

MODEL = setting("Stack(8, depth=4)")
SAMPLE = Sample(STACK, MODEL)

# The arguments that describe the step which has to fit a budget.
OF_STEP = ("batch", "sequence", "precision", "micro_batches", "zero", "replicas", "ranks")


class Checkpoint(Primitive):
    """Keep only a module's inputs, and recompute its activations in the backward pass.

    Non-reentrant, so keyword arguments stay keywords and inputs need no gradient. Recomputation
    draws the same random numbers of torch, Python and NumPy. A key-value cache that a layer would
    fill twice is not passed on in training. Inputs that may be left out, and that change before the
    backward pass, raise an error when the layer runs.

    `subgraph` selects a part of `forward`, by the calls in it: a list of names, or a regular
    expression for them (`attention`, `layer.0` for `self.layer[0](...)`). The smallest run of
    statements with these calls becomes a method, called `name`; a single call is checkpointed where
    it is. `save` names operations of torch whose results are kept nevertheless, or is a policy as
    for `torch.utils.checkpoint.create_selective_checkpoint_contexts`; random operations are always
    recomputed.

    `budget` chooses what to recompute among the selected layers, elements of lists, and the modules
    inside them, so that a training step fits into so much memory at the least predicted time.
    A step has `micro_batches` micro-batches, each of `batch` rows of `sequence` tokens (those of
    `inputs(model)`, if nothing is given). It is trained in `precision` with DeepSpeed's Adam and
    stage `zero` of ZeRO over `replicas`. The budget is one GPU's. Without `ranks` this GPU holds
    whole layers. With `ranks` it is one of so many that share them as the whole schedule says;
    fusion and other recomputation are counted too. `explain` says what was chosen, and how much
    memory is predicted.

    Rewrite:
        nn.ModuleList([Block(width) for _ in range(depth)])
        -->
        nn.ModuleList(
            [CheckpointedBlock(width) if i < depth // 2 else Block(width) for i in range(depth)]
        )
        with a subclass `CheckpointedBlock` of `Block`, for `blocks[:0.5].checkpoint()`

    Shapes: Unchanged.
    Numerics: Exact.
    State: Unchanged; no parameter is renamed.

    Raises:
        SR305 a module list (select its elements), a module checkpointed already, a part that
        returns, leaves a loop or changes its inputs in place, inputs that the caller changes in
        place afterwards, code that computes something else the second time (random numbers of a
        generator or of the system, an iterator); SR202 calls that no method makes, an unknown
        operation; SR206 invalid arguments; SR306 parts that overlap, a budget beside stages,
        before `autocast`, or after it for a step in half precision; SR605 a budget that nothing
        fits.

    Source: Chen et al., arXiv 1604.06174; torch.utils.checkpoint.
    """

    name = "checkpoint"
    examples = (
        SAMPLE.example(
            's["blocks"][:0.5].checkpoint()',
            """\
+from torch.utils.checkpoint import checkpoint
+class CheckpointedBlock(Block):
+    \"\"\"A `Block` that recomputes its activations in the backward pass.\"\"\"
+    def forward(self, *args, **kwargs):
+        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
-        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
+        self.blocks = nn.ModuleList(
+            [
+                CheckpointedBlock(width) if i < depth // 2 else Block(width)
+                for i in range(depth)
+            ]
+        )
""",
        ),
        SAMPLE.example(
            's["blocks.*"].checkpoint(["linear"], save=["mm"])',
            """\
+from torch.utils.checkpoint import checkpoint
+from .recomputation import keep_results
+def keep_mm():
+    \"\"\"Tells checkpoints to keep results of `mm`.\"\"\"
+    return keep_results(torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
-        return x + torch.tanh(self.linear(x))
+        return x + torch.tanh(
+            checkpoint(self.linear, x, use_reentrant=False, context_fn=keep_mm)
+        )
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR605", 's["blocks.*"].checkpoint(budget="1B")'),
        SAMPLE.refused("SR206", 's["blocks.*"].checkpoint(zero=1)'),
        SAMPLE.refused("SR305", 's["blocks"].checkpoint()'),
        SAMPLE.refused("SR206", 's["blocks.*"].checkpoint(ratio=1)'),
        SAMPLE.refused("SR202", 's["blocks.*"].checkpoint(["linaer"])'),
        SAMPLE.refused("SR202", 's["blocks.*"].checkpoint(save=["mn"])'),
    )

    @staticmethod
    def takes(
        subgraph: str | Sequence[str] | None = None,
        order_args_fn: object = None,
        *,
        save: str | Sequence[str] | Callable[..., Any] | None = None,
        name: str | None = None,
        budget: str | None = None,
        batch: int | None = None,
        sequence: int | None = None,
        precision: str = "bf16",
        micro_batches: int = 1,
        zero: int = 0,
        replicas: int = 1,
        ranks: int = 1,
    ) -> None:
        """`checkpoint(subgraph=None, order_args_fn=None, *, save=None, budget=None, ...)`."""

    def choose(self, call: Call, nodes: list[Node]) -> Chosen:
        """The selected modules; with a budget, those of them that have to be recomputed."""
        self._check_step(call)
        if call.arguments["budget"] is None:
            return Chosen(nodes)
        for node in nodes:
            check_called(call, node)
        from slapo_rewrite.primitives.recompute_budget import fitted  # counts a step

        return fitted(call, nodes)

    def check_whole(self, call: Call) -> None:
        """Checks that a budget's step has the precision that the model computes in."""
        from slapo_rewrite.primitives.recompute_budget import check_casts_known

        check_casts_known(call)

    def _check_step(self, call: Call) -> None:
        given, parameters = call.arguments, inspect.signature(self.takes).parameters
        if given["budget"] is None:
            wrong = [name for name in OF_STEP if given[name] != parameters[name].default]
            words = "describes the step for a budget, but there is no budget"
        else:
            wrong = [name for name in ("subgraph", "save", "name") if given[name] is not None]
            words = "cannot be combined with a budget, which itself chooses what is recomputed"
        if wrong:
            raise errors.BadArgument(f"`{wrong[0]}` {words}")

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Marks the module, or a part of it, for recomputation."""
        check_called(call, node)
        if call.arguments["order_args_fn"] is not None:
            raise errors.BadArgument(
                "leave the argument out: positional and keyword arguments stay as they are",
                hint="remove `order_args_fn`",
            )
        part = subgraph_of(call)
        kept = kept_of(call)
        earlier = [cause for _, cause in state.asks(Recompute)]
        regions = state.asks(RecomputeRegion)
        earlier += [cause for region, cause in regions if part in (None, region.part)]
        if earlier:
            raise errors.Unsupported(f"{node.shown} is already checkpointed", cause=earlier)
        if part is not None:
            return state.asking(RecomputeRegion(part, kept), call.directive)
        if not node.path:
            raise errors.Unsupported(
                "the model itself cannot be checkpointed as a whole",
                hint="select modules inside it",
            )
        return state.asking(Recompute(kept), call.directive)


def kept_of(call: Call) -> SavePolicy:
    """The policy or the operations of a call's `save`."""
    given = call.arguments["save"]
    if given is None:
        return None
    if callable(given):
        policy = function_of(call, given, "a policy")
        try:
            inspect.signature(given).bind("ctx", "operation", 1, 2, keyword=3)
        except TypeError:
            raise errors.BadArgument(
                f"the policy `{policy.name}` must take a context, an operation and its arguments",
                hint=f"def {policy.name}(ctx, operation, *args, **kwargs): ...",
            ) from None
        return policy
    names = (given,) if isinstance(given, str) else given
    if not names:
        raise errors.BadArgument("`save` names nothing", hint="remove `save`")
    try:
        operations(names)
    except UnknownOperation as error:
        raise errors.UnknownPath(str(error), hint=error.hint) from None
    return tuple(dict.fromkeys(names))
