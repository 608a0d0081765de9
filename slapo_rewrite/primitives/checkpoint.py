"""`checkpoint`: compute a module's activations again in the backward pass."""

from __future__ import annotations

import inspect
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.edit.state import Checkpoint as CheckpointState
from slapo_rewrite.edit.state import ModuleState
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import (
    Call,
    Example,
    Primitive,
    Refusal,
    check_called,
    signature_of,
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

MODEL = """\
import torch


def model(m):
    return m.Stack(8, depth=4)


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


"""


class Checkpoint(Primitive):
    """Keep only a module's inputs, and compute its activations again in the backward pass.

    Non-reentrant, so keyword arguments stay keywords and inputs need no gradient; the random state
    is restored for the second computation. A cache of keys and values that a layer would fill twice
    is not passed on in training.

    Rewrite:
        nn.ModuleList([Block(width) for _ in range(depth)])
        -->
        nn.ModuleList([CheckpointedBlock(width) if i < 2 else Block(width) for i in range(depth)])
        with a subclass `CheckpointedBlock` of `Block`

    Shapes:
        Unchanged.

    Numerics:
        Exact.

    State:
        Unchanged; no parameter is renamed.

    Raises:
        SR305 a module list (select its elements), or a module checkpointed already.

    Source: Chen et al., arXiv 1604.06174; torch.utils.checkpoint.
    """

    name = "checkpoint"
    examples = (
        Example(
            STACK,
            MODEL + 'def schedule(s):\n    s["blocks"][:2].checkpoint()\n',
            """\
+from torch.utils.checkpoint import checkpoint
+class CheckpointedBlock(Block):
+    \"\"\"A `Block` that recomputes its activations in the backward pass.\"\"\"
+    def forward(self, *args, **kwargs):
+        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
-        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
+        self.blocks = nn.ModuleList(
+            [CheckpointedBlock(width) if i < 2 else Block(width) for i in range(depth)]
+        )
""",
        ),
    )
    refusals = (
        Refusal(STACK, MODEL + 'def schedule(s):\n    s["blocks"].checkpoint()\n', "SR305"),
        Refusal(
            STACK, MODEL + 'def schedule(s):\n    s["blocks.*"].checkpoint(ratio=1)\n', "SR206"
        ),
    )

    def signature(self) -> inspect.Signature:
        """`checkpoint()`."""

        def checkpoint() -> None: ...

        return signature_of(checkpoint)

    def apply(self, call: Call, node: Node, state: ModuleState) -> ModuleState:
        """Marks the module."""
        check_called(call, node)
        if state.checkpoint is not None:
            raise errors.Unsupported(
                f"`{node.path}` is checkpointed already",
                at=call.directive.at,
                also=[state.checkpoint.cause.at] if state.checkpoint.cause.at else [],
            )
        return replace(state, checkpoint=CheckpointState(call.directive))
