"""`replace_all`: another class in the place of every module of a type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call
from slapo_rewrite.primitives.replace import SCALED_SAMPLE, Replacing
from slapo_rewrite.primitives.shard import SAMPLE
from slapo_rewrite.runtime.weights import Weight


class ReplaceAll(Replacing):
    """Replace every module of a type, at and below the selection.

    `type` is a class, or its name where it is defined in the file that is rewritten. `make` is what
    `replace` takes.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        -->
        self.up = ScaledLinear(width, 4 * width)
        self.down = ScaledLinear(4 * width, width)

    Shapes: The new module's affair.
    Numerics: The new module's affair; `--verify` compares.
    State: As with `replace`.
    Raises: SR202 no module is of this type; what `replace` raises.

    Source: Slapo, arXiv 2302.08005, section 3.1.
    """

    name = "replace_all"
    new = "make"
    examples = (
        SCALED_SAMPLE.example(
            "s.replace_all(nn.Linear, ScaledLinear)",
            """\
+from .modules import ScaledLinear
-        self.up = nn.Linear(width, 4 * width)
-        self.down = nn.Linear(4 * width, width)
+        self.up = ScaledLinear(width, 4 * width)
+        self.down = ScaledLinear(4 * width, width)
""",
        ),
    )
    refusals = (SAMPLE.refused("SR202", 's.replace_all("Linaer", torch.nn.Linear)'),)

    @staticmethod
    def takes(
        type: type | str,
        make: type | Callable[..., Any],
        *,
        args: str | None = None,
        weights: Mapping[str, str | Weight] | None = None,
    ) -> None:
        """`replace_all(type, make, *, args=None, weights=None)`."""

    def targets(self, call: Call, nodes: list[Node]) -> list[Node]:
        """Every module of the type at or below the selected ones."""
        wanted = call.arguments["type"]
        name = wanted if isinstance(wanted, str) else getattr(wanted, "__qualname__", str(wanted))
        found: dict[str, Node] = {}
        seen: set[str] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop(0)
            seen.add(node.cls.__name__)
            if node.cls is wanted or node.cls.__qualname__ == name:
                found[node.path] = node
            else:
                waiting = list(node.children.values()) + waiting
        if not found and nodes:
            raise errors.UnknownPath(
                f"no module is a `{name}`", hint=errors.did_you_mean(name, seen)
            )
        return list(found.values())
