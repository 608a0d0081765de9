"""`explain`: tells why a pattern is not found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Example, Question
from slapo_rewrite.primitives.find import MLP, MODEL, SAMPLE, found


class Explain(Question):
    """Print where a pattern is found, or how far the search came and what stopped it.

    For each selected module without a match of `find`, it prints the nearest miss: the line of the
    model that stopped the search, and the line of the pattern. It returns the same text.

    Rewrite:
        Nothing is rewritten.

    Shapes: Not checked.
    Numerics: As for `find`.
    State: Unchanged.

    Raises:
        SR210 the pattern is not a pure computation.
        SR305 the module was replaced by one whose source is not known.

    Source: nearest misses are our own; for the pattern language see `find`.
    """

    name = "explain"
    examples = (
        Example(
            MLP,
            MODEL
            + """\
def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def schedule(s):
    s.explain(tanh_gelu)
""",
            printed="""\
`tanh_gelu` is not found in the model, forward: the pattern has 'tanh' where the model has 'none' (1 of 1 operations found)
   --> source_0.py:16:30
   |
16 |         return x + self.down(self.act(y))
   |                              ^^^^^^^^^^^ 'none' here
   ::: s.py:20:34
   |
20 |     return F.gelu(x, approximate="tanh")
   |                                  ^^^^^^ 'tanh'
   = help: values that vary have to be parameters of the pattern
""",  # noqa: E501
        ),
    )
    refusals = (SAMPLE.refused("SR210", "s.explain(lambda x: x)"),)

    @staticmethod
    def takes(
        pattern: Callable[..., Any] | type | str,
        *,
        concrete_args: Mapping[str, object] | None = None,
    ) -> None:
        """`explain(pattern, *, concrete_args=None)`."""

    def answer(self, call: Call, nodes: list[Node]) -> str:
        """The matches, or the nearest misses."""
        matches = found(call, nodes)
        text = "\n".join([*map(str, matches), *(miss.render() for miss in matches.misses)])
        print(text or "no match, and no near miss")
        return text
