"""`shard`: splits a parameter along an axis over the tensor-parallel group."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.state import ModuleRequests, ShardedAttribute
from slapo_rewrite.changes.state import Shard as ShardState
from slapo_rewrite.code.text import listed
from slapo_rewrite.examples import Sample, setting
from slapo_rewrite.model.layers import base_of
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive, parameter_hint

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

MEAN = """\
import torch
from torch import nn


class Mean(nn.Module):
    def __init__(self, features, groups):
        super().__init__()
        self.features = features
        self.groups = groups
        self.up = nn.Linear(8, features)
        self.down = nn.Linear(groups, 8)

    def forward(self, x):
        x = self.up(x)
        if x.size(-1) != self.features:
            raise ValueError(f"expected {self.features} features")
        return self.down(x.unflatten(-1, (self.groups, -1)).mean(-1))
"""

NORM = """\
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(variance + 1e-6)


class Normed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.norm = Norm(width)
        self.down = nn.Linear(width, 8)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))
"""

MODEL = setting("MLP(8)")
SAMPLE = Sample(MLP, MODEL)


SPLIT = """\
s["up"].shard(["weight", "bias"], axis=0)
s["up"].sync("bwd_post", "all_reduce")
s["down"].shard("weight", axis=1)
s["down"].sync("fwd_post", "all_reduce")
"""
NORM_SAMPLE = Sample(NORM, setting("Normed(12)"))
MEAN_SAMPLE = Sample(MEAN, setting("Mean(48, 12)"))
ONE_OF_TWO = "remove one of the two lines"


class Shard(Primitive):
    """Split one or several parameters of a module over the tensor-parallel group.

    `axis` is an axis of the parameter. `parts` says that several blocks are packed along it, each
    of which is split separately: an int for equal blocks (`parts=3` for `[q|k|v]`), or the blocks'
    sizes. Sizes in `forward` that depend on the sharded size (head counts, split sizes, the
    arguments of `view`) are adapted. If the dependence is not known, as for a check of a size, name
    the integer attribute itself, with axis 0: it becomes this rank's share.

    Block sizes are written as expressions, so that they hold for other configurations: as summands
    of the axis's size, or as the list by which `forward` splits the blocks. Without such
    expressions, building the output with another size of the axis raises an error.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        -->
        self.up = ColumnParallelLinear(width, 4 * width)

        s["attention"].shard("num_heads", axis=0) adds to its `__init__`
        -->
        self.num_heads = part_size(self.num_heads)

    Shapes:
        On a rank the axis has its full size divided by the world size. Linear, axis 0, and
        `Conv1D`, axis 1: the output is a partition; the other axis: a partial sum. Embedding,
        axis 0: a partial sum; axis 1: a partition. EmbeddingBag: axis 0 only, and not with mode
        "max". Convolutions are like Linear, along the channels. Grouped convolutions and norms take
        a partition and return one. Layer and root mean square norms compute their statistics over
        all ranks, and so does a user's module whose weight is split along the features of its
        `mean`, `var` or `std`. With fewer key/value heads than ranks, several ranks hold the same
        head. `nn.MultiheadAttention` is one layer, with a partial sum: split `in_proj_weight` and
        `in_proj_bias` with `parts=3`, and `out_proj.weight` with axis 1; its `num_heads` stays that
        of the full layer. A layer of `nn.TransformerEncoder` or `nn.TransformerDecoder` is one as
        well, with its attentions, `linear1` and `linear2`, and so is an `nn.Transformer` with all
        of its layers: it reduces inside, and returns full values.

    Numerics: Reassociated: sums are computed per rank, then over the ranks.

    State:
        `load_state_dict` takes the full tensors, `loading.full_state_dict` returns them bitwise
        equal. Tied parameters are split as well.

    Raises:
        SR104 an attribute that does not fit in `forward`; SR203 no such parameter or attribute;
        SR206 `parts` of an attribute; SR301 axis out of range; SR302 a size that `parts` does not
        divide; SR303 sharded already; SR305 a module that cannot be sharded there.

    Source: Slapo, arXiv 2302.08005, section 3.2; Megatron-LM, arXiv 1909.08053, section 3.
    """

    name = "shard"
    examples = (
        SAMPLE.example(
            SPLIT,
            """\
+from .tensor_parallel import ColumnParallelLinear, RowParallelLinear
-        self.up = nn.Linear(width, 4 * width)
-        self.down = nn.Linear(4 * width, width)
+        self.up = ColumnParallelLinear(width, 4 * width)
+        self.down = RowParallelLinear(4 * width, width)
""",
        ),
        MEAN_SAMPLE.example(
            SPLIT + 's.shard("features", axis=0)',
            """\
+from .tensor_parallel import ColumnParallelLinear, RowParallelLinear, part_size
-        self.up = nn.Linear(8, features)
-        self.down = nn.Linear(groups, 8)
+        self.up = ColumnParallelLinear(8, features)
+        self.down = RowParallelLinear(groups, 8)
+        self.groups = part_size(self.groups)
+        self.features = part_size(self.features)
""",
        ),
        NORM_SAMPLE.example(
            SPLIT + 's["norm"].shard("weight", axis=0)',
            """\
+from .normalization import full_size, mean_of_parts
+from .tensor_parallel import ColumnParallelLinear, RowParallelLinear, shard_parameter
+        shard_parameter(self, "weight", axis=0)
-        variance = x.pow(2).mean(-1, keepdim=True)
+        variance = mean_of_parts(x.pow(2), full_size(self, "weight"), -1, keepdim=True)
-        self.up = nn.Linear(8, width)
+        self.up = ColumnParallelLinear(8, width)
-        self.down = nn.Linear(width, 8)
+        self.down = RowParallelLinear(width, 8)
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR203", 's["up"].shard("wieght", axis=0)'),
        SAMPLE.refused("SR301", 's["up"].shard("weight", axis=2)'),
        SAMPLE.refused("SR302", 's["up"].shard("weight", axis=0, parts=3)'),
        SAMPLE.refused(
            "SR303", 's["up"].shard("weight", axis=0)', 's["up"].shard("weight", axis=1)'
        ),
        SAMPLE.refused("SR305", 's["up"].shard("out_features", axis=0)'),
        NORM_SAMPLE.refused("SR104", SPLIT),
        MEAN_SAMPLE.refused("SR301", SPLIT + 's.shard("features", axis=1)'),
        MEAN_SAMPLE.refused("SR104", 's.shard("features", axis=0)'),
    )

    @staticmethod
    def takes(names: str | Sequence[str], axis: int, *, parts: int | Sequence[int] = 1) -> None:
        """`shard(names, axis, *, parts=1)`."""

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Adds a shard for each name."""
        given = call.arguments["names"]
        names = [given] if isinstance(given, str) else given
        if not names:
            raise errors.BadArgument("`names` names nothing", hint='.shard("weight", axis=...)')
        for name in names:
            state = self._one(call, node, state, name)
        return state

    def _one(self, call: Call, node: Node, state: ModuleRequests, name: str) -> ModuleRequests:
        parameter = {**node.buffers, **node.parameters}.get(name)
        if parameter is None and name in _attributes(node):
            return self._share(call, node, state, name)
        if parameter is None and (made_of := _worked_out(node, name)):
            raise errors.UnknownParameter(
                f"`{node.path or 's'}.{name}` ({node.cls.__name__}) is not a parameter: a "
                f"parametrization or a hook computes it from {listed(made_of)}, and would get "
                "only a rank's part",
                hint="leave the layer whole, or first turn it into a plain parameter: "
                "torch.nn.utils.parametrize.remove_parametrizations",
            )
        if parameter is None:
            empty = name in getattr(node.live, "_parameters", {})
            raise errors.UnknownParameter(
                f"{node.shown} ({node.cls.__name__}) "
                + (
                    f"is constructed without its optional `{name}`"
                    if empty
                    else f"has no parameter `{name}`, and no integer attribute"
                ),
                hint=parameter_hint(name, node, [*node.parameters, *_attributes(node)]),
            )
        for earlier in state.shards:
            if earlier.name == name:
                words = f"`{node.path}.{name}` is already sharded, along axis {earlier.axis}"
                raise errors.ShardedTwice(words, cause=earlier.cause, hint=ONE_OF_TWO)
        shape = tuple(parameter.shape)
        axis = call.arguments["axis"]
        if not -len(shape) <= axis < len(shape):
            raise errors.BadAxis(
                f"`{node.path}.{name}` has shape {list(shape)}: there is no axis {axis}",
                hint="a scalar cannot be sharded"
                if not shape
                else f"its axes are 0 to {len(shape) - 1}"
                if len(shape) > 1
                else "its only axis is 0",
            )
        axis %= len(shape)
        parts = self._parts(call, node, name, shape[axis])
        as_sizes = not isinstance(call.arguments["parts"], int)
        added = ShardState(name, axis, parts, call.directive, as_sizes)
        return replace(state, shards=(*state.shards, added))

    def _share(self, call: Call, node: Node, state: ModuleRequests, name: str) -> ModuleRequests:
        """Makes an integer attribute this rank's share."""
        spoken = f"`{node.path or 's'}.{name}`"
        for earlier in state.shares:
            if earlier.name == name:
                words = f"{spoken} is already sharded"
                raise errors.ShardedTwice(words, cause=earlier.cause, hint=ONE_OF_TWO)
        base, axis, parts = base_of(node.cls), call.arguments["axis"], call.arguments["parts"]
        if base is not None and name in inspect.signature(base).parameters:
            raise errors.Unsupported(
                f"{spoken} of a {base.__name__} follows from its weight",
                hint='shard the weight instead: .shard("weight", axis=...)',
            )
        if axis not in (0, -1):
            raise errors.BadAxis(
                f"{spoken} is a whole number: there is no axis {axis!r}", hint="give axis=0"
            )
        if parts != 1:
            raise errors.BadArgument(
                f"{spoken} is a whole number: it has no parts", hint="remove `parts`"
            )
        size = vars(node.live)[name]
        if size < 2:
            raise errors.BadSize(f"{spoken} is {size}: there is nothing to split")
        return replace(state, shares=(*state.shares, ShardedAttribute(name, call.directive)))

    def _parts(self, call: Call, node: Node, name: str, size: int) -> tuple[int, ...]:
        parts = call.arguments["parts"]
        given_as_sizes = not isinstance(parts, int)
        sizes = tuple(parts) if given_as_sizes else (1,) * parts
        if not sizes or min(sizes) < 1:
            raise errors.BadArgument(
                f"`parts` must be a number of equal parts or the sizes of the parts, not {parts!r}"
            )
        if (given_as_sizes and sum(sizes) != size) or size % sum(sizes):
            raise errors.BadSize(
                f"`{node.path}.{name}` has size {size} there: "
                + (
                    f"parts {list(sizes)} add up to {sum(sizes)}"
                    if given_as_sizes
                    else f"it cannot be cut into {len(sizes)} equal parts"
                )
            )
        common = math.gcd(*sizes)
        return tuple(s // common for s in sizes)


def _worked_out(node: Node, name: str) -> list[str]:
    """The parameters from which a parametrization or hook computes a tensor of a module."""
    is_hooked = hasattr(vars(node.live).get(name), "requires_grad")  # a tensor, set by a hook
    starts = (f"parametrizations.{name}.", *([f"{name}_"] if is_hooked else []))
    return [key for key, _ in node.live.named_parameters() if key.startswith(starts)]


def _attributes(node: Node) -> list[str]:
    """The integer attributes of a module."""
    return [name for name, value in vars(node.live).items() if type(value) is int]
