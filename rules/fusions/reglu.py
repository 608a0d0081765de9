"""A gated linear unit with ReLU, in one kernel."""

from slapo_rewrite.rules.fusions.swiglu import MODEL, SCHEDULE, gated_by, gating
from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.fusion import (
    BY_KERNEL,
    Alternative,
    Calling,
    Example,
    Numerics,
    Refusal,
    Rule,
    RuleMatch,
)
from slapo_rewrite.runtime.kernels.gated import reglu


def relu(gate: Tensor) -> Tensor:
    return F.relu(gate)


RELU = MODEL.replace("silu", "relu")
APPLY = SCHEDULE.replace("swiglu", "reglu")


class Reglu(Rule):
    """Multiply by ReLU of a gate in one kernel, forward and backward, with dropout of the product.

    Rewrite:
        self.down(F.relu(self.gate(x)) * self.up(x))
        -->
        self.down(reglu(self.gate(x), self.up(x)))

    Shapes: gate and up (..., F) -> (..., F)

    Numerics:
        Reseeded: on a GPU dropout of the product draws other numbers; without it, float32 inside,
        rounded once. On a CPU the same operations as before.

    State: Unchanged.
    Raises: SR309 another activation, or the activated gate is used elsewhere too.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    name = "reglu"
    numerics = Numerics.RESEEDED
    conditions = BY_KERNEL
    pays = "reads gate and up once and keeps no activation for the backward pass"
    rank = 20
    alternatives = tuple(map(Alternative, gated_by(relu)))
    functions = (reglu,)
    examples = (
        Example(
            RELU,
            APPLY,
            """\
-from torch.nn import functional as F
+from .kernels import reglu
-        gated = F.relu(self.gate(x))
-        return self.down(gated * self.up(x))
+        return self.down(reglu(self.gate(x), self.up(x)))
""",
        ),
    )
    refusals = (
        Refusal(MODEL, APPLY, "SR309"),
        Refusal(RELU.replace("relu(", "relu6("), APPLY, "SR309"),
    )

    def expression(self, found: RuleMatch) -> Calling:
        """The call of the kernel, as for `swiglu`."""
        return gating(reglu, found.operands)
