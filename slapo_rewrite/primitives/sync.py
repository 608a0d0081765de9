"""`sync`: a collective at a module's border."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.edit.state import ModuleState
from slapo_rewrite.edit.state import Sync as SyncState
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import (
    Call,
    Example,
    Primitive,
    Refusal,
    function_of,
    signature_of,
)
from slapo_rewrite.primitives.shard import MLP, MODEL

MODES = ("fwd_pre", "fwd_post", "bwd_post")
OPERATIONS = ("all_reduce", "all_gather")


class Sync(Primitive):
    """Communicate at a module's border: before it, after it, or after its backward pass.

    `fwd_post all_reduce` adds up partial sums; `fwd_post all_gather(axis=-1)` joins partitions;
    `bwd_post all_reduce` adds up the gradient of the module's input. A row-parallel linear reduces
    before its bias is added. A function (a forward pre-hook, forward hook or full backward hook, by
    `mode`) is copied into the output or imported there.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        -->
        self.up = ColumnParallelLinear(width, 4 * width, gather_output=True)

    Shapes:
        all_reduce: unchanged. all_gather: the partitioned axis has its full size again.

    Numerics:
        Reassociated.

    State:
        Unchanged.

    Raises:
        SR206 an unknown mode or operation; SR304 an operation that does not fit: an all-reduce of a
        partition, an all-gather of a partial sum, the same twice; SR305 an operation that is not
        available.

    Source: Slapo, documentation of `sync`, its five cases.
    """

    name = "sync"
    examples = (
        Example(
            MLP,
            MODEL
            + """\
def schedule(s):
    s["up"].shard(["weight", "bias"], axis=0)
    s["up"].sync("bwd_post", "all_reduce")
    s["up"].sync("fwd_post", "all_gather", axis=-1)
""",
            """\
+from .tensor_parallel import ColumnParallelLinear
-        self.up = nn.Linear(width, 4 * width)
+        self.up = ColumnParallelLinear(width, 4 * width, gather_output=True)
""",
        ),
    )
    refusals = (
        Refusal(
            MLP,
            MODEL
            + 'def schedule(s):\n    s["up"].shard(["weight", "bias"], axis=0)\n'
            + '    s["up"].sync("fwd_post", "all_reduce")\n',
            "SR304",
        ),
        Refusal(
            MLP,
            MODEL
            + 'def schedule(s):\n    s["down"].shard("weight", axis=1)\n'
            + '    s["down"].sync("fwd_post", "all_gather", axis=-1)\n',
            "SR304",
        ),
        Refusal(MLP, MODEL + 'def schedule(s):\n    s["up"].sync("fwd", "all_reduce")\n', "SR206"),
    )

    def signature(self) -> inspect.Signature:
        """`sync(mode, sync_op_or_fn, *, axis=None, tensor_parallel_output_grad=False)`."""

        def sync(
            mode: str,
            sync_op_or_fn: str | Callable[..., Any],
            *,
            axis: int | None = None,
            tensor_parallel_output_grad: bool = False,
        ) -> None: ...

        return signature_of(sync)

    def apply(self, call: Call, node: Node, state: ModuleState) -> ModuleState:
        """Adds the collective; whether it fits the module's shards is judged when all are known."""
        at, arguments = call.directive.at, call.arguments
        mode, operation, axis = arguments["mode"], arguments["sync_op_or_fn"], arguments["axis"]
        if mode not in MODES:
            raise errors.BadArgument(
                f"`{mode}` is no mode of `sync`",
                at=at,
                hint=errors.did_you_mean(str(mode), MODES) or "the modes are " + ", ".join(MODES),
            )
        if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
            raise errors.BadArgument(f"`axis` must be a whole number, not {axis!r}", at=at)
        if isinstance(operation, str):
            if operation not in OPERATIONS:
                raise errors.Unsupported(
                    f"`sync` does not offer `{operation}`",
                    at=at,
                    hint=errors.did_you_mean(operation, OPERATIONS)
                    or f"it offers {' and '.join(OPERATIONS)}, or a function of your own",
                )
            if operation == "all_gather" and axis is None:
                raise errors.BadArgument("`all_gather` needs an axis", at=at, hint="write axis=-1")
            if operation == "all_reduce" and axis is not None:
                raise errors.BadArgument("`all_reduce` takes no axis", at=at)
            if (mode, operation) in (("bwd_post", "all_gather"), ("fwd_pre", "all_reduce")):
                raise errors.Unsupported(f"`{mode}` cannot be combined with `{operation}`", at=at)
            chosen: Any = operation
        else:
            chosen = function_of(call, operation, "a sync function")
        for earlier in state.syncs:
            if (earlier.mode, earlier.op) == (mode, chosen):
                raise errors.SyncMismatch(
                    f"`{node.path}` has this sync already",
                    at=at,
                    also=[earlier.cause.at] if earlier.cause.at else [],
                )
        added = SyncState(
            mode, chosen, axis, bool(arguments["tensor_parallel_output_grad"]), call.directive
        )
        return replace(state, syncs=(*state.syncs, added))
