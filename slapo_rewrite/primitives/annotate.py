"""`annotate`: sets an attribute of a parameter."""

from __future__ import annotations

import ast
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.parameter_attributes import Annotate as Change
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.text import may_be_bound
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Primitive, parameter_hint
from slapo_rewrite.primitives.shard import SAMPLE


class Annotate(Primitive):
    """Set an attribute on a parameter, for the training code to read.

    All other primitives keep it, and a tied parameter has it under all of its names.
    `load_state_dict` keeps it as well, even if it replaces the parameter (`assign=True`, `to_empty`
    before it).

    Rewrite:
        self.up = nn.Linear(width, 4 * width)
        -->
        self.up = nn.Linear(width, 4 * width)
        annotate(self.up, "weight", no_decay=True)

    Shapes: Unchanged.
    Numerics: Exact.
    State: Unchanged.

    Raises:
        SR203 no such parameter; SR206 a key that is not an identifier, or that parameters have
        already, or a value that is not a literal; SR306 the same key twice, under any name of a
        tied parameter; SR103 the code that makes the parameter is not found.

    Source: Slapo, arXiv 2302.08005.
    """

    name = "annotate"
    needs_calls = False
    examples = (
        SAMPLE.example(
            """\
s["down"].annotate("bias", "no_decay", True)
s["down"].annotate("bias", "group", "biases")
""",
            """\
+from .annotations import annotate
+        annotate(self.down, "bias", no_decay=True, group="biases")
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR203", 's["up"].annotate("wieght", "tag", 1)'),
        SAMPLE.refused("SR206", 's["up"].annotate("weight", "grad", 1)'),
        SAMPLE.refused("SR206", 's["up"].annotate("weight", "tag", object())'),
        SAMPLE.refused(
            "SR306", 's["up"].annotate("weight", "tag", 1)', 's["*"].annotate("weight", "tag", 2)'
        ),
    )

    @staticmethod
    def takes(param_name: str, key: str, value: Any) -> None:
        """`annotate(param_name, key, value)`."""

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Adds the attribute."""
        name, key, value = (call.arguments[n] for n in ("param_name", "key", "value"))
        parameter = node.parameters.get(name)
        if parameter is None:
            is_buffer = name in node.buffers
            raise errors.UnknownParameter(
                f"{node.shown} ({node.cls.__name__}) has no parameter `{name}`"
                + (": it is a buffer" if is_buffer else ""),
                hint="`model.to(...)` creates new buffers, without the attributes"
                if is_buffer
                else parameter_hint(name, node, node.parameters),
            )
        if not may_be_bound(key):
            raise errors.BadArgument(f"{key!r} is not a valid name of an attribute")
        if hasattr(parameter, key):
            raise errors.BadArgument(
                f"parameters already have an attribute `{key}`", hint="choose another name"
            )
        for earlier, cause in state.asks(Change):
            if (earlier.name, earlier.key) == (name, key):
                raise errors.ConflictingEdits(
                    f"`{node.path}.{name}` already has an attribute `{key}`: {earlier.value}",
                    cause=cause,
                    hint="remove one of the two lines",
                )
        return state.asking(Change(name, key, self._literal(value)), call.directive)

    def _literal(self, value: Any) -> str:
        """The value as a literal; raises `BadArgument` if it is not one."""
        text = repr(value)
        try:
            again = ast.literal_eval(text)
            unordered = any(isinstance(n, ast.Set) for n in ast.walk(ast.parse(text)))
            if repr(again) == text and again == value and not unordered:
                return text
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
        raise errors.BadArgument(
            f"{text} is no literal",
            hint="give a number, a string, True, None, or a tuple, list or dict of these",
        )
