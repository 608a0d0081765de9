"""`sync`: adds a collective at a module's input, output or gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.changes.state import Sync as SyncState
from slapo_rewrite.examples import Sample, setting
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive, function_of
from slapo_rewrite.primitives.shard import SAMPLE

MODES = ("fwd_pre", "fwd_post", "bwd_post")
_LACKS = {
    "fwd_pre": "takes no argument {!r}",
    "fwd_post": "has a `forward` that binds no name {!r} beside its arguments",
    "bwd_post": "takes no argument {!r}, and its `forward` binds no such name",
}
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")
# Reshard strings: R is replicated, S sharded; the letters are the second last and the last axis.
LAYOUTS: dict[str, int | None] = {"RR": None, "RS": -1, "SR": -2}

CROSS = """\
from torch import nn


class Cross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own = nn.Linear(width, 4 * width)
        self.other = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, encoded=None):
        inner = self.own(x).sigmoid()
        if encoded is not None:
            inner = inner * self.other(encoded)
        return self.down(inner)
"""

CROSS_SAMPLE = Sample(
    CROSS, setting("Cross(8)", '{"x": torch.randn(2, 8), "encoded": torch.randn(2, 8)}')
)

SHARED = """\
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        query = self.query(x).unflatten(-1, (-1, self.size))
        key = self.key(x).unsqueeze(-2)
        mixed = (query * key).flatten(-2)
        return self.out(mixed)
"""

SHARED_SAMPLE = Sample(SHARED, setting("Attention(8, 4)"))

HEAD = """\
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, width, vocabulary):
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x, labels=None):
        logits, loss = self.head(x), None
        if labels is not None:
            loss = F.cross_entropy(logits, labels)
        return loss, logits
"""

HEAD_INPUTS = '{"x": torch.randn(2, 8), "labels": torch.tensor([3, 7])}'
HEAD_SAMPLE = Sample(HEAD, setting("Model(8, 30)", HEAD_INPUTS, "outputs[0]"))


class Sync(Primitive):
    """Communicate at a module's boundary: before it, after it, or after its backward pass.

    `fwd_pre` acts on the first argument, `fwd_post` on the (first) returned tensor, `bwd_post` on
    the gradient of the first argument. `of` names another argument, such as the encoder's states in
    a decoder; without that argument nothing happens. `of` may also name a value inside `forward`,
    by a local variable with a single assignment, after which the collective of the value
    (`fwd_post`) or of its gradient (`bwd_post`) is inserted. `all_reduce` sums partial sums,
    `reduce_scatter(axis)` leaves each rank its slice of the sum, `scatter(axis)` its slice of a
    full value, `all_gather(axis)` concatenates slices. Strings such as `"SR->RR"` change the
    sharded axis: `R` is replicated, `S` sharded; the letters are the second last and the last axis.
    A row-parallel layer reduces before its bias is added. The gradient of an `all_gather` depends
    on the use of the value: it is summed and sliced for sharded layers
    (`tensor_parallel_output_grad=True`), sliced if every rank uses it alike (False). A function (a
    forward pre-hook, forward hook or full backward hook, by `mode`) is copied or imported.

    A head that is split over the vocabulary and has only `bwd_post all_reduce` returns its
    partition of the logits: cross entropy becomes vocabulary-parallel, and the logits are gathered
    only if no loss is computed.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        -->
        self.up = ColumnParallelLinear(width, 4 * width, gather_output=True)

    Shapes:
        all_reduce: unchanged. all_gather: the partitioned axis gets its full size. scatter,
        reduce_scatter: the axis has its size divided by the world size, which must divide it.

    Numerics: Reassociated.

    State:
        Unchanged. Gradients of replicated parameters that each rank uses on its slice are summed
        over the ranks.

    Raises:
        SR104 an operation that does not fit the placement of the value; SR206 an unknown mode,
        operation, axis or name; SR304 an operation that does not fit the layer: an all-reduce of a
        partition, an all-gather of a partial sum, the same twice; SR305 an operation that is not
        available, or a name in `forward` with several assignments.

    Source: Slapo, documentation of `sync`, its five cases; for sequences Korthikanti et al.,
        arXiv 2205.05198, section 4.2.2.
    """

    name = "sync"
    examples = (
        SAMPLE.example(
            """\
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
        HEAD_SAMPLE.example(
            """\
s["head"].shard("weight", axis=0)
s["head"].sync("bwd_post", "all_reduce")
""",
            """\
-import torch.nn.functional as F
+from .tensor_parallel import ColumnParallelLinear
+from .vocab_parallel_loss import vocab_parallel_cross_entropy, whole_logits
-        self.head = nn.Linear(width, vocabulary, bias=False)
+        self.head = ColumnParallelLinear(width, vocabulary, bias=False)
-            loss = F.cross_entropy(logits, labels)
+            loss = vocab_parallel_cross_entropy(logits, labels, head=self.head)
+        if labels is None or not self.training:
+            logits = whole_logits(logits, self.head)
""",
        ),
        CROSS_SAMPLE.example(
            """\
s["{own,other}"].shard(["weight", "bias"], axis=0)
s["down"].shard("weight", axis=1)
s["down"].sync("fwd_post", "all_reduce")
s.sync("bwd_post", "all_reduce")
s.sync("bwd_post", "all_reduce", of="encoded")
""",
            """\
+from .tensor_parallel import (
+    ColumnParallelLinear,
+    RowParallelLinear,
+    all_reduce_gradient,
+)
-        self.own = nn.Linear(width, 4 * width)
-        self.other = nn.Linear(width, 4 * width)
-        self.down = nn.Linear(4 * width, width)
+        self.own = ColumnParallelLinear(width, 4 * width, reduce_input_gradient=False)
+        self.other = ColumnParallelLinear(width, 4 * width, reduce_input_gradient=False)
+        self.down = RowParallelLinear(4 * width, width)
+        x = all_reduce_gradient(x)
+        if encoded is not None:
+            encoded = all_reduce_gradient(encoded)
""",
        ),
        SHARED_SAMPLE.example(
            """\
s["query"].shard(["weight", "bias"], axis=0)
s["query"].sync("bwd_post", "all_reduce")
s["out"].shard("weight", axis=1)
s["out"].sync("fwd_post", "all_reduce")
s.sync("bwd_post", "all_reduce", of="key")
""",
            """\
+from .tensor_parallel import (
+    ColumnParallelLinear,
+    RowParallelLinear,
+    all_reduce_gradient,
+)
-        self.query = nn.Linear(width, width)
+        self.query = ColumnParallelLinear(width, width, multiple_of=self.size)
-        self.out = nn.Linear(width, width)
+        self.out = RowParallelLinear(width, width)
+        key = all_reduce_gradient(key)
""",
        ),
    )
    refusals = (
        SAMPLE.refused(
            "SR304",
            's["up"].shard(["weight", "bias"], axis=0)',
            's["up"].sync("fwd_post", "all_reduce")',
        ),
        SAMPLE.refused(
            "SR304",
            's["down"].shard("weight", axis=1)',
            's["down"].sync("fwd_post", "all_gather", axis=-1)',
        ),
        SAMPLE.refused("SR206", 's["up"].sync("fwd", "all_reduce")'),
        SAMPLE.refused("SR206", 's["up"].sync("fwd_post", "RR->SS")'),
        SAMPLE.refused("SR104", 's["up"].sync("fwd_pre", "SR->RR")'),
        CROSS_SAMPLE.refused("SR206", 's.sync("bwd_post", "all_reduce", of="encode")'),
        CROSS_SAMPLE.refused("SR305", 's.sync("fwd_post", "all_reduce", of="inner")'),
        SHARED_SAMPLE.refused("SR104", 's.sync("fwd_post", "all_reduce", of="key")'),
    )

    @staticmethod
    def takes(
        mode: str,
        sync_op_or_fn: str | Callable[..., Any],
        *,
        axis: int | None = None,
        tensor_parallel_output_grad: bool | None = None,
        of: str | None = None,
    ) -> None:
        """`sync(mode, sync_op_or_fn, *, axis=None, tensor_parallel_output_grad=None, of=None)`."""

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Adds the collective; whether it fits the shards is checked once all are known."""
        arguments = call.arguments
        mode, operation, axis = arguments["mode"], arguments["sync_op_or_fn"], arguments["axis"]
        if mode not in MODES:
            raise errors.BadArgument(
                f"`{mode}` is no mode of `sync`",
                hint=errors.did_you_mean(mode, MODES) or "the modes are " + ", ".join(MODES),
            )
        summed = arguments["tensor_parallel_output_grad"]
        if isinstance(operation, str):
            chosen: Any
            chosen, axis, scatter_axis = self._operation(operation, axis)
            if mode == "bwd_post" and chosen != "all_reduce":
                raise errors.Unsupported(
                    f"`bwd_post` cannot be combined with `{operation}`",
                    hint="the forward pass determines the gradient of a scatter or gather: only "
                    "`all_reduce` is for gradients alone",
                )
        elif arguments["of"] is not None:
            raise errors.BadArgument("`of` is for collectives, not for functions")
        else:
            chosen, scatter_axis = function_of(call, operation, "a sync function"), None
        if summed is not None and chosen != "all_gather":
            raise errors.BadArgument("`tensor_parallel_output_grad` is only for an `all_gather`")
        of = call.arguments["of"]
        if of is not None:
            of = self._of(call, node, of)
        is_argument = of is None or of in self._arguments(node)
        added = SyncState(
            mode,
            chosen,
            axis,
            summed,
            call.directive,
            scatter_axis,
            of if is_argument else None,
            None if is_argument else of,
        )
        for earlier in state.syncs:
            if replace(earlier, partial_gradient=summed) == added:
                raise errors.SyncMismatch(
                    f"{node.shown} already has this sync", cause=earlier.cause
                )
        return replace(state, syncs=(*state.syncs, added))

    def _arguments(self, node: Node) -> list[str]:
        """The names of a module's arguments."""
        parameters = inspect.signature(node.live.forward).parameters
        return [p.name for p in parameters.values() if p.kind not in _STARRED]

    def _of(self, call: Call, node: Node, of: str) -> str | None:
        """The argument or inner value that `of` names; None if it is the first argument."""
        mode = call.arguments["mode"]
        names = self._arguments(node)
        code = getattr(inspect.unwrap(type(node.live).forward), "__code__", None)
        values = [*code.co_varnames[code.co_argcount :], *code.co_cellvars] if code else []
        known = {"fwd_pre": names, "fwd_post": values, "bwd_post": [*names, *values]}[mode]
        if of not in known or (mode == "fwd_post" and of in names):
            raise errors.BadArgument(
                f"{node.shown} {_LACKS[mode].format(of)}",
                hint=errors.did_you_mean(of, known) or f"it has {', '.join(known) or 'none'}",
            )
        return of if of != names[0] else None

    def _operation(self, asked: str, axis: int | None) -> tuple[str, int | None, int | None]:
        """The collective of a name or a reshard string, and its axes."""
        before, arrow, after = asked.partition("->")
        if arrow and before.strip() in LAYOUTS and after.strip() in LAYOUTS:
            if axis is not None:
                raise errors.BadArgument(f'`"{asked}"` already names the axes: leave out `axis`')
            old, new = LAYOUTS[before.strip()], LAYOUTS[after.strip()]
            if old == new:
                return "keep", old, None
            if old is None or new is None:
                return ("scatter", new, None) if old is None else ("all_gather", old, None)
            return "all_to_all", old, new
        if asked not in OPERATIONS:
            known = [f"{a}->{b}" for a in LAYOUTS for b in LAYOUTS]
            raise errors.BadArgument(
                f"`sync` does not offer `{asked}`",
                hint=errors.did_you_mean(asked, [*OPERATIONS, *known])
                or (
                    f"it offers {', '.join(OPERATIONS)}, reshard strings like `RR->RS`, or a "
                    "function"
                ),
            )
        if asked == "all_reduce" and axis is not None:
            raise errors.BadArgument("`all_reduce` takes no axis")
        if asked != "all_reduce" and axis is None:
            example = "axis=-1" if asked == "all_gather" else "axis=1"
            raise errors.BadArgument(f"`{asked}` needs an axis", hint=f"write {example}, say")
        return asked, axis, None
