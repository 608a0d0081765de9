"""`replace_all`: replaces every module of a type by one of another class."""

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

    `type` is a class, or the name of a class in the rewritten file. `make` is a class or function,
    as for `replace`.

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        -->
        self.up = ScaledLinear(width, 4 * width)
        self.down = ScaledLinear(4 * width, width)

    Shapes: As the new module has them.
    Numerics: As the new module computes; `--verify` compares.
    State: As with `replace`.
    Raises: SR202 no module is of this type; errors of `replace`.

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
