"""`replace`: another class in the place of a module's."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_rewrite import errors
from slapo_rewrite.changes.around_forward import WrapForward
from slapo_rewrite.changes.imports import Function
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.changes.state import ModuleRequests, Replacement
from slapo_rewrite.examples import Sample
from slapo_rewrite.model.substitute import (
    CannotBuild,
    Misfit,
    WrongArguments,
    built_in_place,
    check_weights,
)
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive, function_of
from slapo_rewrite.primitives.matched import check_stateless, class_of, replaced
from slapo_rewrite.primitives.shard import MLP, MODEL, SAMPLE
from slapo_rewrite.runtime.weights import Original, Weight, weight_of

if TYPE_CHECKING:
    from torch import nn

SCALED_SETTING = MODEL.replace(
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


PACKED_SETTING = MODEL.replace("m.MLP(8)", "m.Gate(8)").replace(
    "import torch\n",
    '''\
import torch
from torch import nn

from slapo_rewrite import concat


class PackedGate(nn.Module):
    """Both projections of a gate in one."""

    def __init__(self, width):
        super().__init__()
        self.both = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return torch.sigmoid(gate) * up
''',
    1,
)

GATE = """\
import torch
from torch import nn


class SplitGate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * self.up(x)


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gated = SplitGate(width)

    def forward(self, x):
        return self.gated(x)
"""


GATING = (
    MODEL.replace("m.MLP(8)", "m.SplitGate(8)").replace(
        "import torch\n", "import torch\nfrom torch import nn\n", 1
    )
    + """\
def gate(x, y):
    return torch.sigmoid(x) * y


def checked_gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    \"""The gated values, of tensors of one shape.\"""
    assert x.shape == y.shape
    return torch.sigmoid(x) * y


"""
)
SCALED_SAMPLE = Sample(MLP, SCALED_SETTING)
PACKED_SAMPLE = Sample(GATE, PACKED_SETTING)
GATING_SAMPLE = Sample(GATE, GATING)


class Rebuilding(Primitive):
    """What may put another class in the place of a module's."""

    def targets(self, call: Call, nodes: list[Node]) -> Iterable[Node]:
        """The modules selected, or those that the source has a new class for."""
        if call.done is None or not call.done.classes:
            return nodes
        return [call.tree.nodes[path] for path in call.done.classes]

    def rebuilt(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Records the new class that the source has for a module."""
        assert call.done is not None
        check_free(node, state)
        made, module = call.done.classes[node.path], self._built(call, node)
        if module is not None:
            check_fit(call, node, module, dict(made.weights))
        target = Function(made.name, call.sources.main.name)
        new = Replacement(target, None, made.weights, call.directive)
        return replace(state, replacement=new)

    def replacement(self, call: Call, node: Node) -> nn.Module | None:
        """The new module, so that later calls can select what it holds."""
        if call.done is not None and node.path not in call.done.classes:
            return None
        if call.sources.same_live(node):
            return None  # one module at several paths
        return self._built(call, node)

    def _class(self, call: Call, node: Node) -> Any:
        """What makes the new module."""
        return class_of(call, node)

    def _built(self, call: Call, node: Node) -> nn.Module | None:
        """The new module on the meta device; None where that cannot be made, and need not be."""
        new, arguments = self._class(call, node), call.arguments.get("args")
        arguments = None if call.done is not None else arguments
        name = getattr(new, "__name__", "the new module")
        try:
            return built_in_place(call.sources, node, new, arguments)
        except WrongArguments as error:
            shown = "the original's arguments" if arguments is None else f"`{arguments}`"
            raise errors.BadArgument(
                f"`{name}` cannot be made in the place of {node.shown} with {shown}: {error}",
                hint='give its own: replace(..., args="...")' if arguments is None else None,
            ) from None
        except CannotBuild as error:
            if not call.arguments.get("weights") and call.done is None:
                return None
            raise errors.WeightsMisfit(
                f"`{name}` cannot be made in the place of {node.shown}, so nothing is known of "
                f"its weights: {error}"
            ) from None
        except errors.UnfollowableConstruction:
            if not call.arguments.get("weights"):
                return None
            raise


class Replacing(Rebuilding):
    """What `replace` and `replace_all` share: `new` takes the place of a module's class."""

    new: ClassVar[str]

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Records the new class, if its weights can be had from the original's."""
        new, arguments = call.arguments[self.new], call.arguments.get("args")
        check_free(node, state)
        check_source(arguments)
        weights = weights_of(call)
        target = function_of(call, new, "the new module")
        module = self._built(call, node)
        if module is not None:
            check_fit(call, node, module, weights)
        pairs = tuple(weights.items())
        return replace(state, replacement=Replacement(target, arguments, pairs, call.directive))

    def _class(self, call: Call, node: Node) -> Any:
        return call.arguments[self.new] if call.done is None else super()._class(call, node)


def check_free(node: Node, state: ModuleRequests) -> None:
    """Refuses to replace the model itself, and what the schedule has changed before."""
    if not state.is_plain():
        splits = (state.replacement, *state.shards, *state.shares, *state.syncs)
        causes = [s.cause for s in splits if s] + [c for _, c in state.asks(WrapForward)]
        raise errors.ConflictingEdits(
            f"{node.shown} cannot be replaced after it was changed",
            cause=causes,
            hint="replace first, then schedule what stands there",
        )
    if not node.path:
        raise errors.Unsupported("the model itself cannot be replaced")


def check_source(arguments: str | None) -> None:
    """Refuses arguments that are no source."""
    if arguments is None:
        return
    try:
        ast.parse(f"f({arguments})", mode="eval")
    except (SyntaxError, TypeError):
        raise errors.BadArgument(
            f"`args` must be the constructor's arguments as source, not {arguments!r}",
            hint='write args="config.hidden_size, bias=False"',
        ) from None


def weights_of(call: Call) -> dict[str, Weight]:
    """What the schedule says that the tensors are made of: names, and functions of names."""
    given = call.arguments.get("weights") or {}
    for name, source in given.items():
        if not isinstance(name, str) or not isinstance(source, (str, Weight)):
            raise errors.BadArgument(
                f"`weights` maps names to what they are made of, not {name!r}: {source!r}",
                hint='write weights={"qkv.weight": concat("query.weight", "key.weight")}, with '
                "`from slapo_rewrite import concat, split, transpose`",
            )
    return {name: weight_of(source) for name, source in given.items()}


def check_fit(call: Call, node: Node, module: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Refuses a replacement that would lose weights, or hold some of its own (`WeightsMisfit`)."""
    inner = {n for weight in weights.values() for n in weight.names()}
    for name in sorted(inner & node.live.state_dict().keys()):
        full = f"{node.path}.{name}"
        outside = [n for n in call.tree.ties.get(full, ()) if not n.startswith(f"{node.path}.")]
        if outside and weights.get(name) != Original(name):
            raise errors.WeightsMisfit(
                f"`{full}` is tied to `{outside[0]}`, so it must keep its name and shape"
            )
    try:
        check_weights(node.live, module, weights)
    except Misfit as error:
        near = errors.did_you_mean(error.wrong, error.names) if error.wrong else None
        raise errors.WeightsMisfit(
            f"{node.shown}: {error}",
            hint=near
            or 'say what each is made of: replace(..., weights={"qkv.weight": concat(...)})',
        ) from None


class Replace(Replacing):
    """Build another class where the original was built.

    A class (or a function that returns a module) defined in the schedule file is copied into the
    output with what it needs; an importable one is imported. It is called with the original's
    constructor arguments, unless `args` gives others as source.

    `weights` says what its parameters and buffers are made of, by their names in the new module:
    another name, `concat("query.weight", "key.weight", axis=0)`, `split("qkv.weight", parts=3,
    index=0)` or `transpose("dense.weight")`, also one inside another. What it does not name keeps
    the original's name and shape. From then on the new module's own modules can be selected.

    With a `pattern`, a function takes the place of what `find` finds of it in the selected modules:
    it is called with what the pattern's parameters stand for, by their names, or by position where
    the names differ. The schedule goes on with the model as rewritten; of modules that share a text
    those that are not selected keep it. A module class without parameters is made in the
    constructor, as `name`, with `args`, and called there. Where the pattern is a regular expression
    that finds several linear layers called on one operand, a module class takes the place of all of
    them: one of `name` gives their results along the last axis, of weights made of theirs.
    `concrete_args` is as for `find`.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        -->
        self.up = ScaledLinear(width, 4 * width)

    Shapes: The new module's affair.
    Numerics: The new module's affair; `--verify` compares.

    State:
        `load_state_dict` takes the original's names, `loading.full_state_dict` gives them back bit
        for bit; gradients and moments by `loading.to_full`. Models of transformers read and write
        the original's checkpoints: with `weights` their base class gets `OriginalCheckpoints`.

    Raises:
        SR206 the new module is no class or function that a file can import, or does not take the
        arguments; SR306 the module was changed before; SR308 weights would be lost, be there twice
        or be made of nothing; SR309 the pattern is not found, or cannot be replaced where it is.

    Source: Slapo, arXiv 2302.08005, section 3.1.
    """

    name = "replace"
    new = "new_mod"
    examples = (
        SCALED_SAMPLE.example(
            's["up"].replace(ScaledLinear)',
            """\
+from .modules import ScaledLinear
-        self.up = nn.Linear(width, 4 * width)
+        self.up = ScaledLinear(width, 4 * width)
""",
            about="a class of the schedule file",
        ),
        PACKED_SAMPLE.example(
            """\
s["gated"].replace(
    PackedGate, weights={"both.weight": concat("gate.weight", "up.weight")}
)
""",
            """\
+from .modules import PackedGate
+from .weights import concat, map_weights
-        self.gated = SplitGate(width)
+        self.gated = map_weights(
+            lambda: PackedGate(width),
+            original=lambda: SplitGate(width),
+            weights={"both.weight": concat("gate.weight", "up.weight")},
+        )
""",
            about="a class whose weights are made of the original's",
        ),
        GATING_SAMPLE.example(
            "s.replace(checked_gate, gate)",
            """\
-import torch
+from .modules import checked_gate
-        return torch.sigmoid(self.gate(x)) * self.up(x)
+        return checked_gate(self.gate(x), self.up(x))
""",
            about="a function for what a pattern finds",
        ),
        Sample(GATE, GATING.replace("m.SplitGate", "m.Gate")).example(
            's["gated"].replace(nn.Linear, "gate|up", name="gate_up")',
            """\
+from .weights import concat, map_weights
+class PackedSplitGate(SplitGate):
+    \"""A `SplitGate` with `gate` and `up` in one `gate_up`.\"""
+    def __init__(self, width):
+        super().__init__(width)
+        self.gate_up = nn.Linear(width, 2 * width, bias=False)
+        del self.gate, self.up
+    def forward(self, x):
+        gate, up = self.gate_up(x).chunk(2, dim=-1)
+        return torch.sigmoid(gate) * up
-        self.gated = SplitGate(width)
+        self.gated = map_weights(
+            lambda: PackedSplitGate(width),
+            original=lambda: SplitGate(width),
+            weights={"gate_up.weight": concat("gate.weight", "up.weight")},
+        )
""",
            about="one layer for several on one operand",
        ),
    )
    refusals = (
        GATING_SAMPLE.refused("SR206", "s.replace(checked_gate, torch.relu)"),
        SAMPLE.refused("SR206", 's["up"].replace(lambda *a: None)'),
        PACKED_SAMPLE.refused("SR308", 's["gated"].replace(PackedGate)'),
    )

    @staticmethod
    def takes(
        new_mod: type | Callable[..., Any],
        pattern: Callable[..., Any] | type | str | None = None,
        *,
        name: str | None = None,
        args: str | None = None,
        weights: Mapping[str, str | Weight] | None = None,
        concrete_args: Mapping[str, object] | None = None,
    ) -> None:
        """`replace(new_mod, pattern=None, *, name=, args=, weights=, concrete_args=)`."""

    def rewrites(self, call: Call, nodes: list[Node]) -> Rewrite | None:
        """A call of the new function in the place of each match of a pattern."""
        if call.arguments["pattern"] is None:
            if call.arguments["concrete_args"] is not None:
                raise errors.BadArgument("`concrete_args` is for a pattern")
            return None
        return replaced(call, nodes)

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Records the new class, which a pattern may have asked for."""
        if call.done is None:
            return super().apply(call, node, state)
        if node.path not in call.done.classes:
            check_stateless(call, node)
            return state
        return self.rebuilt(call, node, state)
