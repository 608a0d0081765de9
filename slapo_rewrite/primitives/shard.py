"""`shard`: split a parameter along an axis over the tensor-parallel group."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.edit.state import ModuleState
from slapo_rewrite.edit.state import Shard as ShardState
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Example, Primitive, Refusal, signature_of

MLP = """\
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
"""

MODEL = """\
import torch


def model(m):
    return m.MLP(8)


def inputs(model):
    return {"x": torch.randn(2, 8)}


def loss(outputs):
    return outputs.square().mean()


"""


class Shard(Primitive):
    """Split one or several parameters of a module over the tensor-parallel group.

    `axis` counts as the parameter's own axes do. `parts` says that the axis packs several blocks,
    each of which is split for itself: an int for equal blocks (`parts=3` for `[q|k|v]`), or the
    blocks' sizes. What `forward` derives from the sharded size (head counts, split sizes, the
    arguments of `view`) follows.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        -->
        self.up = ColumnParallelLinear(width, 4 * width)

    Shapes:
        On a rank the axis has its full size divided by the world size. Linear, axis 0 and `Conv1D`,
        axis 1: the output is a partition; the other axis: a partial sum. Embedding, axis 0: a
        partial sum, axis 1: a partition. Convolutions are as Linear, along the channels. A
        convolution in groups and the norms take a partition and give one; layer and root mean
        square norms take their statistics over all ranks. With fewer key/value heads than ranks,
        several ranks hold the same head.

    Numerics:
        Reassociated: sums are taken per rank, then over the ranks.

    State:
        `load_state_dict` takes the full tensors, `loading.full_state_dict` gives them back bit for
        bit. Tied parameters follow.

    Raises:
        SR203 no such parameter; SR301 axis out of range; SR302 a size that `parts` does not divide;
        SR303 sharded already; SR305 a module that cannot be sharded there.

    Source: Slapo, arXiv 2302.08005, section 3.2; Megatron-LM, arXiv 1909.08053, section 3.
    """

    name = "shard"
    examples = (
        Example(
            MLP,
            MODEL
            + """\
def schedule(s):
    s["up"].shard(["weight", "bias"], axis=0)
    s["up"].sync("bwd_post", "all_reduce")
    s["down"].shard("weight", axis=1)
    s["down"].sync("fwd_post", "all_reduce")
""",
            """\
+from .tensor_parallel import ColumnParallelLinear, RowParallelLinear
-        self.up = nn.Linear(width, 4 * width)
-        self.down = nn.Linear(4 * width, width)
+        self.up = ColumnParallelLinear(width, 4 * width)
+        self.down = RowParallelLinear(4 * width, width)
""",
        ),
    )
    refusals = (
        Refusal(MLP, MODEL + 'def schedule(s):\n    s["up"].shard("wieght", axis=0)\n', "SR203"),
        Refusal(MLP, MODEL + 'def schedule(s):\n    s["up"].shard("weight", axis=2)\n', "SR301"),
        Refusal(
            MLP, MODEL + 'def schedule(s):\n    s["up"].shard("weight", axis=0, parts=3)\n', "SR302"
        ),
        Refusal(
            MLP,
            MODEL
            + 'def schedule(s):\n    s["up"].shard("weight", axis=0)\n'
            + '    s["up"].shard("weight", axis=1)\n',
            "SR303",
        ),
    )

    def signature(self) -> inspect.Signature:
        """`shard(names, axis, *, parts=1)`."""

        def shard(
            names: str | Sequence[str], axis: int, *, parts: int | Sequence[int] = 1
        ) -> None: ...

        return signature_of(shard)

    def apply(self, call: Call, node: Node, state: ModuleState) -> ModuleState:
        """Adds one split for each name."""
        given = call.arguments["names"]
        names = [given] if isinstance(given, str) else given
        if (
            not isinstance(names, Sequence)
            or not names
            or not all(isinstance(n, str) for n in names)
        ):
            raise errors.BadArgument(
                f"`names` must be a parameter's name or a list of them, not {given!r}",
                at=call.directive.at,
            )
        for name in names:
            state = self._one(call, node, state, name)
        return state

    def _one(self, call: Call, node: Node, state: ModuleState, name: str) -> ModuleState:
        at = call.directive.at
        parameter = {**node.buffers, **node.parameters}.get(name)
        if parameter is None:
            empty = name in getattr(node.live, "_parameters", {})
            raise errors.UnknownParameter(
                f"`{node.path}` ({node.cls.__name__}) "
                + (
                    f"is made without its optional `{name}`"
                    if empty
                    else f"has no parameter `{name}`"
                ),
                at=at,
                hint=errors.did_you_mean(name, node.parameters)
                or f"it has {', '.join(node.parameters) or 'none of its own'}",
            )
        for earlier in state.shards:
            if earlier.name == name:
                raise errors.ShardedTwice(
                    f"`{node.path}.{name}` is sharded already, along axis {earlier.axis}",
                    at=at,
                    also=[earlier.cause.at] if earlier.cause.at else [],
                    hint="take one of the two lines out",
                )
        shape = tuple(parameter.shape)
        axis = call.arguments["axis"]
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise errors.BadArgument(f"`axis` must be a whole number, not {axis!r}", at=at)
        if not -len(shape) <= axis < len(shape):
            raise errors.BadAxis(
                f"`{node.path}.{name}` has shape {list(shape)}: there is no axis {axis}",
                at=at,
                hint=f"its axes are 0 to {len(shape) - 1}"
                if shape
                else "a scalar cannot be sharded",
            )
        axis %= len(shape)
        parts = self._parts(call, node, name, shape[axis])
        return replace(state, shards=(*state.shards, ShardState(name, axis, parts, call.directive)))

    def _parts(self, call: Call, node: Node, name: str, size: int) -> tuple[int, ...]:
        parts = call.arguments["parts"]
        if isinstance(parts, int) and not isinstance(parts, bool) and parts >= 1:
            sizes = (1,) * parts
        elif (
            isinstance(parts, Sequence)
            and parts
            and all(isinstance(p, int) and p > 0 for p in parts)
        ):
            sizes = tuple(parts)
        else:
            raise errors.BadArgument(
                f"`parts` must be a number of equal parts or the sizes of the parts, not {parts!r}",
                at=call.directive.at,
            )
        given_as_sizes = not isinstance(parts, int)
        if (given_as_sizes and sum(sizes) != size) or size % sum(sizes):
            raise errors.BadSize(
                f"`{node.path}.{name}` has size {size} there: "
                + (
                    f"parts {list(sizes)} add up to {sum(sizes)}"
                    if given_as_sizes
                    else f"it cannot be cut in {len(sizes)} equal parts"
                ),
                at=call.directive.at,
            )
        common = math.gcd(*sizes)
        return tuple(s // common for s in sizes)
