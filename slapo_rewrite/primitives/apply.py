"""`apply`: applies one of the tool's rules, by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import WRITTEN
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.examples import Sample, setting
from slapo_rewrite.fusion.backends import MEASURED, Always, Backends, measured, plugged
from slapo_rewrite.fusion.engine import Engine
from slapo_rewrite.fusion.fused_module import packed
from slapo_rewrite.fusion.horizontal_fusion import Packing, beside
from slapo_rewrite.fusion.kernel_forms import OF_KERNELS, in_torch
from slapo_rewrite.fusion.known_branches import given_for
from slapo_rewrite.fusion.match_rules import below, look, nearest_miss
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.fusion.rule import Rule
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Rewriting
from slapo_rewrite.primitives.matched import carried_out, engine_of, nothing_found
from slapo_rewrite.primitives.replace import Rebuilding

GATED = """\
import torch
from torch import nn
from torch.nn import functional as F


class GatedMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 4 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        gated = F.silu(self.gate(x))
        return self.down(gated * self.up(x))  # back to the width
"""
SAMPLE = Sample(GATED, setting("GatedMLP(8)"))


class Apply(Rebuilding, Rewriting):
    """Apply a rule in the selected modules and below.

    A rule is a computation and its replacement; `slapo-rewrite primitives` lists them. Later calls
    in the schedule see the changed source: a module whose call was replaced is no longer called,
    and cannot be scheduled any more. Calls of modules with hooks, a parametrization or a `forward`
    of their own are never replaced. If a training script later adds hooks or an adapter to a module
    that a kernel replaces, the output calls the module again; a rule's page says so where it is
    true. `concrete_args` is as for `find`.

    The function that a rule calls has several backends, with the same call: `"triton"`, a kernel,
    which uses its PyTorch reference without a GPU; `"eager"`, the reference only; `"inductor"`, the
    reference compiled by `torch.compile`, which draws other random numbers for dropout; or a module
    that can be imported, `"mypackage.my_kernels"`, with a function of the same name and parameters,
    which is first compared with the reference on a CPU, and is imported by the output.
    `"measured"` chooses the fastest backend for each match, as measured on `device` (default: this
    machine's GPU) at the nearest measured size, at most twice or half as large, in `dtype`
    (default: the parameters' dtype); without a measurement it is the reference.
    `slapo-rewrite explain OUT` shows the figures.

    Rewrite:
        gated = F.silu(self.gate(x))
        return self.down(gated * self.up(x))
        -->
        return self.down(swiglu(self.gate(x), self.up(x)))

    Shapes: As the rule says.
    Numerics: As the rule says.
    State: Unchanged: the constructor still makes all modules, also those no longer called.

    Raises:
        SR206 an unknown rule or backend, a rule without backends, or a module without the
        function; SR105 one function is imported from two modules; SR309 the rule matches nothing,
        or modules that share the source are not selected or differ; SR106 a module's function
        computes something else.

    Source: Slapo, arXiv 2302.08005, section 3.3 (`replace` of a subgraph by an efficient kernel).
    """

    name = "apply"
    examples = (
        SAMPLE.example(
            's.apply("swiglu")',
            """\
-from torch.nn import functional as F
+from .kernels import swiglu
-        gated = F.silu(self.gate(x))
-        return self.down(gated * self.up(x))  # back to the width
+        return self.down(swiglu(self.gate(x), self.up(x)))  # back to the width
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR206", 's.apply("swilu")'),
        SAMPLE.refused("SR309", 's["down"].apply("swiglu")'),
        SAMPLE.refused("SR206", 's.apply("swiglu", backend="cuda")'),
    )

    @staticmethod
    def takes(
        rule: str,
        *,
        backend: str = "triton",
        device: str | None = None,
        dtype: str | None = None,
        concrete_args: Mapping[str, object] | None = None,
    ) -> None:
        """`apply(rule, *, backend="triton", device=None, dtype=None, concrete_args=None)`."""

    def rewrites(self, call: Call, nodes: list[Node]) -> Rewrite:
        """The rule's replacement at each of its matches."""
        rule = rule_named(call)
        inner = below(nodes)
        engine = engine_of(call)
        given = given_for(call.arguments["concrete_args"], inner)
        backends = backends_of(call)
        if backends != Always() and not any(in_torch(f"{OF_KERNELS}{k}") for k in rule.kernels):
            raise errors.BadArgument(
                f"`{rule.name}` writes operations of torch, which have no other backend",
                hint="leave out `backend`",
            )
        if isinstance(rule, Packing):
            return _packed(rule, engine, inner)
        looked = look(rule, inner, call.sources, given, backends)
        if call.done is not None and not looked.claims:
            return Rewrite([])
        if not looked.claims and not looked.left:
            raise nothing_found(rule.name, nearest_miss(rule, inner, call.sources, given))
        return carried_out(engine, looked.claims, looked.left, rules=[(rule.name, looked)])

    def targets(self, call: Call, nodes: list[Node]) -> Iterable[Node]:
        """The modules that get a new class; if there are none, those of any other change."""
        if call.done is not None and call.done.classes:
            return Rebuilding.targets(self, call, nodes)
        return Rewriting.targets(self, call, nodes)

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Records the new class of a module, if the rule gives it one."""
        if call.done is None or node.path not in call.done.classes:
            return Rewriting.apply(self, call, node, state)
        return self.rebuilt(call, node, state)


def _packed(rule: Packing, engine: Engine, nodes: Sequence[Node]) -> Rewrite:
    """Replaces each group of linear layers that the rule finds by one layer."""
    found = beside(rule, nodes, engine.sources)
    if not found.groups and found.left:
        match, reason = found.left[0]
        raise errors.NoMatch(f"`{rule.name}` cannot pack its matches: {reason}", at=match.place)
    if not found.groups:
        raise nothing_found(rule.name, None)
    note: dict[str, object] = {"rule": rule.name}
    note["applied"] = list(
        dict.fromkeys(with_wildcards(group[0].path) for _, group in found.groups)
    )
    if found.left:
        note["left"] = {with_wildcards(match.path): reason for match, reason in found.left}
    return replace(packed(engine, found.groups), notes=(note,))


def rule_named(call: Call) -> Rule:
    """The rule that a call names."""
    known, name = rules(), call.arguments["rule"]
    if name not in known:
        raise errors.BadArgument(
            f"there is no rule {name!r}",
            hint=errors.did_you_mean(name, known) or "the rules are " + ", ".join(known),
        )
    return known[name]


def backends_of(call: Call) -> Backends:
    """The backends of the functions that rules call."""
    backend = call.arguments["backend"]
    if backend == MEASURED:
        return measured(call.arguments["device"], call.arguments["dtype"])
    for name in ("device", "dtype"):
        if call.arguments[name] is not None:
            raise errors.BadArgument(f'`{name}` is for backend="{MEASURED}"')
    if backend in WRITTEN:
        return Always(backend)
    known = (*WRITTEN, MEASURED)
    found = plugged(backend) if backend else None
    if found is None:
        raise errors.BadArgument(
            f"there is no backend {backend!r}",
            hint=errors.did_you_mean(backend, known)
            or f"use {', '.join(known)}, or any module that can be imported",
        )
    return found
