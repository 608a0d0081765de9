"""`apply_all`: applies every rule that is legal and known to pay."""

from __future__ import annotations

from collections.abc import Mapping

from slapo_rewrite import errors
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.fusion.claims import Claim, Skipped
from slapo_rewrite.fusion.known_branches import given_for
from slapo_rewrite.fusion.match_rules import Looked, below, look
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.apply import SAMPLE, backends_of
from slapo_rewrite.primitives.base import Call, Rewriting
from slapo_rewrite.primitives.matched import engine_of, rewritten


class ApplyAll(Rewriting):
    """Apply every rule that is legal in the selected modules and below, and known to pay.

    Rules are tried in a fixed order, those that save more first; if two match the same code, the
    first one is applied. A rule that matches nothing, or must not be applied at some place, is left
    out there: `slapo-rewrite explain OUT` says why. `concrete_args` is as for `find`; `backend`,
    `device` and `dtype` are as for `apply`, for the rules that call a function.

    Rewrite:
        gated = F.silu(self.gate(x))
        return self.down(gated * self.up(x))
        -->
        return self.down(swiglu(self.gate(x), self.up(x)))

    Shapes: As the rules say.
    Numerics: As the rules say.
    State: Unchanged.

    Raises:
        SR105 a name that a rule needs means something else in the source; SR206 an unknown
        backend, or a module without a function; SR106 a module's function computes something else.

    Source: Slapo, arXiv 2302.08005, section 3.3.
    """

    name = "apply_all"
    examples = (
        SAMPLE.example(
            "s.apply_all()",
            """\
-from torch.nn import functional as F
+from .kernels import swiglu
-        gated = F.silu(self.gate(x))
-        return self.down(gated * self.up(x))  # back to the width
+        return self.down(swiglu(self.gate(x), self.up(x)))  # back to the width
""",
        ),
    )
    refusals = (SAMPLE.refused("SR206", 's.apply_all("swiglu")'),)

    @staticmethod
    def takes(
        *,
        backend: str = "triton",
        device: str | None = None,
        dtype: str | None = None,
        concrete_args: Mapping[str, object] | None = None,
    ) -> None:
        """`apply_all(*, backend="triton", device=None, dtype=None, concrete_args=None)`."""

    def rewrites(self, call: Call, nodes: list[Node]) -> Rewrite:
        """The replacements of all rules."""
        inner = below(nodes)
        engine, backends = engine_of(call), backends_of(call)
        given = given_for(call.arguments["concrete_args"], inner)
        claims: list[Claim] = []
        left: list[Skipped] = []
        every: list[tuple[str, Looked]] = []
        for rule in rules().values():
            if rule.pays:
                looked = look(rule, inner, call.sources, given, backends)
                every.append((rule.name, looked))
                claims += looked.claims
                left += looked.left
        kept, stopped = engine.sorted_out(claims)
        try:
            return rewritten(engine, kept, stopped, left, every)
        except (errors.Unsupported, errors.UnfollowableConstruction):
            kept, alone = engine.possible(kept)
            return rewritten(engine, kept, [*stopped, *alone], left, every)
