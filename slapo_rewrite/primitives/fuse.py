"""`fuse`: turns a computation into one call of a kernel, a compiled function or a method."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.code.text import joined_path, may_be_bound
from slapo_rewrite.examples import Sample, setting
from slapo_rewrite.fusion.claims import Calling, Claim
from slapo_rewrite.fusion.engine import Engine
from slapo_rewrite.fusion.extract_function import moved
from slapo_rewrite.fusion.match_rules import look, scopes_for
from slapo_rewrite.fusion.registry import rules
from slapo_rewrite.model.tree import Node
from slapo_rewrite.patterns.search import Match
from slapo_rewrite.primitives.base import Call, Rewriting
from slapo_rewrite.primitives.find import MLP, found
from slapo_rewrite.primitives.matched import carried_out, engine_of, nothing_found, opening

COMPILERS = (None, "inductor", "triton")
MASKED = """\
import torch
from torch import nn
from torch.nn import functional as F


class Masked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x, mask=None):
        x = x + self.up(x)
        if mask is not None:
            x = x * mask
        return F.gelu(x)
"""
RESIDUAL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.up(x)
        return x + self.down(F.gelu(x))
"""
KEPT = """\
def add_and_gelu(x, y):
    total = x + y
    gated = F.gelu(total)
    return gated, total


"""
PLAIN = setting("MLP(8)", imports="from torch.nn import functional as F\n")
BIAS_GELU = """\
def bias_gelu(x, bias):
    return F.gelu(x + bias)


"""
SAMPLE = Sample(MLP, PLAIN + BIAS_GELU)


class Fuse(Rewriting):
    """Replace the operations that a pattern matches in the selected modules by one call.

    With `compiler="inductor"` they become a function of the model file, compiled by
    `torch.compile`, with the pattern's operands as parameters; with `"triton"` the call of a kernel
    that one of the tool's rules has for them; without a compiler a method. The function or method
    has the name of the pattern, or `name`; `concrete_args` is as for `find`. If the pattern returns
    a tuple, the call returns all of its results: `normed, x = self._both(x, y)`.

    Rewrite:
        y = self.up(x)
        y = self.bias + y
        return x + self.down(self.act(y))
        -->
        y = self.up(x)
        return x + self.down(bias_gelu(y, self.bias, self.act))

    Shapes: Unchanged.
    Numerics: Exact without a compiler; else as the compiler or the rule computes.
    State: Unchanged.

    Raises:
        SR105 the name is taken; SR206 an unknown compiler; SR210 the pattern is not a pure
        computation; SR309 the pattern is not found, or no rule has a kernel for it.

    Source: Slapo, arXiv 2302.08005, section 3.3 (`fuse`).
    """

    name = "fuse"
    examples = (
        SAMPLE.example(
            's.fuse(bias_gelu, compiler="inductor")',
            """\
+@torch.compile
+def bias_gelu(x, bias, act):
+    \"""The part of `MLP.forward` that computes `bias_gelu`, compiled.\"""
+    y = bias + x
+    return act(y)
-        y = self.bias + y
-        return x + self.down(self.act(y))
+        return x + self.down(bias_gelu(y, self.bias, self.act))
""",
            about="a compiled function",
        ),
        SAMPLE.example(
            's.fuse(bias_gelu, name="activate")',
            """\
-        y = self.bias + y
-        return x + self.down(self.act(y))
+        return x + self.down(self.activate(y))
+    def activate(self, x):
+        \"""The part of `forward` that computes `bias_gelu`.\"""
+        y = self.bias + x
+        return self.act(y)
""",
            about="a method",
        ),
        Sample(RESIDUAL, PLAIN.replace("MLP", "Residual") + KEPT).example(
            "s.fuse(add_and_gelu)",
            """\
-        x = x + self.up(x)
-        return x + self.down(F.gelu(x))
+        gated, x = self._add_and_gelu(x, self.up(x))
+        return x + self.down(gated)
+    def _add_and_gelu(self, x, y):
+        \"""The part of `forward` that computes `add_and_gelu`.\"""
+        x = x + y
+        return F.gelu(x), x
""",
            about="two results",
        ),
        Sample(MASKED, PLAIN.replace("MLP", "Masked") + BIAS_GELU).example(
            's.fuse(bias_gelu, "inductor", concrete_args={"mask": None})',
            """\
+@torch.compile
+def bias_gelu(x, bias):
+    \"""The part of `Masked.forward` that computes `bias_gelu`, compiled.\"""
+    x = x + bias
+    return F.gelu(x)
-        x = x + self.up(x)
+            x = x + self.up(x)
-        return F.gelu(x)
+            return F.gelu(x)
+        else:
+            return bias_gelu(x, self.up(x))
""",
            about="past a branch that goes one way",
        ),
    )
    refusals = (
        SAMPLE.refused("SR206", 's.fuse(bias_gelu, compiler="nvfuser")'),
        SAMPLE.refused("SR309", 's.fuse(lambda x: F.relu(x), name="relu")'),
        SAMPLE.refused("SR105", 's.fuse(bias_gelu, name="forward")'),
    )

    @staticmethod
    def takes(
        pattern: Callable[..., Any] | type | str,
        compiler: str | None = None,
        name: str | None = None,
        *,
        concrete_args: Mapping[str, object] | None = None,
    ) -> None:
        """`fuse(pattern, compiler=None, name=None, *, concrete_args=None)`."""

    def rewrites(self, call: Call, nodes: list[Node]) -> Rewrite:
        """The edits that turn the matches into functions, methods or kernels."""
        compiler = call.arguments["compiler"]
        if compiler not in COMPILERS:
            raise errors.BadArgument(
                f"`compiler` must be one of {', '.join(map(repr, COMPILERS))}, not {compiler!r}"
            )
        name = name_of(call)
        matches = found(call, nodes)
        if not matches:
            raise nothing_found(name, matches.nearest)
        engine = engine_of(call)
        if any(match.drawn is not None for match in matches):
            claims = [opening(engine, match, name) for match in matches]
        elif compiler == "triton":
            claims = [self._kernel(call, match) for match in matches]
        else:
            names: dict[tuple[str, str], object] = {}
            claims = [self._claim(call, engine, match, name, names) for match in matches]
        return carried_out(engine, claims, [])

    def _claim(
        self,
        call: Call,
        engine: Engine,
        match: Match,
        name: str,
        names: dict[tuple[str, str], object],
    ) -> Claim:
        """The claim that makes a match a function or method; `names` holds those made so far."""
        node, file = call.tree.nodes[match.path], call.sources.main
        scopes = scopes_for([node], call.sources)
        graph = next(
            s.graph for s in scopes if s.function == match.function and s.graph.file is match.file
        )
        if match.file is not file or not match.replaced.whole:  # the engine refuses it
            return Claim(match, node, Calling(name, name, ()), {}, name)
        method = call.arguments["compiler"] is None
        function = engine.sharing.function_of(match.replaced.node)
        owner = engine.sharing.owner_of(function)
        if method and owner is None:
            raise errors.NoMatch(
                f"`{match.function}` is not a method, so `{name}` cannot be a method",
                at=match.place,
                hint='write a function instead: compiler="inductor"',
            )
        body = moved(match, graph, method)
        plain = shown = name if call.arguments["name"] or not method else f"_{name}"
        content, number = (tuple(body.lines), tuple(body.arguments)), 2
        while names.setdefault((owner or "" if method else "", shown), content) != content:
            shown, number = f"{plain}_{number}", number + 1
        self._check_name(call, shown, owner, match)
        said = call.arguments["pattern"]
        what = said if isinstance(said, str) else getattr(said, "__name__", shown)
        what = shown if what == "<lambda>" else what
        called = tuple(body.arguments)
        where = joined_path(owner or "", match.function)
        if method:
            doc = f"The part of `{match.function}` that computes `{what}`."
            body.arguments = {"self": "", **body.arguments}
            text = body.written(f"def {shown}", doc, 4, engine.file.line_length)
            del body.arguments["self"]
            expression = Calling(shown, f"{file.name}.self.{shown}", called)
            return Claim(match, node, expression, body.arguments, shown, method=text, moved=True)
        doc = f"The part of `{where}` that computes `{what}`, compiled."
        head = f"@{engine.speller('torch.compile')}\ndef {shown}"
        text = body.written(head, doc, 0, engine.file.line_length)
        expression = Calling(shown, f"{file.name}.{shown}", called)
        return Claim(match, node, expression, body.arguments, shown, function=text, moved=True)

    def _check_name(self, call: Call, name: str, owner: str | None, match: Match) -> None:
        """Checks that a name is free where the function or method is defined."""
        file, node = call.sources.main, call.tree.nodes[match.path]
        compiled = call.arguments["compiler"] is not None
        taken = name in file.names if compiled else hasattr(node.live, name)
        if taken:
            where = file.path.name if compiled else f"`{owner}`"
            raise errors.NameTaken(
                f"`{name}` already means something else in {where}",
                hint='choose another name: fuse(..., name="...")',
            )

    def _kernel(self, call: Call, match: Match) -> Claim:
        """The rule's claim of the same operations."""
        node = call.tree.nodes[match.path]
        known = [rule for rule in rules().values() if rule.kernels]
        for rule in known:
            for claim in look(rule, [node], call.sources).claims:
                if claim.match.replaced.node is match.replaced.node:
                    return claim
        names = ", ".join(rule.name for rule in known)
        raise errors.NoMatch(
            f"no rule has a kernel for the matches of `{name_of(call)}`",
            at=match.place,
            hint=f'the rules with kernels are {names}; compiler="inductor" compiles anything',
        )


def name_of(call: Call) -> str:
    """The name of the function or method for a call's pattern."""
    given, pattern = call.arguments["name"], call.arguments["pattern"]
    name = given if given is not None else getattr(pattern, "__name__", type(pattern).__name__)
    if isinstance(name, str) and may_be_bound(name) and not isinstance(given or pattern, str):
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if isinstance(given, str) and may_be_bound(given):
        return given
    if given is None and call.arguments["compiler"] == "triton":
        return "the pattern"
    if given is not None:
        raise errors.BadArgument(f"{given!r} is no name")
    raise errors.BadArgument(
        "the pattern has no name for the new function", hint='give it a name: fuse(..., name="...")'
    )
