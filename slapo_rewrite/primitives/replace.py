"""`replace`: another class in the place of a module's."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.edit.state import ModuleState, Replacement
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

SCALED = MODEL.replace(
    "import torch\n",
    '''\
import torch
from torch import nn


class ScaledLinear(nn.Linear):
    """A linear layer whose output is halved."""

    def forward(self, x):
        return 0.5 * super().forward(x)
''',
    1,
)


def replaced(call: Call, node: Node, state: ModuleState, new: Any) -> ModuleState:
    """The state of a module whose class `new` takes the place of."""
    at, arguments = call.directive.at, call.arguments.get("args")
    if state != ModuleState(annotations=state.annotations):
        wraps = (state.checkpoint, state.fork)
        earlier = state.replacement or next(
            (s for s in state.shards + state.syncs + wraps if s), None
        )
        raise errors.ConflictingEdits(
            f"`{node.path}` cannot be replaced after it was changed",
            at=at,
            also=[earlier.cause.at] if earlier and earlier.cause.at else [],
            hint="replace first, then schedule what stands there",
        )
    if not node.path:
        raise errors.Unsupported("the model itself cannot be replaced", at=at)
    if arguments is not None:
        try:
            ast.parse(f"f({arguments})", mode="eval")
        except (SyntaxError, TypeError):
            raise errors.BadArgument(
                f"`args` must be the constructor's arguments as source, not {arguments!r}",
                at=at,
                hint='write args="config.hidden_size, bias=False"',
            ) from None
    return replace(
        state,
        replacement=Replacement(
            function_of(call, new, "the new module"), arguments, call.directive
        ),
    )


class Replace(Primitive):
    """Build another class where the original was built.

    A class (or a function that returns a module) defined in the schedule file is copied into the
    output with what it needs; an importable one is imported. It is called with the original's
    constructor arguments, unless `args` gives others as source. Its parameters must have the
    original's names and shapes.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        -->
        self.up = ScaledLinear(width, 4 * width)

    Shapes:
        The new module's affair.

    Numerics:
        The new module's affair; `--verify` compares.

    State:
        Unchanged where the new module's parameters are named as the original's.

    Raises:
        SR206 the new module is no class or function that a file can import; SR306 the module was
        changed before.

    Source: Slapo, arXiv 2302.08005, section 3.1.
    """

    name = "replace"
    examples = (
        Example(
            MLP,
            SCALED + 'def schedule(s):\n    s["up"].replace(ScaledLinear)\n',
            """\
+from .modules import ScaledLinear
-        self.up = nn.Linear(width, 4 * width)
+        self.up = ScaledLinear(width, 4 * width)
""",
        ),
    )
    refusals = (
        Refusal(MLP, MODEL + 'def schedule(s):\n    s["up"].replace(lambda *a: None)\n', "SR206"),
    )

    def signature(self) -> inspect.Signature:
        """`replace(new_mod, *, args=None)`."""

        def replace(new_mod: type | Callable[..., Any], *, args: str | None = None) -> None: ...

        return signature_of(replace)

    def apply(self, call: Call, node: Node, state: ModuleState) -> ModuleState:
        """Records the new class."""
        return replaced(call, node, state, call.arguments["new_mod"])
