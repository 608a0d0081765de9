"""`replace`: replaces a module by one of another class, or a pattern by a call."""

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
    """Base class of primitives that replace the class of a module."""

    def targets(self, call: Call, nodes: list[Node]) -> Iterable[Node]:
        """The selected modules, or those that have a new class in the changed source."""
        if call.done is None or not call.done.classes:
            return nodes
        return [call.tree.nodes[path] for path in call.done.classes]

    def rebuilt(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Records the new class of a module in the changed source."""
        assert call.done is not None
        check_free(node, state)
        made, module = call.done.classes[node.path], self._built(call, node)
        if module is not None:
            check_fit(call, node, module, dict(made.weights))
        target = Function(made.name, call.sources.main.name)
        new = Replacement(target, None, made.weights, call.directive)
        return replace(state, replacement=new)

    def replacement(self, call: Call, node: Node) -> nn.Module | None:
        """The new module, so that later calls can select its submodules."""
        if call.done is not None and node.path not in call.done.classes:
            return None
        if call.sources.same_live(node):
            return None  # one module at several paths
        return self._built(call, node)

    def _class(self, call: Call, node: Node) -> Any:
        """The class or function that makes the new module."""
        return class_of(call, node)

    def _built(self, call: Call, node: Node) -> nn.Module | None:
        """The new module on the meta device; None if it cannot be made, and is not needed."""
        new, arguments = self._class(call, node), call.arguments.get("args")
        arguments = None if call.done is not None else arguments
        name = getattr(new, "__name__", "the new module")
        try:
            return built_in_place(call.sources, node, new, arguments)
        except WrongArguments as error:
            shown = "the original's arguments" if arguments is None else f"`{arguments}`"
            raise errors.BadArgument(
                f"`{name}` cannot be constructed instead of {node.shown} with {shown}: {error}",
                hint='give its own: replace(..., args="...")' if arguments is None else None,
            ) from None
        except CannotBuild as error:
            if not call.arguments.get("weights") and call.done is None:
                return None
            raise errors.WeightsMisfit(
                f"`{name}` cannot be constructed instead of {node.shown}, so its weights are not "
                f"known: {error}"
            ) from None
        except errors.UnfollowableConstruction:
            if not call.arguments.get("weights"):
                return None
            raise


class Replacing(Rebuilding):
    """Base class of `replace` and `replace_all`; `new` names the argument with the new class."""

    new: ClassVar[str]

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Records the new class, if its weights can be made from the original's."""
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
    """Refuses to replace the model itself, and modules that the schedule changed before."""
    if not state.is_plain():
        splits = (state.replacement, *state.shards, *state.shares, *state.syncs)
        causes = [s.cause for s in splits if s] + [c for _, c in state.asks(WrapForward)]
        raise errors.ConflictingEdits(
            f"{node.shown} cannot be replaced after it was changed",
            cause=causes,
            hint="replace first, then schedule the new module",
        )
    if not node.path:
        raise errors.Unsupported("the model itself cannot be replaced")


def check_source(arguments: str | None) -> None:
    """Refuses arguments that are not source code."""
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
    """The schedule's map of weights: names, and functions of names, by new name."""
    given = call.arguments.get("weights") or {}
    for name, source in given.items():
        if not isinstance(name, str) or not isinstance(source, (str, Weight)):
            raise errors.BadArgument(
                f"`weights` maps names to their sources, not {name!r}: {source!r}",
                hint='write weights={"qkv.weight": concat("query.weight", "key.weight")}, with '
                "`from slapo_rewrite import concat, split, transpose`",
            )
    return {name: weight_of(source) for name, source in given.items()}


def check_fit(call: Call, node: Node, module: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Raises `WeightsMisfit` for a replacement that loses weights, or has further ones."""
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
    """Replace a module by one of another class, or a computation by a call.

    A class (or a function that returns a module) defined in the schedule file is copied into the
    output with the definitions that it needs; an importable one is imported. It is called with the
    original's constructor arguments, unless `args` has others as source text.

    `weights` maps the names of its parameters and buffers to the original's: to another name,
    `concat("query.weight", "key.weight", axis=0)`, `split("qkv.weight", parts=3, index=0)` or
    `transpose("dense.weight")`, which can be nested. All others keep the original's name and shape.
    Later calls in the schedule can select the new module's own submodules.

    With a `pattern`, each match of `find` in the selected modules is replaced by a call of a
    function, with the operands of the pattern's parameters, by name, or by position if the names
    differ. Later calls see the rewritten model; modules of the same class that are not selected
    keep their code. A module class without parameters is instead made in the constructor, as
    `name`, with `args`, and called at the match. If the pattern is a regular expression that
    matches several linear layers called on one operand, one module of the class, `name`, replaces
    all of them: it returns their results along the last axis, and its weights are made from theirs.
    `concrete_args` is as for `find`.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        -->
        self.up = ScaledLinear(width, 4 * width)

    Shapes: As the new module has them.
    Numerics: As the new module computes; `--verify` compares.

    State:
        `load_state_dict` takes the original's names, `loading.full_state_dict` returns them bitwise
        equal, `loading.to_full` gradients and moments. Models of transformers read and write the
        original's checkpoints: with `weights` their base class gets `OriginalCheckpoints`.

    Raises:
        SR206 the new module is not an importable class or function, or does not take the
        arguments; SR306 the module was changed before; SR308 weights would be lost, used twice or
        not defined; SR309 the pattern is not found, or cannot be replaced where it is.

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
        """The edits that replace each match of a pattern by a call; None without a pattern."""
        if call.arguments["pattern"] is None:
            if call.arguments["concrete_args"] is not None:
                raise errors.BadArgument("`concrete_args` is for a pattern")
            return None
        return replaced(call, nodes)

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Records the new class of a module, given or made for a pattern."""
        if call.done is None:
            return super().apply(call, node, state)
        if node.path not in call.done.classes:
            check_stateless(call, node)
            return state
        return self.rebuilt(call, node, state)
